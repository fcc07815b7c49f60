"""Tests what guests get that run several sequences in a forward: how many candidates, and for which sequences."""

import asyncio
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bridge.guest_sequence import GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.sources.source import Offer, Outcome
from tests.support.memory import in_own_process
from tests.support.reciting import IDS, MS, guest_of, opened, stepped


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("most", [1, 3])
async def test_an_answer_has_candidates_for_forwards_after_the_next(most: int, others: int) -> None:
    """For an engine that receives it late, also if one forward cannot verify them all."""
    costs, ids = BatchCosts(), range(1, 2 + others)
    for number in range(200):  # candidates cost nothing
        costs.observe(2, 2 * (number % 4), 2e7)
    guest = guest_of(costs=costs)
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(IDS[:150])) for id_ in ids))
    for id_ in ids:
        await opened(guest, id_)
    updates = [SequenceUpdate(id_, 150, (IDS[150],), max_candidate_count=most) for id_ in ids]
    answer = await stepped(guest, 2, *updates, deadline_ns=10**9)
    guest.close()
    for one in answer.proposed:
        assert one.width == most and one.offer.token_ids == tuple(IDS[151 : 151 + 3 * most])
    assert len(answer.proposed) == 1 + others


async def test_an_expensive_forward_gets_fewer_candidates() -> None:
    """Compares an engine whose forwards cost the same at any width with one where each token adds to the cost."""
    verified = {}
    for name, slope in (("flat", 0.0), ("steep", 2.0)):
        costs = BatchCosts()
        for number in range(200):
            costs.observe(8, 8 * (number % 4), 2e7 * (1 + slope * (number % 4)))
        guest = guest_of(costs=costs)
        await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(IDS[: 150 + id_])) for id_ in range(8)))
        await asyncio.gather(*(opened(guest, id_) for id_ in range(8)))
        updates = [SequenceUpdate(id_, 150 + id_, (IDS[150 + id_],)) for id_ in range(8)]
        answer = await stepped(guest, 2, *updates, deadline_ns=10**9)
        verified[name] = sum(one.width for one in answer.proposed)
        guest.close()
    assert verified["steep"] < verified["flat"] and verified["flat"] > 8


async def test_candidates_that_seem_too_expensive_are_tried_now_and_then() -> None:
    """Otherwise a few slow forwards, as on a busy machine, would rule them out forever."""
    costs = BatchCosts()
    for number in range(200):
        costs.observe(8, 8 * (number % 4), 2e7 * (1 + 50.0 * (number % 4)))
    guest = guest_of(costs=costs)
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(IDS[: 100 + id_])) for id_ in range(8)))
    await asyncio.gather(*(opened(guest, id_) for id_ in range(8)))
    tried = []
    for number in range(250):
        ends = {id_: 100 + id_ + number for id_ in range(8)}
        updates = [SequenceUpdate(id_, end, (IDS[end % 150],)) for id_, end in ends.items()]
        answer = await stepped(guest, number + 2, *updates, deadline_ns=10**9)
        if answer.proposed:
            tried.append(number)
            assert all(one.width == 1 for one in answer.proposed)
    guest.close()
    assert 2 <= len(tried) <= 3


@pytest.mark.parametrize("reason", ["a plain forward", "no gain", "the deadline"])
async def test_candidates_that_are_not_worth_verifying_any_more_are_withdrawn(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and only from sequences that the bridge has looked at: others may still use an earlier answer."""
    now, costs = 0, BatchCosts()
    for number in range(200):  # candidates cost nothing
        costs.observe(2, 2 * (number % 4), 2e7)
    guest = guest_of(clock=lambda: now, costs=costs)

    async def forward(number: int) -> Answer:
        ends = {id_: 140 + id_ + number for id_ in (1, 2)}
        updates = [SequenceUpdate(id_, end, (IDS[end],)) for id_, end in ends.items()]
        return await stepped(guest, number + 2, *updates, deadline_ns=0)

    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(IDS[: 140 + id_])) for id_ in (1, 2)))
    for id_ in (1, 2):
        await opened(guest, id_)
    answer = await forward(0)
    assert {one.sequence_id for one in answer.proposed} == {1, 2} and not answer.withdrawn
    commit = GuestSequence.commit

    def slow(sequence: GuestSequence, *arguments: Any) -> Outcome:
        nonlocal now
        now += 10 * MS
        return commit(sequence, *arguments)

    with monkeypatch.context() as patch:
        if reason == "the deadline":
            patch.setattr(GuestSequence, "commit", slow)
        if reason == "a plain forward":
            patch.setattr("bridge.guest._PLAIN_FORWARDS", 1)
        else:
            patch.setattr(GuestSequence, "best_offer", lambda *_: (Offer(), []))
        answers = [await forward(number) for number in (1, 2)]
    assert not any(one.proposed for one in answers)
    # Each of these steps has time for one sequence, and each sequence gets its turn.
    assert [sorted(one.withdrawn) for one in answers] == ([[1], [2]] if reason == "the deadline" else [[1, 2], []])
    guest.close()


async def test_a_short_deadline_goes_to_good_offers_first_and_to_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = 0, list[GuestSequence]()
    best_offer = GuestSequence.best_offer

    def slow(sequence: GuestSequence, considered: int) -> tuple[Offer, list[float]]:
        nonlocal now
        now += 400_000
        looked.append(sequence)
        return best_offer(sequence, considered)

    guest = guest_of(clock=lambda: now)
    half = len(IDS) // 2
    texts = [IDS, *([number, *range(40, 400)] for number in range(7))]
    starts = [half, *([40] * 7)]
    updates = [SequenceUpdate(number, 0, tuple(texts[number][: starts[number]])) for number in range(8)]
    await stepped(guest, 1, *updates, deadline_ns=10**9)
    monkeypatch.setattr(GuestSequence, "best_offer", slow)
    for step in range(40):
        updates = [
            SequenceUpdate(number, start + step, (texts[number][start + step],)) for number, start in enumerate(starts)
        ]
        await stepped(guest, step + 2, *updates, deadline_ns=0)  # a millisecond
    counts = [looked.count(held.sequence) for held in guest.held.values() if held.sequence]
    assert len(looked) < 40 * 8, "the deadline was long enough for all"
    assert counts[0] >= 38 and min(counts) >= 5 and max(counts[1:]) < 20


async def _last_widths(time_of: Callable[[int], float], **more: int) -> tuple[float, BatchCosts]:
    """Returns the candidates of each of eight sequences in the last forwards, given a forward's time by all candidates.

    `more`: of each step. All candidates are right.
    """
    costs, ids, updates = BatchCosts(), IDS * 20, list[SequenceUpdate]()
    guest, ends, verified = guest_of(costs=costs), [150 + id_ for id_ in range(8)], list[int]()
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(ids[:end])) for id_, end in enumerate(ends)))
    await asyncio.gather(*(opened(guest, id_) for id_ in range(8)))
    widths = [0] * 8
    for number in range(2, 100):
        updates = []
        for id_, width in enumerate(widths):
            new = tuple(ids[ends[id_] : ends[id_] + width + 1])
            updates.append(SequenceUpdate(id_, ends[id_], new, 0, None, number - 1 if width else 0, width))
            ends[id_] += width + 1
        engine_ns = int(time_of(sum(widths)))
        answer = await guest.step(StepUpdate(number, tuple(updates), (), 10**9, engine_ns, **more))
        await guest.settle()
        widths = [next((one.width for one in answer.proposed if one.sequence_id == id_), 0) for id_ in range(8)]
        verified.append(sum(widths))
    guest.close()
    return sum(verified[-40:]) / 40 / 8, costs


def _steep(candidate_count: int) -> float:
    return 2e7 * (1 + candidate_count / 8)


@pytest.mark.parametrize("right", [True, False])
async def test_candidates_that_no_forward_verified_show_how_often_they_are_right(right: bool) -> None:
    """Otherwise a guest whose candidates once seemed too unlikely would never learn that they are right."""
    costs, ends = BatchCosts(), {id_: 150 + id_ for id_ in range(4)}
    for number in range(200):  # candidates cost too much to verify any
        costs.observe(4, 4 * (number % 4), 2e7 * (1 + 50.0 * (number % 4)))
    guest, ids = guest_of(costs=costs), IDS * 3
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, tuple(ids[:end])) for id_, end in ends.items()))
    sequences = [await opened(guest, id_) for id_ in ends]
    chances = [sequences[0]._estimates.shared.chances["suffix"].of_group(group) for group in range(7)]
    for number in range(20):
        updates = [SequenceUpdate(id_, end + number, (ids[end + number],)) for id_, end in ends.items()]
        if not right:
            updates = [replace(one, token_ids=((one.token_ids[0] + 1 + number) % 90 + 5,)) for one in updates]
        answer = await stepped(guest, number + 2, *updates)
        assert not answer.proposed
    found = [sequences[0]._estimates.shared.chances["suffix"].of_group(group) for group in range(7)]
    guest.close()
    assert found != chances and (sum(found) > sum(chances)) is right


async def test_the_times_of_shared_forwards_change_widths() -> None:
    flat, _ = await _last_widths(lambda _: 2e7)
    steep, costs = await _last_widths(_steep)
    assert steep < 0.5 * flat and flat > 4
    assert costs.of_all(np.array([32.0])) > 2 * costs.of_all(np.array([8.0]))


async def test_the_time_of_a_forward_that_also_ran_a_prompt_changes_none() -> None:
    widths, costs = await _last_widths(_steep, forward_token_count=1000)
    steep, _ = await _last_widths(_steep)
    assert widths > 2 * steep
    assert costs.of_all(np.arange(1.0, 65.0)).tolist() == BatchCosts().of_all(np.arange(1.0, 65.0)).tolist()


async def test_the_time_of_a_step_in_which_a_sequence_begins_changes_none() -> None:
    """The engine has read its prompt."""
    costs = BatchCosts()
    guest = guest_of(costs=costs)
    for number in range(1, 40):
        known = [SequenceUpdate(id_, 20 + number - id_, (IDS[20 + number - id_],)) for id_ in range(1, number)]
        new = SequenceUpdate(number, 0, tuple(IDS[:21]))
        await stepped(guest, number, *known, new, engine_ns=20 * MS * number)
        await opened(guest, number)
    guest.close()
    assert costs.of_all(np.arange(1.0, 65.0)).tolist() == BatchCosts().of_all(np.arange(1.0, 65.0)).tolist()


async def _many(count: int) -> tuple[float, float]:
    """Returns the bytes and the seconds of a step that a sequence takes, of `count` that share all forwards."""
    guest, times = guest_of(), list[float]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await stepped(guest, 1, *(SequenceUpdate(id_, 0, (id_ % 300, *IDS[:63])) for id_ in range(count)))
    await asyncio.gather(*(opened(guest, id_) for id_ in range(count)))
    for number in range(5):
        began = time.perf_counter()
        updates = [SequenceUpdate(id_, 64 + number, (IDS[63 + number],)) for id_ in range(count)]
        await stepped(guest, number + 2, *updates)
        times.append(time.perf_counter() - began)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    guest.close()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * used / count, min(times) / count


def _of_many(count: int) -> tuple[float, float]:
    return asyncio.run(_many(count))


def test_thousands_of_sequences_take_little_memory_and_time() -> None:
    used_bytes, seconds = in_own_process(_of_many, 4000)
    assert used_bytes < 32_000 and seconds < 0.0005
