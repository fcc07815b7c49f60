"""What goes wrong on a guest's side, or in its draft, costs little and not for long."""

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest

from bridge.errors import Unreachable
from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.ports import Sync
from bridge.sources.source import Draft
from bridge.text.chat import render_ids_for
from bridge.text.models import Model
from bridge.text.vocabulary import Rendering
from services.errors import SandboxBusy
from tests.support import tiny
from tests.support.memory import in_own_process
from tests.support.reciting import FRESH, IDS, MODEL, MS, TEXT, Reciting, guest_of, joined, opened, recited, stepped


class Failing(Reciting):
    """A draft whose stream breaks when it is used."""

    async def sync(self, sync: Sync) -> None:
        self.queue.put_nowait(Unreachable("the draft", "it was restarted"))


async def test_a_sequence_whose_draft_failed_gets_another_after_a_while() -> None:
    drafters: list[Reciting] = [Failing(TEXT), Failing(TEXT), Reciting(TEXT)]
    shared, found = GuestOpening(MODEL, TargetEstimates()), list[int]()

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        found.append(number)
        model = tiny.model("byte_level")
        return Draft(model, drafters[len(found) - 1], shared.estimates.draft(model.name))

    number = 0
    guest = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:20])))
    sequence = await opened(guest, 1)
    for number in range(120):
        await stepped(guest, number + 2, SequenceUpdate(1, 20 + number, (IDS[20 + number],)))
        while sequence._speculation.sources.seeking:
            await asyncio.sleep(0.01)
            await stepped(guest, 1000, SequenceUpdate(1, 21 + number, ()))
    assert [one.closed for one in drafters] == [True, True, False]
    assert sequence.has_draft
    assert 32 <= found[1] <= 36 and 96 <= found[2] <= 104, "each pause is twice as long as the one before"
    guest.close()
    assert drafters[2].closed


async def test_an_answer_that_comes_while_the_draft_is_asked_is_used_at_once() -> None:
    class Instant(Reciting):
        async def sync(self, sync: Sync) -> None:
            await super().sync(sync)
            for _ in range(5):  # to send a message lets other work run
                await asyncio.sleep(0)

    ids = list(MODEL.vocabulary.pieces(FRESH).ids)
    guest = guest_of(Instant(FRESH))
    # A forward of a second: however busy this machine is, the draft's turns are worth waiting for.
    forwards, accepted = await recited(guest, ids, 3, 10**9, engine_ns=10**9)
    guest.close()
    assert accepted["draft"] >= 20
    assert forwards <= 12


async def test_a_wait_whose_time_was_used_up_before_it_began_was_in_vain() -> None:
    """It does not show that the draft had nothing to propose."""

    class Slow(Reciting):
        async def sync(self, sync: Sync) -> None:
            await super().sync(sync)
            await asyncio.sleep(seconds)

    shared, seconds = GuestOpening(MODEL, TargetEstimates([(1, 20 * MS), (9, 22 * MS)])), 0.0

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        model = tiny.model("byte_level")
        return Draft(model, Slow(FRESH, hangs=True), times)

    times = shared.estimates.draft(tiny.model("byte_level").name, [(1, MS), (17, 2 * MS)], competes=True)
    guest, ids = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft), list(MODEL.vocabulary.pieces(FRESH).ids)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(ids[:3])))
    sequence = await opened(guest, 1)
    await joined(guest, 1)
    seconds = 0.1
    answer = await stepped(guest, 2, SequenceUpdate(1, 3, (ids[3],)), deadline_ns=50 * MS)
    assert sequence._speculation.plan.pace.turns and not answer.proposed
    known = times.positions.of_group(0)
    await stepped(guest, 3, SequenceUpdate(1, 4, (ids[4],)))
    assert times.positions.of_group(0) == known
    guest.close()


async def test_a_draft_whose_context_is_shorter_than_the_prompt_is_not_tried_again_soon() -> None:
    shared, drafter, found = GuestOpening(MODEL, TargetEstimates()), Reciting(TEXT), list[int]()

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        found.append(number)
        model = tiny.model("byte_level", context_length=16)
        return Draft(model, drafter, shared.estimates.draft(model.name))

    guest = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft)
    number = 1
    await stepped(guest, number, SequenceUpdate(1, 0, tuple(IDS[:40])))
    await opened(guest, 1)
    for number in range(2, 50):
        await joined(guest, 1)
        await stepped(guest, number, SequenceUpdate(1, 38 + number, (IDS[38 + number],)))
    assert found == [1] and drafter.closed and not drafter.read
    guest.close()


async def test_a_bug_that_meets_a_draft_s_prompt_costs_only_the_draft(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("bridge.guest_sequence.render_ids_for", fails)
    drafter = Reciting(TEXT)
    guest = guest_of(drafter)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:150])))
    await opened(guest, 1)
    await joined(guest, 1)
    answer = await stepped(guest, 2, SequenceUpdate(1, 150, (IDS[150],)))
    assert answer.proposed and set(answer.proposed[0].offer.sources) == {"suffix"}
    assert drafter.closed and "Traceback" in caplog.text and "a bug" in caplog.text
    guest.close()


async def test_a_sequence_whose_draft_could_not_be_opened_gets_one_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that renders chats may be busy for a moment."""
    rendered = list[int]()

    def render(model: Model, ids: Sequence[int], source: Model) -> Rendering:
        rendered.append(len(ids))
        if len(rendered) == 1:
            raise SandboxBusy("it is running for other chats")
        return render_ids_for(model, ids, source)

    monkeypatch.setattr("bridge.guest_sequence.render_ids_for", render)
    drafter = Reciting(TEXT)
    guest = guest_of(drafter)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:20])))
    sequence = await opened(guest, 1)
    await joined(guest, 1)
    assert drafter.closed and not sequence.has_draft
    number = 0
    while not sequence.has_draft and number < 60:
        await stepped(guest, number + 2, SequenceUpdate(1, 20 + number, (IDS[20 + number],)))
        await joined(guest, 1)
        number += 1
    guest.close()
    assert 32 <= number <= 36, "as after a draft that failed"


async def test_a_trial_is_one_forward() -> None:
    """The outcome of a forward is known after the next one was planned."""
    guest, plain = guest_of(), []
    ids = IDS * 10
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(ids[:200])))
    await opened(guest, 1)
    known, width = 200, 0
    for number in range(2, 330):
        update = SequenceUpdate(1, known, tuple(ids[known : known + width + 1]), 0, 2, number - 1, width)
        answer = await stepped(guest, number, update, deadline_ns=10**9)
        known, width = known + width + 1, sum(one.width for one in answer.proposed)
        if not width:
            plain.append(number)
    guest.close()
    assert len(plain) >= 3
    assert all(later - before > 50 for before, later in pairwise(plain)), plain


async def test_a_sequence_that_goes_back_keeps_its_prompt_and_counts_no_text() -> None:
    openings: list[tuple[int, int]] = []
    shared = GuestOpening(MODEL, TargetEstimates())

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        openings.append((len(ids), generated))
        return GuestSequence(shared, ids, generated)

    guest = Guest(MODEL, open_, BatchCosts())
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:60]), 40))
    assert (await opened(guest, 1)).statistics.target_pass_count == 0, "no forward has been seen"
    await stepped(guest, 2, SequenceUpdate(1, 60, tuple(IDS[60:62])))
    await stepped(guest, 3, SequenceUpdate(1, 50, tuple(IDS[70:74])))
    assert (await opened(guest, 1)).tape.generated_token_count == 34
    await stepped(guest, 4, SequenceUpdate(1, 10, tuple(IDS[70:74])))
    assert openings == [(60, 40), (54, 34), (14, 0)]
    guest.close()
    assert shared.estimates.text_tokens.count == TargetEstimates().text_tokens.count


@pytest.mark.parametrize("deadline_ms", [0, 10_000])
async def test_a_step_of_many_sequences_gives_way_to_others(deadline_ms: int) -> None:
    """So does what follows it, which with a short deadline is most of the work."""
    guest, longest = guest_of(), 0.0

    async def other() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    count = 600
    await guest.step(StepUpdate(1, tuple(SequenceUpdate(id_, 0, tuple(IDS[:50])) for id_ in range(count))))
    await guest.settle()
    await asyncio.gather(*(opened(guest, id_) for id_ in range(count)))
    updates = tuple(SequenceUpdate(id_, 50, tuple(IDS[50:90])) for id_ in range(count))
    update = StepUpdate(2, updates, deadline_ns=deadline_ms * 1_000_000)
    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    gc.disable()
    began = time.thread_time()
    await guest.step(update)
    await asyncio.sleep(0)
    await guest.settle()
    taken = time.thread_time() - began
    await asyncio.sleep(0)
    gc.enable()
    task.cancel()
    guest.close()
    assert longest < taken / 2, "it was divided"
    assert longest < 0.02


async def _held_after(step_counts: Sequence[int]) -> list[int]:
    """Returns the memory in bytes after each number of further steps without new tokens."""
    guest = guest_of()
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:150])))
    await opened(guest, 1)
    held, number = list[int](), 1
    tracemalloc.start()
    for count in step_counts:
        for _ in range(count):
            number += 1
            answer = await stepped(guest, number, SequenceUpdate(1, 150, ()))
        held.append(tracemalloc.get_traced_memory()[0])
    guest.close()
    assert answer.proposed
    return held


def _held(step_counts: Sequence[int]) -> list[int]:
    return asyncio.run(_held_after(step_counts))


def test_an_engine_that_asks_without_new_tokens_takes_no_more_memory() -> None:
    few, many = in_own_process(_held, (100, 1000))
    assert many - few < 200_000


async def test_what_a_sequence_holds_is_reported_until_it_cannot_be_followed() -> None:
    """The limit on all guests together counts it; what is idle for long is ended by when it was named last."""
    shared, held, now = GuestOpening(MODEL, TargetEstimates()), list[tuple[int, int]](), 1000

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def clock() -> int:
        return now

    guest = Guest(MODEL, open_, BatchCosts(), on_held=lambda *one: held.append(one), clock=clock)
    await stepped(guest, 1, SequenceUpdate(1, 0, tuple(IDS[:20])))
    await opened(guest, 1)
    assert not guest.opening
    now = 2000
    await stepped(guest, 2, SequenceUpdate(1, 20, tuple(IDS[20:22])))
    now = 3000
    await stepped(guest, 3)
    assert guest.stepped_ns == 2000, "the last step named no sequence"
    await stepped(guest, 4, SequenceUpdate(1, 22, (MODEL.vocabulary_size,)))
    assert held == [(1, 20), (1, 22), (1, 0)]
    guest.close()


@pytest.mark.parametrize(("free", "asked", "most"), [(100, None, 24), (100, 5, 5), (9, None, 8), (9, 5, 5), (0, 5, 0)])
def test_candidates_have_room_in_the_context(free: int, asked: int | None, most: int) -> None:
    """The forward's own token needs a place, too."""
    sequence = GuestSequence(GuestOpening(MODEL, TargetEstimates()), [70] * (MODEL.context_length - free), 0)
    sequence.limit(asked)
    assert sequence.max_width == most
