"""Tests the draft as a source: its epochs, when it is synced, and when the target no longer waits for it."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from bridge.errors import PromptTooLong, Unreachable
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.ports import Proposal
from bridge.sources.draft import DraftEpoch
from bridge.sources.source import DraftPace, offer_of
from bridge.text.translation import DraftContext
from tests.support.alone import PROMPT
from tests.support.drafted import WORDS, commit, draft_source, ids_of, propose


async def test_a_draft_is_left_alone_while_it_is_right_and_sent_back_where_it_is_not() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8))
    assert (drafter.syncs[0].credit, drafter.syncs[0].batch_token_count) == (8, 1)
    await propose(source, drafter, " fox jumps")
    commit(tape, source, " fox")
    await source.advance(DraftPace(8))
    assert len(drafter.syncs) == 1
    assert drafter.grants and drafter.grants[0][0] == 1, "it may stay as far ahead as before"
    ahead = source.propose()
    assert ahead is not None and ahead.data == b" jumps"
    commit(tape, source, " sleeps")
    assert source.propose() is None
    assert source.stale
    await source.advance(DraftPace(8))
    second = drafter.syncs[1]
    assert second.epoch == 2
    held = [*drafter.syncs[0].token_ids, *ids_of(" fox jumps")][: second.keep_token_count]
    assert WORDS.spell([*held, *second.token_ids]).endswith(b" fox sleeps")
    assert not source.stale


async def test_a_draft_that_lags_gets_its_lead_from_where_the_target_is() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8))
    await propose(source, drafter, " fox")  # two tokens of two bytes
    commit(tape, source, " fox jumps")
    await source.advance(DraftPace(8))
    assert drafter.grants == [(1, 5)], "two tokens are used up, and three more will be"


def test_a_prompt_that_a_draft_cannot_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(PromptTooLong, match="context of 512 tokens"):
        draft_source(PROMPT * 100)


async def test_a_draft_whose_context_is_full_is_given_up() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8))
    await propose(source, drafter, " fox", done=True)
    commit(tape, source, " a" * 300)
    await source.advance(DraftPace(8))
    assert len(drafter.syncs) == 2
    await propose(source, drafter, " b", done=True)
    commit(tape, source, " a" * 300)
    with pytest.raises(PromptTooLong, match="context of 512 tokens"):
        await source.advance(DraftPace(8))
    assert len(drafter.syncs) == 2, "it could answer nothing"


async def test_a_draft_that_runs_ahead_is_not_waited_for_once_it_hangs() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8))
    for answer_comes in (True, False):
        for _ in range(3):
            commit(tape, source, " a", timed_out=True)
            assert not source.state.overdue
        if answer_comes:
            await propose(source, drafter, " b")
            await source.advance(DraftPace(8))
    commit(tape, source, " a", timed_out=True)
    assert source.state.overdue and not source.state.awaited
    await propose(source, drafter, " b")
    assert not source.state.overdue


@pytest.mark.parametrize("pace", [DraftPace(8), DraftPace(3, turns=True)])
async def test_a_draft_that_owes_an_answer_for_long_is_given_up(pace: DraftPace) -> None:
    now = 1000
    source, drafter, tape = draft_source(clock=lambda: now)
    await source.advance(pace)
    await propose(source, drafter, " fox", done=True)
    now += 3_600_000_000_000
    commit(tape, source, " fox", timed_out=False)
    assert source.propose() is None, "it owed nothing in that hour"
    unanswered_from = now
    with pytest.raises(Unreachable, match="it has sent nothing for 33 seconds"):
        for _ in range(5):  # another sync does not start the time anew
            await source.advance(pace)
            now += 11_000_000_000
            commit(tape, source, " a", timed_out=False)
            source.propose()
    assert now - unanswered_from > 30_000_000_000


async def test_a_draft_has_time_to_read_a_long_prompt() -> None:
    second, now = 1_000_000_000, 1000
    times = DraftEstimates([(1, second), (17, 17 * second)])
    source, drafter, tape = draft_source(PROMPT * 8, times=times, clock=lambda: now)
    await source.advance(DraftPace(8))
    reading_ns = times.reading_ns(len(drafter.syncs[0].token_ids))
    assert reading_ns > 40 * second
    now += 30 * second + int(3.9 * reading_ns)
    commit(tape, source, " a")
    assert source.propose() is None
    await propose(source, drafter, " fox")
    now += 31 * second
    commit(tape, source, " a")
    with pytest.raises(Unreachable, match="it has sent nothing for 31 seconds"):  # it has read the prompt
        source.propose()


async def test_a_draft_that_joins_late_has_time_to_read_what_was_generated_before() -> None:
    second, now = 1_000_000_000, 1000
    times = DraftEstimates([(1, second), (17, 17 * second)])
    source, drafter, tape = draft_source(times=times, clock=lambda: now)
    tape.commit(ids_of(" fox jumps over the lazy dog" * 20))
    lag = source.state.lag_token_count
    await source.advance(DraftPace(8))
    assert lag == pytest.approx(len(drafter.syncs[0].token_ids), rel=0.5), "by the average bytes of a token"
    reading_ns = times.reading_ns(lag)
    assert reading_ns > 40 * second
    now += 30 * second + int(3.9 * reading_ns)
    commit(tape, source, " a")
    assert source.propose() is None
    now += int(0.2 * reading_ns)
    commit(tape, source, " a")
    with pytest.raises(Unreachable, match="it has sent nothing"):
        source.propose()


class RecordedTimes(DraftEstimates):
    """Records the round trip of each proposal, and whether the draft ran ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, bool]] = []
        self.news = asyncio.Event()

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None:
        self.seen.append((round_trip_ns, ahead))
        self.news.set()


@pytest.mark.parametrize("pace", [DraftPace(8), DraftPace(8, turns=True)])
async def test_a_round_trip_is_the_time_that_the_draft_did_not_work(pace: DraftPace) -> None:
    """It is known for the first proposal after a sync."""
    times, now = RecordedTimes(), 1000
    source, drafter, _ = draft_source(times=times, clock=lambda: now)
    await source.advance(pace)
    source.start(lambda: None)
    for taken in (100, 50):
        now += taken
        drafter.queue.put_nowait(Proposal(1, ids_of(" a")[:1], (), queue_ns=20, forward_ns=30))
        async with asyncio.timeout(60):
            await times.news.wait()
        times.news.clear()
    source.close()
    assert times.seen == [(70, not pace.turns), (None, not pace.turns)]


async def test_a_turn_is_waited_for_until_it_is_late() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(3, turns=True))
    assert (drafter.syncs[0].credit, drafter.syncs[0].batch_token_count) == (3, 3)
    assert source.state.awaited
    await source.advance(DraftPace(3, turns=True))
    assert len(drafter.syncs) == 1, "it receives one sync"
    commit(tape, source, " a", timed_out=True)
    assert source.state.overdue and not source.state.awaited
    await source.advance(DraftPace(3, turns=True))
    assert len(drafter.syncs) == 1, "it receives no other sync before it has answered"
    await propose(source, drafter, " fox", done=True)
    assert not source.state.overdue
    assert source.stale
    await source.advance(DraftPace(3, turns=True))
    assert len(drafter.syncs) == 2


async def test_a_turn_that_the_draft_ends_early_is_over() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8, turns=True, min_probability=0.25))
    assert drafter.syncs[0].min_batch_probability == 0.25
    count = len(ids_of(" fox"))
    before = source.times.goes_on.of(count)
    await propose(source, drafter, " fox", done=True)
    assert not source.state.awaited
    assert source.times.goes_on.of(count) < before
    goes_on = source.times.goes_on_if_right.of(count)
    commit(tape, source, " fox", tried=" fox")
    assert source.times.goes_on_if_right.of(count) < goes_on, "it ended after one that was right"
    await source.advance(DraftPace(8, turns=True))
    assert len(drafter.syncs) == 2 and drafter.syncs[1].min_batch_probability == 0.0
    await propose(source, drafter, " jumps", done=True)
    before, goes_on = source.times.goes_on.of(1), source.times.goes_on_if_right.of(1)
    commit(tape, source, " jumps", tried=" jumps")
    after = source.times.goes_on.of(1), source.times.goes_on_if_right.of(1)
    assert after == (before, goes_on), "it may not end this turn early"
    source.close()


async def test_a_turn_that_was_verified_in_part_has_not_ended_there() -> None:
    source, drafter, tape = draft_source()
    await source.advance(DraftPace(8, turns=True, min_probability=0.25))
    await propose(source, drafter, " fox jumps", done=True)
    count = len(ids_of(" fox"))
    goes_on = source.times.goes_on_if_right.of(count)
    commit(tape, source, " fox", tried=" fox")
    assert source.times.goes_on_if_right.of(count) >= goes_on
    source.close()


async def test_a_draft_that_runs_ahead_ends_nothing_early() -> None:
    source, drafter, _ = draft_source()
    await source.advance(DraftPace(8, min_probability=0.25))
    assert drafter.syncs[0].min_batch_probability == 0.0
    source.close()


async def test_a_long_text_is_encoded_without_holding_up_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    source, drafter, tape = draft_source()
    source.model = replace(source.model, context_length=10_000)
    await source.advance(DraftPace(8))
    turn = DraftPace(8, turns=True)
    append, free = DraftContext.append, threading.Event()

    def slow(*args: Any) -> tuple[int, list[int]]:
        assert free.wait(60), "the event loop waits for the encoder"
        return append(*args)

    monkeypatch.setattr(DraftContext, "append", slow)
    commit(tape, source, " fox jumps" * 1000)
    syncing = asyncio.create_task(source.advance(turn))
    await asyncio.sleep(0)
    commit(tape, source, " over")
    await source.advance(turn)
    free.set()
    await syncing
    assert len(drafter.syncs) == 2
    held = [*drafter.syncs[0].token_ids, *drafter.syncs[1].token_ids]
    assert WORDS.spell(held).endswith(b" fox jumps" * 1000)
    await propose(source, drafter, " over it", done=True)
    ahead = source.propose()
    assert ahead is not None and ahead.data == b" it", "what was committed meanwhile is known"


def test_an_epoch_that_agrees_for_long_costs_no_more() -> None:
    """Only the offsets after the committed text are read."""

    class Counted(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            Counted.read += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self) -> Any:
            raise AssertionError("all offsets are read")

    epoch = DraftEpoch(1, 10_000, False, b"")
    epoch._offsets = Counted(epoch._offsets)
    for _ in range(5000):
        epoch.add(1, b"ab", 0.9)
    epoch.observe(b"ab" * 4990)
    assert epoch.reached_token_count == 4990
    ahead = epoch.ahead()
    assert ahead is not None and ahead.starts == tuple(range(0, 20, 2)) and len(ahead.confidences) == 10
    assert Counted.read < 50


async def test_what_a_draft_reads_next_is_its_lag() -> None:
    source, drafter, tape = draft_source("The quick brown fox jumps over the lazy dog, again and again")
    assert source.state.lag_token_count > 10
    await source.advance(DraftPace(3, turns=True))
    await propose(source, drafter, " fox", done=True)
    commit(tape, source, " fox")
    assert source.state.lag_token_count == 1
    commit(tape, source, " jumps over the lazy dog")
    assert source.state.lag_token_count > 4


async def test_a_draft_need_not_read_again_what_it_has_read_lately() -> None:
    """Neither a prompt that came before nor a conversation that goes on.

    A draft that was not used, has not answered or was lost has read nothing.
    """
    times, prompt = DraftEstimates(), "The quick brown fox jumps over the lazy dog, again and again"
    lags = []
    for way in ("unused", "unanswered", "lost", "used", "used", "longer"):
        source, drafter, _ = draft_source(prompt + " once more" * (way == "longer"), times=times)
        lags.append(source.state.lag_token_count)
        if way != "unused":
            await source.advance(DraftPace(3, turns=True))
        if way in ("used", "lost"):
            await propose(source, drafter, " fox", done=True)
        if way == "lost":
            source._error = Unreachable("host:1", "gone")
        for _ in range(2):
            source.close()
    assert lags[0] == lags[1] == lags[2] == lags[3] > 10
    assert lags[4] == 1
    assert 1 < lags[5] < lags[0]


def test_a_control_token_other_than_an_end_closes_an_epoch() -> None:
    source, _, _ = draft_source()
    epoch = DraftEpoch(1, 8, False, b"")
    for id_ in (*ids_of(" fox"), 3, *ids_of(" never")):
        source._add(epoch, id_, 0.9)
    assert epoch.done and not epoch.ended
    assert bytes(epoch.unconfirmed) == b" fox"


def test_the_end_of_the_text_is_as_sure_as_the_draft_is() -> None:
    source, _, _ = draft_source()
    end = next(iter(source.model.special_ids.eos))
    epoch = DraftEpoch(1, 8, False, b"")
    for id_, confidence in zip((*ids_of(" fox"), end), (*(0.9 for _ in ids_of(" fox")), 0.3), strict=True):
        source._add(epoch, id_, confidence)
    ahead = epoch.ahead()
    assert ahead is not None and ahead.closes and epoch.done
    offer = offer_of(source.model.vocabulary, [ahead], end_id=end)
    assert (offer.token_ids[-1], offer.evidence[-1]) == (end, 0.3)
    epoch.observe(b" fox")
    ahead = epoch.ahead()
    assert ahead is not None and (ahead.data, ahead.starts, ahead.confidences) == (b"", (0,), (0.3,))


def test_half_a_character_is_proposed_before_what_follows() -> None:
    """The prompt ended inside a character: the draft first adds its other half, which is committed already."""
    epoch = DraftEpoch(1, 8, False, "é".encode()[1:])
    assert epoch.ahead() is None
    epoch.add(1, "é".encode()[1:] + b"t", 0.9)
    ahead = epoch.ahead()
    assert ahead is not None and ahead.data == b"t"
    assert (ahead.starts, ahead.confidences) == ((), ()), "the token starts before the text's end"
    other = DraftEpoch(1, 1, True, "é".encode()[1:])
    other.add(1, b"x", 0.9)
    assert other.parted and other.ahead() is None
    assert not other.stale, "another sync would give the same"
