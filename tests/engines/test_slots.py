"""Tests which sequences hold a slot of a model, what they share, which of them wait, and that they free everything."""

import asyncio
import random
from collections.abc import Container

import numpy as np
import pytest

from bridge.errors import EngineFailure
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from services.errors import SlotsExhausted
from tests.support.depth import examples
from tests.support.waiting import eventually
from tests.support.watched import Holding, Watched, after, drop, ids


async def test_ten_sequences_with_one_beginning_read_it_once() -> None:
    engine = Watched(slot_count=10)
    scheduler = Scheduler(lambda: engine)
    system = ids(2000)
    prompts = [system + ids(20, seed) for seed in range(1, 11)]
    results = await asyncio.gather(*(after(scheduler, prompt) for prompt in prompts))
    for prompt, logits in zip(prompts, results, strict=True):
        np.testing.assert_array_equal(logits[-1], engine.logits(prompt))
    assert engine.token_count == 2000 + 10 * 20
    assert engine.copies == [2000] * 9
    scheduler.close()


async def test_a_slot_whose_forward_failed_is_not_trusted() -> None:
    """The forward fails after it has written half of its tokens."""
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine)
    good = ids(40, 1)
    await drop(scheduler, good)
    with pytest.raises(EngineFailure):
        await drop(scheduler, [*good, Watched.poison])
    engine._cache[0] = [99] * 40
    np.testing.assert_array_equal((await drop(scheduler, [*good, 50]))[-1], engine.logits([*good, 50]))
    assert engine.forwards[-1][0].keep == 0
    scheduler.close()


async def test_a_slot_whose_sequence_left_during_a_forward_that_failed_is_not_trusted() -> None:
    """The forward has written another token where the slot still claims a rejected candidate."""
    engine = Holding(slot_count=3)
    scheduler = Scheduler(lambda: engine)
    good = ids(40, 1)
    leaving, failing = CachedSequence(scheduler), CachedSequence(scheduler)
    for sequence in (leaving, failing):
        sequence.replace(0, good)
        await sequence.forward([50], np.array)
    leaving.accept([60], 0)
    failing.accept([Watched.poison], 0)
    engine.gate.clear()
    other = asyncio.create_task(drop(scheduler, ids(6)))
    await asyncio.to_thread(eventually, lambda: len(engine.forwards) == 3)
    running = [asyncio.create_task(one.forward((), np.array)) for one in (leaving, failing)]
    await asyncio.to_thread(eventually, lambda: scheduler._inbox.qsize() == 2)
    engine.gate.set()
    await other
    await asyncio.to_thread(eventually, lambda: len(engine.forwards) == 4)
    running[0].cancel()
    await asyncio.sleep(0)
    leaving.close()
    engine.gate.set()
    with pytest.raises(EngineFailure):
        await running[1]
    failing.close()
    np.testing.assert_array_equal((await drop(scheduler, [*good, 50, 70]))[-1], engine.logits([*good, 50, 70]))
    assert engine.forwards[-1][0].keep == 0
    scheduler.close()


async def test_a_sequence_without_a_slot_waits_and_one_beyond_the_queue_is_refused_with_a_retry_time() -> None:
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine, queue_limit=1)
    first = CachedSequence(scheduler)
    first.replace(0, ids(5))
    await first.forward((), len)
    second = asyncio.create_task(after(scheduler, ids(6, 1)))
    await asyncio.sleep(0)
    with pytest.raises(SlotsExhausted, match=r"try again in 1.0 s.*--queue"):
        await after(scheduler, ids(7, 2))
    assert not second.done()
    first.close()
    np.testing.assert_array_equal((await second)[-1], engine.logits(ids(6, 1)))
    scheduler.close()


async def test_an_idle_sequence_loses_its_slot_to_one_that_waits_and_goes_on_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 20_000_000)
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine)
    idle = CachedSequence(scheduler)
    idle.replace(0, ids(5))
    await idle.forward((), len)
    other = CachedSequence(scheduler)
    other.replace(0, ids(6, 1))
    result = await asyncio.wait_for(other.forward((), np.array), 60)
    np.testing.assert_array_equal(result.value[-1], engine.logits(ids(6, 1)))
    idle.accept((7,), 0)
    result = await asyncio.wait_for(idle.forward((), np.array), 60)
    np.testing.assert_array_equal(result.value[-1], engine.logits([*ids(5), 7]))
    assert result.token_count == 6, "it read its text again"
    idle.accept((8,), 0)
    assert (await idle.forward((), len)).token_count == 1
    scheduler.close()


async def test_a_sequence_keeps_its_slot_between_the_forwards_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 0)  # any forward takes longer
    engine = Watched(slot_count=1)
    engine.gate.clear()
    scheduler = Scheduler(lambda: engine)
    reading = asyncio.create_task(drop(scheduler, ids(1500)))
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    waiting = asyncio.create_task(drop(scheduler, ids(6, 1)))
    await asyncio.to_thread(eventually, lambda: scheduler._inbox.qsize() == 1)
    engine.gate.set()
    await asyncio.wait_for(asyncio.gather(reading, waiting), 60)
    assert engine.token_count == 1506
    scheduler.close()


async def test_a_sequence_that_asks_while_it_loses_its_slot_keeps_no_other_one_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 0)
    scheduler, loop = Scheduler(lambda: Watched(slot_count=1)), asyncio.get_running_loop()
    sequence, evict, jobs = CachedSequence(scheduler), scheduler._slots.evict, list[asyncio.Task[object]]()
    sequence.replace(0, ids(5))
    await sequence.forward((), len)

    async def ask() -> None:
        jobs.append(asyncio.create_task(sequence.forward((), len)))
        await asyncio.sleep(0)

    def ask_and_evict(busy: Container[object], before_ns: int) -> object:
        if not jobs:
            asyncio.run_coroutine_threadsafe(ask(), loop).result(60)
        return evict(busy, before_ns)

    monkeypatch.setattr(scheduler._slots, "evict", ask_and_evict)
    await drop(scheduler, ids(6, 1))
    await asyncio.gather(*jobs)
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 60_000_000_000)
    sequence.close()
    await asyncio.wait_for(drop(scheduler, ids(6, 2)), 60)
    scheduler.close()


async def test_a_copy_that_fails_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Watched()

    def copy(source: int, target: int, token_count: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine, "copy", copy)
    scheduler = Scheduler(lambda: engine)
    results = await asyncio.gather(*(after(scheduler, ids(300)) for _ in range(2)))
    for logits in results:
        np.testing.assert_array_equal(logits[-1], engine.logits(ids(300)))
    scheduler.close()


async def test_idle_sequences_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of idle sequences, and each of them can continue at any time."""
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 10_000_000)
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine, queue_limit=1)
    idle = []
    for seed in range(6):
        sequence = CachedSequence(scheduler)
        sequence.replace(0, ids(5, seed))
        await asyncio.wait_for(sequence.forward((), len), 60)
        idle.append(sequence)
    for seed, sequence in enumerate(idle):
        sequence.accept((7,), 0)
        result = await asyncio.wait_for(sequence.forward((), np.array), 60)
        np.testing.assert_array_equal(result.value[-1], engine.logits([*ids(5, seed), 7]))
    for sequence in idle:
        sequence.close()
    assert scheduler.free_slot_count == 1
    assert not scheduler._evicted
    scheduler.close()


@pytest.mark.parametrize("shared", [0, 1, 20, 100])
async def test_prompts_in_turn_each_keep_their_cache(shared: int) -> None:
    """This holds even if all prompts begin alike, with a control token, the head of a chat or its instructions."""
    engine = Watched(slot_count=3)
    scheduler = Scheduler(lambda: engine)
    prompts = [[*ids(shared), *ids(600, seed)] for seed in (1, 2)]
    for _ in range(3):
        for prompt in prompts:
            await drop(scheduler, prompt)
    assert engine.token_count <= sum(map(len, prompts)) + 4
    scheduler.close()


async def test_the_cache_that_was_used_least_recently_goes_first() -> None:
    engine = Watched(slot_count=3)
    scheduler = Scheduler(lambda: engine)
    for seed in (1, 2, 3, 1, 4):  # the last replaces the second
        await drop(scheduler, ids(100, seed))
    before = engine.token_count
    assert before == 401
    for seed in (1, 3, 4):
        await drop(scheduler, ids(100, seed))
    assert engine.token_count == before + 3
    await drop(scheduler, ids(100, 2))
    assert engine.token_count == before + 103
    scheduler.close()


async def test_thousands_of_sequences_opened_and_dropped_at_random_leave_nothing_behind() -> None:
    engine = Watched(slot_count=6)
    scheduler = Scheduler(lambda: engine, queue_limit=50)
    chance = random.Random(1)
    stems = [ids(60, seed) for seed in range(5)]

    async def live(seed: int) -> None:
        mine = random.Random(seed)
        sequence = CachedSequence(scheduler)
        try:
            sequence.replace(0, stems[seed % 5][: mine.randrange(1, 60)] + ids(mine.randrange(0, 8), seed))
            for _ in range(mine.randrange(1, 4)):
                extra = ids(mine.randrange(0, 4), seed + 1)
                result = await sequence.forward(extra, np.array)
                np.testing.assert_array_equal(result.value[0], engine.logits(sequence.ids))
                sequence.accept((*extra[: len(result.value) - 1][:1], 50), min(len(extra), len(result.value) - 1, 1))
                if mine.random() < 0.3:
                    sequence.replace(mine.randrange(1, len(sequence.ids) + 1), ids(2, seed))
        finally:
            sequence.close()

    tasks: set[asyncio.Task[None]] = set()
    for seed in range(examples(10_000)):
        task = asyncio.create_task(live(seed))
        tasks.add(task)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        if len(tasks) >= 40:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                assert one.cancelled() or one.exception() is None, one.exception()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert scheduler.free_slot_count == 6
    assert await after(scheduler, ids(3)) is not None
    assert engine.cache_byte_count == Watched(slot_count=6).cache_byte_count
    scheduler.close()
