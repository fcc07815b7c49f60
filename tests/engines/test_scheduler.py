"""Tests the forwards of sequences that share a model: what they contain, and what fails or leaves in their middle."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import numpy as np
import pytest

from bridge.errors import BrokenLogits, EngineFailure, InvalidGrammar
from bridge.sampling.sampler import Logits
from services.engines.job import Timed
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from services.engines.slots import Slots
from tests.support.waiting import eventually
from tests.support.watched import Holding, Watched, after, drop, ids


@pytest.fixture
def engine() -> Watched:
    return Watched()


@pytest.fixture
def scheduler(engine: Watched) -> Iterator[Scheduler]:
    running = Scheduler(lambda: engine)
    yield running
    running.close()


@pytest.fixture
def sequence(scheduler: Scheduler) -> CachedSequence:
    return CachedSequence(scheduler)


async def test_a_long_prompt_stalls_nobody(
    monkeypatch: pytest.MonkeyPatch, engine: Watched, scheduler: Scheduler
) -> None:
    # Otherwise a forward begins without the talking sequence where this process is slow to ask for its next token.
    monkeypatch.setattr("services.engines.scheduler._LINGER_NS", (1_000_000_000, 1_000_000_000))
    talking = CachedSequence(scheduler)
    talking.replace(0, ids(5))
    reading = asyncio.create_task(after(scheduler, ids(4000, 1)))
    count = 0
    while not reading.done():
        choice = await talking.forward((), lambda logits: int(logits[0].argmax()))
        talking.accept((choice.value,), 0)
        count += 1
    assert count > 15
    shared = [rows for rows in engine.forwards if len(rows) == 2]
    assert len(shared) > 15
    assert max(len(row.token_ids) for rows in shared for row in rows) <= 128


async def test_two_long_prompts_share_a_forward(engine: Watched, scheduler: Scheduler) -> None:
    engine.gate.clear()
    reading = [asyncio.create_task(after(scheduler, ids(count, count))) for count in (2000, 600)]
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    await asyncio.to_thread(eventually, lambda: len(engine.forwards[0]) == 2 or scheduler._inbox.qsize() == 1)
    engine.gate.set()
    await asyncio.gather(*reading)
    both = [rows for rows in engine.forwards if len(rows) == 2]
    assert both
    assert all(sum(len(row.token_ids) for row in rows) <= 512 + 1 for rows in engine.forwards)


async def test_load_squeezes_out_candidates_never_tokens() -> None:
    engine = Watched(slot_count=16)
    scheduler = Scheduler(lambda: engine)

    async def widths(count: int) -> list[int]:
        engine.forwards.clear()
        sequences = []
        for seed in range(count):
            sequence = CachedSequence(scheduler)
            sequence.replace(0, ids(4, seed))
            sequences.append(sequence)
        got = await asyncio.gather(*(one.forward(ids(12, 99), np.array) for one in sequences))
        for sequence in sequences:
            sequence.close()
        return [len(one.value) - 1 for one in got]

    assert await widths(1) == [12]
    crowded = await widths(16)
    full = [rows for rows in engine.forwards if len(rows) == 16]
    assert all(sum(len(row.token_ids) for row in rows) <= 64 for rows in full)
    assert sum(crowded) < 12 * 16
    # The width is shared evenly: no sequence gets all of it.
    assert max(crowded) <= 12
    assert sorted(crowded)[8] <= sorted(crowded)[-1] <= sorted(crowded)[8] + 9
    scheduler.close()


async def test_prompts_share_a_chunk_evenly(engine: Watched, scheduler: Scheduler) -> None:
    engine.gate.clear()
    first = asyncio.create_task(after(scheduler, ids(6, 9)))
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    reading = [asyncio.create_task(after(scheduler, ids(1500, seed))) for seed in (1, 2, 3)]
    await asyncio.to_thread(eventually, lambda: scheduler._inbox.qsize() == 3)
    engine.gate.set()
    await asyncio.gather(first, *reading)
    together = [rows for rows in engine.forwards if len(rows) == 3]
    assert [len(row.token_ids) for row in together[0]] == [170, 171, 171]


async def test_a_crash_fails_the_sequence_concerned_and_no_other(engine: Watched, scheduler: Scheduler) -> None:
    prompts = [ids(40, 1), [*ids(10, 2), Watched.poison], ids(50, 3)]
    results = await asyncio.gather(*(after(scheduler, prompt) for prompt in prompts), return_exceptions=True)
    assert isinstance(results[1], EngineFailure)
    for index in (0, 2):
        np.testing.assert_array_equal(results[index][-1], engine.logits(prompts[index]))
    assert scheduler.alive
    # Its slot can be used again.
    np.testing.assert_array_equal((await after(scheduler, ids(10, 2)))[-1], engine.logits(ids(10, 2)))


async def test_a_forward_that_fails_is_not_repeated_for_sequences_that_have_left() -> None:
    engine = Holding()
    scheduler = Scheduler(lambda: engine)
    engine.gate.clear()
    first = asyncio.create_task(after(scheduler, ids(6)))
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    prompts = [ids(10, 1), [*ids(10, 2), Watched.poison], ids(10, 3)]
    running = [asyncio.create_task(after(scheduler, prompt)) for prompt in prompts]
    await asyncio.to_thread(eventually, lambda: scheduler._inbox.qsize() == 3)
    engine.gate.set()
    await first
    await asyncio.to_thread(eventually, lambda: len(engine.forwards) == 2)
    for one in (running[0], running[2]):
        one.cancel()
    await asyncio.sleep(0)
    engine.gate.set()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(results[1], EngineFailure)
    await drop(scheduler, ids(6, 4))
    assert [len(rows) for rows in engine.forwards] == [1, 3, 1, 1]
    scheduler.close()


async def test_nobody_waits_for_a_thread_that_has_ended() -> None:
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine)
    first = CachedSequence(scheduler)
    first.replace(0, ids(5))
    await first.forward((), len)
    waiting = asyncio.create_task(after(scheduler, ids(6, 1)))
    await asyncio.sleep(0)
    await asyncio.to_thread(scheduler.close)
    with pytest.raises(EngineFailure, match="restart this server"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(EngineFailure, match="restart this server"):
        await first.forward((), len)
    assert not scheduler.alive


async def test_a_result_tells_the_time_in_forwards_and_the_time_before_them() -> None:
    engine = Watched(slot_count=1)
    engine.seconds = 0.02
    scheduler = Scheduler(lambda: engine)
    begun = perf_counter_ns()
    first, second = CachedSequence(scheduler), CachedSequence(scheduler)
    first.replace(0, ids(1000))  # two forwards
    second.replace(0, ids(6, 1))

    async def ran(sequence: CachedSequence) -> Timed[int]:
        try:
            return await sequence.forward((), len)
        finally:
            sequence.close()

    results = await asyncio.gather(ran(first), ran(second))
    elapsed = perf_counter_ns() - begun
    assert 40_000_000 <= results[0].forward_ns < elapsed
    assert 20_000_000 <= scheduler.slowest_ns < elapsed
    assert results[1].queue_ns >= 40_000_000, "it waited for the slot of the first"
    assert all(one.queue_ns + one.forward_ns <= elapsed for one in results)
    scheduler.close()


async def test_a_sequence_that_violates_its_grammar_fails_alone_and_keeps_its_cache(
    engine: Watched, scheduler: Scheduler, sequence: CachedSequence
) -> None:
    sequence.replace(0, ids(40))

    def refuse(logits: Logits) -> None:
        raise InvalidGrammar("sampling.regex", "is too complex")

    with pytest.raises(InvalidGrammar):
        await asyncio.wait_for(sequence.forward((), refuse), 60)
    np.testing.assert_array_equal(await drop(scheduler, ids(6, 1)), [engine.logits(ids(6, 1))])
    assert len(engine.forwards) == 2
    sequence.close()
    await drop(scheduler, ids(40))
    assert [len(row.token_ids) for row in engine.forwards[-1]] == [1]


async def test_what_a_forward_without_numbers_has_cached_is_not_used_again(
    engine: Watched, scheduler: Scheduler, sequence: CachedSequence
) -> None:
    sequence.replace(0, ids(40))

    def refuse(logits: Logits) -> None:
        raise BrokenLogits(float("nan"))

    for count in (1, 2):
        with pytest.raises(BrokenLogits):
            await asyncio.wait_for(sequence.forward((), refuse), 60)
        assert scheduler.failure_count == count
    sequence.close()
    await drop(scheduler, ids(40))
    assert [len(row.token_ids) for row in engine.forwards[-1]] == [40] and scheduler.failure_count == 0


def best(logits: Logits) -> int:
    """Returns an id that is not `Watched.poison`."""
    return int(np.argmax(logits[0])) % 180 + 20


def times(count: int) -> Callable[[int], int | None]:
    """Returns a function that lets a job go on `count` times with the id that it chose."""
    left = iter(range(count))
    return lambda id_: id_ if next(left, None) is not None else None


async def test_a_job_goes_on_with_the_ids_that_it_chose(scheduler: Scheduler, sequence: CachedSequence) -> None:
    other = asyncio.create_task(drop(scheduler, ids(2000, seed=2)))  # several forwards, at the same time
    # From the beginning, after a rollback, and with another id after one.
    for keep, new in ((0, ids(6)), (4, []), (5, [77])):
        sequence.replace(keep, new)
        expected = list(sequence.ids)
        for _ in range(4):
            expected.append(best(await drop(scheduler, expected)))
        values = [one.value for one in await sequence.run_on(best, times(3))]
        sequence.accept(values, len(values) - 1)
        assert sequence.ids == expected
    await other
    sequence.close()


async def test_accepted_candidates_and_chosen_ids_are_not_run_again(engine: Watched, sequence: CachedSequence) -> None:
    sequence.replace(0, ids(6))
    await sequence.forward(ids(3, seed=9), len)
    sequence.accept((*ids(2, seed=9), 50), 2)
    result = await sequence.forward((), np.array)
    np.testing.assert_array_equal(result.value, [engine.logits([*ids(6), *ids(2, seed=9), 50])])
    assert result.token_count == 1
    for _ in range(2):
        sequence.accept((60,), 0)
        results = await sequence.run_on(best, times(2))
        assert [one.token_count for one in results] == [1, 1, 1]
        sequence.accept([one.value for one in results[:2]], 2)


async def test_the_last_id_of_a_forward_that_failed_is_run_again(engine: Watched, sequence: CachedSequence) -> None:
    sequence.replace(0, ids(6))
    await sequence.forward((), len)
    with pytest.raises(EngineFailure):
        await sequence.forward((engine.poison,), len)
    engine._cache[engine.forwards[-1][0].slot][5:] = [99]  # the forward may have written half of it
    sequence.replace(6, [50])
    found = await sequence.forward((), np.array)
    np.testing.assert_array_equal(found.value, [engine.logits([*ids(6), 50])])


async def test_a_job_whose_next_id_fails_gives_no_result_and_its_cache_is_not_trusted(
    engine: Watched, scheduler: Scheduler, sequence: CachedSequence
) -> None:
    sequence.replace(0, ids(6))
    with pytest.raises(EngineFailure):
        await sequence.run_on(best, lambda value: engine.poison)
    sequence.replace(6, [50])
    found = await sequence.forward((), np.array)
    assert np.array_equal(found.value, await drop(scheduler, [*ids(6), 50]))


async def test_a_job_that_is_cancelled_goes_on_no_further(
    engine: Watched, scheduler: Scheduler, sequence: CachedSequence
) -> None:
    engine.seconds = 0.01
    sequence.replace(0, ids(6))
    task = asyncio.create_task(sequence.run_on(best, lambda value: value))  # by itself it would never end
    await asyncio.to_thread(eventually, lambda: len(engine.forwards) > 3)
    task.cancel()
    sequence.close()
    await drop(scheduler, ids(6, seed=1))
    count = len(engine.forwards)
    await drop(scheduler, ids(6, seed=2))
    assert len(engine.forwards) == count + 1


async def test_what_is_cancelled_leaves_the_batch() -> None:
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine)
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids(4000))
    reading = asyncio.create_task(sequence.forward((), len))
    engine.gate.clear()
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    sequence.close()
    engine.gate.set()
    np.testing.assert_array_equal((await after(scheduler, ids(6, 1)))[-1], engine.logits(ids(6, 1)))
    assert engine.token_count < 4000
    scheduler.close()


async def test_what_is_cancelled_leaves_the_batch_also_while_its_sequence_stays() -> None:
    engine = Watched(slot_count=2)
    scheduler = Scheduler(lambda: engine)
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids(4000))
    engine.gate.clear()
    reading = asyncio.create_task(sequence.forward((), len))
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    reading.cancel()
    await asyncio.sleep(0.02)
    engine.gate.set()
    for _ in range(20):  # during which the cancelled job would progress
        await drop(scheduler, ids(6, 1))
    assert engine.token_count < 1000
    scheduler.close()


async def test_sequences_that_wait_for_a_slot_do_not_slow_down_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine, queue_limit=300)
    searches, evict = list[int](), Slots.evict
    monkeypatch.setattr(Slots, "evict", lambda *given: (searches.append(len(engine.forwards)), evict(*given))[1])
    holding = CachedSequence(scheduler)
    holding.replace(0, ids(4))
    await holding.forward((), len)
    waiting = [asyncio.create_task(drop(scheduler, ids(4, seed))) for seed in range(1, 200)]
    await asyncio.to_thread(eventually, lambda: scheduler.queue_length == len(waiting))
    searches.clear()
    for _ in range(5):
        await holding.forward((), len)
    assert max(Counter(searches).values()) < 50, "they wait for the same slot, so that one search is enough for all"
    holding.close()
    await asyncio.gather(*waiting)
    scheduler.close()
