"""Tests the bridge's side of a guest without services: the cost of a draft that hangs, and batches of sequences."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.planning.prediction import Plan
from bridge.sources.source import Draft, Offer, Outcome
from bridge.statistics import Statistics
from tests.support import tiny
from tests.support.reciting import FRESH, IDS, MODEL, MS, TEXT, Reciting, guest_of, joined, opened, recited, stepped


async def test_an_engine_that_waits_gets_the_draft_s_turns() -> None:
    drafter = Reciting(FRESH)
    guest = guest_of(drafter)
    ids = list(MODEL.vocabulary.pieces(FRESH).ids)
    forwards, accepted = await recited(guest, ids, 3, 10**9)
    guest.close()
    assert accepted["draft"] >= 10
    assert forwards <= len(ids) - 3 - accepted["draft"] + 1


async def test_forwards_without_candidates_do_not_count_under_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text in which prompt lookup finds something only now and then."""
    guest, repeated = guest_of(), IDS[:12]
    ids = list(MODEL.vocabulary.pieces(FRESH).ids)
    text = [*repeated, *ids[:10], *repeated, *ids[10:20], *repeated, *ids[20:30], *repeated, *ids[30:]]
    counted, observe = list[tuple[str, bool]](), Statistics.observe

    def noted(self: Statistics, outcome: Outcome, plan: Plan) -> None:
        counted.append((plan.name, bool(outcome.tried.token_ids)))
        observe(self, outcome, plan)

    monkeypatch.setattr(Statistics, "observe", noted)
    await recited(guest, text, 30, MS)
    for number, id_ in enumerate([*repeated, repeated[0]], start=len(text)):  # the engine can verify nothing
        await stepped(guest, 1000 + number, SequenceUpdate(1, number, (id_,), max_candidate_count=0))
    guest.close()
    assert counted.count(("suffix", True)) > 3 and counted.count(("plain", False)) > 10
    assert ("suffix", False) not in counted


@pytest.mark.parametrize("deadline_ms", [0, 2, 50])
async def test_a_draft_that_hangs_costs_at_most_deadlines(deadline_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = guest_of(Reciting(FRESH, hangs=True))
    ids = list(MODEL.vocabulary.pieces(FRESH).ids)
    step, times = guest.step, list[float]()

    async def timed(update: StepUpdate) -> Answer:
        started = time.perf_counter()
        answer = await step(update)
        times.append(time.perf_counter() - started)
        return answer

    monkeypatch.setattr(guest, "step", timed)
    forwards, accepted = await recited(guest, ids, 3, deadline_ms * 1_000_000)
    guest.close()
    assert forwards >= len(ids) - 4 - accepted["suffix"] and not accepted["draft"]
    # On a busy machine, other steps may take as long as those that wait.
    waits = sum(taken >= deadline_ms / 1000 for taken in times)
    assert deadline_ms < 50 or waits < forwards / 2, "the bridge does not wait for it in every step"


@pytest.mark.parametrize(("competes", "most"), [(False, None), (False, 3), (False, 0), (True, None)])
async def test_drafts_run_ahead_of_sequences_that_share_all_forwards(competes: bool, most: int | None) -> None:
    """But not those on the engine's own cores, which would slow down the forwards of all.

    They run further ahead than one forward can verify, also while the engine reads a prompt and verifies nothing.
    """
    shared, model = GuestOpening(MODEL, TargetEstimates()), tiny.model("byte_level")
    drafters, offered = [Reciting(FRESH), Reciting(FRESH)], list[str]()
    free, times = list(drafters), shared.estimates.draft(model.name, [(1, MS)], competes=competes)
    for place in range(6400):  # it was always right
        times.positions.observe(place % 16 + 1, 1.0)

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        return Draft(model, free.pop(), times)

    guest, ids = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft), list(MODEL.vocabulary.pieces(FRESH).ids)
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(ids[:3])) for id_ in (1, 2)))
    for number in range(3, 20):
        for id_ in (1, 2):
            await opened(guest, id_)
            await joined(guest, id_)
        updates = [SequenceUpdate(id_, number, (ids[number],), max_candidate_count=most) for id_ in (1, 2)]
        answer = await stepped(guest, number, *updates)
        assert all(one.width <= (24 if most is None else most) for one in answer.proposed)
        offered += [source for one in answer.proposed for source in one.offer.sources[: one.width]]
    guest.close()
    assert not free
    if competes:
        assert not any(one.read for one in drafters)
        return
    assert offered.count("draft") >= 10 or most == 0
    assert all(max(one.credits) >= 8 for one in drafters)


async def test_a_rejected_draft_starts_again_at_the_engine_s_tokens() -> None:
    """The engine rejects what the draft proposed; the draft then receives the engine's own tokens."""
    drafter = Reciting(TEXT)
    guest = guest_of(drafter)
    await recited(guest, IDS[:40] + IDS[60:80], 10, 10**9)
    guest.close()
    whole = MODEL.vocabulary.spell(IDS[:40] + IDS[60:80])
    assert all(whole.startswith(read) for read in drafter.read)
    assert len(drafter.read[-1]) > len(MODEL.vocabulary.spell(IDS[:40]))


async def test_a_draft_that_comes_late_proposes_for_the_rest() -> None:
    drafter = Reciting(FRESH)
    guest = guest_of(drafter, late=True)
    ids = list(MODEL.vocabulary.pieces(FRESH).ids)
    _, accepted = await recited(guest, ids, 3, 10**9)
    assert accepted["draft"] >= 10
    assert FRESH.startswith(drafter.read[0]) and len(drafter.read[0]) > len(MODEL.vocabulary.spell(ids[:3]))
    guest.close()
    assert drafter.closed


@pytest.mark.parametrize("deadline_ms", [2, 1000])
@pytest.mark.parametrize("rejected", [False, True])
async def test_a_draft_that_joins_works_at_once(deadline_ms: int, rejected: bool) -> None:
    """So does one that was always wrong and has not been tried for long."""
    shared = GuestOpening(MODEL, TargetEstimates([(1, 20 * MS), (9, 22 * MS)]))
    model, drafter, forward = tiny.model("byte_level"), Reciting(FRESH), 0
    times = shared.estimates.draft(model.name, [(1, MS), (17, 2 * MS)])
    if rejected:
        times.idle_pass_count = 100_000
        for place in range(6400):
            times.positions.observe(place % 16 + 1, 0.0)

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        return Draft(model, drafter, times) if forward > 6 else None

    guest, ids = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft), list(MODEL.vocabulary.pieces(FRESH).ids)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(ids[:3])))
    sequence = await opened(guest, 1)
    while not sequence.has_draft and forward < 20:
        forward += 1
        update = SequenceUpdate(1, forward + 2, (ids[forward + 2],))
        await stepped(guest, forward + 1, update, deadline_ns=deadline_ms * MS)
        await joined(guest, 1)
    assert sequence.has_draft and drafter.read
    guest.close()


@pytest.mark.parametrize("late", [False, True])
async def test_a_sequence_that_loses_its_draft_goes_on(late: bool) -> None:
    drafter = Reciting(TEXT)
    guest = guest_of(drafter, late=late)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:20])))
    sequence = await opened(guest, 1)
    await stepped(guest, 2, SequenceUpdate(1, 20, ()))
    assert not sequence.awaits_draft
    sequence.release_draft()
    assert drafter.closed and sequence.awaits_draft and not sequence.has_draft
    drafter.closed = False
    answer = await stepped(guest, 3, SequenceUpdate(1, 20, tuple(IDS[20:150])))
    assert answer.proposed and set(answer.proposed[0].offer.sources) == {"suffix"}
    assert not sequence.awaits_draft, "it has a draft again"
    guest.close()
    assert drafter.closed, "also one that is still being opened"


async def test_candidates_that_the_engine_left_out_do_not_count() -> None:
    outcomes: list[Outcome] = []
    guest = guest_of(on_outcome=outcomes.append)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:150])))
    await opened(guest, 1)
    answer = await stepped(guest, 2, SequenceUpdate(1, 150, (IDS[150],)))
    assert answer.proposed[0].offer.token_ids[:3] == tuple(IDS[151:154])
    # It reports three verified candidates, but it chose its second token itself.
    await stepped(guest, 3, SequenceUpdate(1, 151, tuple(IDS[151:153]), candidate_step=2, candidate_count=3))
    guest.close()
    assert [(len(one.tried.token_ids), one.result.accepted_token_count) for one in outcomes] == [(1, 1)]


@pytest.mark.parametrize("method", ["commit", "_open_sequence", "choose", "best_offer", "settle"])
async def test_a_bug_costs_one_sequence_its_candidates(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Reciting(TEXT)
    guest = guest_of(drafter)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:150])))
    await opened(guest, 1)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        if method == "_open_sequence":
            patch.setattr(guest, method, fails)
        await stepped(guest, 2, SequenceUpdate(2, 0, tuple(IDS[:149])))
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(guest.held[2].opening), 60)  # type: ignore[arg-type]
        if sequence := guest.held[2].sequence:
            patch.setattr(sequence, method, fails)
        await stepped(guest, 3, SequenceUpdate(2, 149, (IDS[149],)))
        updates = [SequenceUpdate(1, 150, (IDS[150],)), SequenceUpdate(2, 150, (IDS[150],))]
        answer = await stepped(guest, 4, *updates, deadline_ns=10**9)
        assert [one.sequence_id for one in answer.proposed] == [1]
    assert guest.held[2].refused and drafter.closed is (method != "_open_sequence")
    assert caplog.text.count("a bug in the bridge") == 1
    drafter.closed = False
    await stepped(guest, 5, SequenceUpdate(2, 0, tuple(IDS[:150])))
    await opened(guest, 2)
    answer = await stepped(guest, 6, SequenceUpdate(2, 150, (IDS[150],)))
    assert answer.proposed, "the engine may send it again"
    guest.close()


async def test_a_sequence_alone_has_its_candidates_withdrawn() -> None:
    guest = guest_of()
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:150])))
    sequence = await opened(guest, 1)
    updates = [SequenceUpdate(1, 150, (IDS[150],)), SequenceUpdate(1, 151, (7,)), SequenceUpdate(1, 152, (9,))]
    answers = [await stepped(guest, number, update) for number, update in enumerate(updates, 2)]
    guest.close()
    assert [bool(one.proposed) for one in answers] == [True, False, False], "nothing repeats after other tokens"
    assert [one.withdrawn for one in answers] == [[], [1], []]
    # A forward that has waited for its draft in vain keeps what an earlier answer offered.
    sequence.propose(kept := Answer(5), 1, Offer((5,), ("draft",)), 1)
    sequence._timed_out = True
    sequence.propose(kept, 1, Offer(), 0)
    assert kept.proposed and not kept.withdrawn


async def test_a_sequence_that_gains_much_at_once_is_opened_in_a_thread() -> None:
    """Indexing thousands of tokens would hold up all other engines."""
    model = tiny.model("sentencepiece", context_length=1 << 17)
    shared, opened_lengths = GuestOpening(model, TargetEstimates()), list[int]()

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        opened_lengths.append(len(ids))
        return await asyncio.to_thread(GuestSequence, shared, ids, generated)

    guest, ids = Guest(model, open_, BatchCosts()), (IDS * 400)[:100_000]
    await stepped(guest, 1, SequenceUpdate(7, 0, tuple(ids[:100])))
    await opened(guest, 7)
    answer = await stepped(guest, 2, SequenceUpdate(7, 100, tuple(ids[100:])))
    assert not answer.unknown and not answer.note
    await opened(guest, 7)
    assert opened_lengths == [100, len(ids)]
    answer = await stepped(guest, 3, SequenceUpdate(7, len(ids), tuple(IDS[:1])))
    assert answer.proposed and answer.proposed[0].base == len(ids) + 1


@pytest.mark.parametrize("deadline_ms", [0, 1000])
async def test_a_sequence_has_candidates_from_its_first_step_if_there_is_time(deadline_ms: int) -> None:
    shared, release, half = GuestOpening(MODEL, TargetEstimates()), asyncio.Event(), len(IDS) // 2

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        await release.wait()
        return GuestSequence(shared, ids, generated)

    guest = Guest(MODEL, open_, BatchCosts())
    if deadline_ms:
        asyncio.get_running_loop().call_soon(release.set)
    answer = await stepped(guest, 1, SequenceUpdate(7, 0, tuple(IDS[:half])), deadline_ns=deadline_ms * 1_000_000)
    assert bool(answer.proposed) is bool(deadline_ms)
    release.set()
    await opened(guest, 7)
    if deadline_ms:
        assert answer.proposed[0].base == half
        assert list(answer.proposed[0].offer.token_ids[:4]) == IDS[half : half + 4]
    answer = await stepped(guest, 2, SequenceUpdate(7, half, tuple(IDS[half : half + 2])))
    assert answer.proposed[0].base == half + 2
    assert list(guest.held[7].tokens) == IDS[: half + 2], "no token counts twice"


async def test_an_opening_that_ends_while_another_is_awaited_counts_no_token_twice() -> None:
    release = asyncio.Event()
    shared = GuestOpening(MODEL, TargetEstimates())

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        await release.wait()
        return GuestSequence(shared, ids, generated)

    guest = Guest(MODEL, open_, BatchCosts())
    await stepped(guest, 1, SequenceUpdate(7, 0, tuple(IDS[:40])), deadline_ns=0)
    asyncio.get_running_loop().call_later(0.05, release.set)
    await stepped(guest, 2, SequenceUpdate(7, 40, tuple(IDS[40:42])), SequenceUpdate(8, 0, (5, 6)), deadline_ns=10**9)
    assert [list(guest.held[id_].tokens) for id_ in (7, 8)] == [IDS[:42], [5, 6]]
    await stepped(guest, 3, SequenceUpdate(7, 42, tuple(IDS[42:44])), SequenceUpdate(8, 2, (7,)))
    assert [list(guest.held[id_].tokens) for id_ in (7, 8)] == [IDS[:44], [5, 6, 7]]


async def test_the_lengths_of_texts_are_learned() -> None:
    shared = GuestOpening(MODEL, TargetEstimates())

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    guest, before = Guest(MODEL, open_, BatchCosts()), shared.estimates.text_tokens.count
    await stepped(guest, 1, SequenceUpdate(7, 0, tuple(IDS[:100])))
    await stepped(guest, 2, SequenceUpdate(7, 100, tuple(IDS[100:103])))
    guest.end(7, complete=True)
    guest.close()
    assert shared.estimates.text_tokens.count == before + 1
    assert shared.estimates.text_tokens.value < 200


async def test_an_update_that_comes_twice_in_a_step_counts_once() -> None:
    guest = guest_of(None)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:100])))
    await opened(guest, 1)
    update = SequenceUpdate(1, 100, tuple(IDS[100:103]))
    await stepped(guest, 2, update, update)
    assert list(guest.held[1].tokens) == list(IDS[:103])
    guest.close()
