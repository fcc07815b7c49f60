"""Tests sequences that share a model: what they share, which of them wait, and that they free everything."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bridge.errors import EngineFailure, SlotsExhausted
from bridge.sampling.sampler import Logits
from services.engines.engine import Row, measure, warm
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from tests.support import tiny
from tests.support.depth import examples
from tests.support.waiting import eventually

MODEL = tiny.model("byte_level", context_length=4096)


class Watched(tiny.HashEngine):
    """Records every forward; fails where a row has the id `poison`."""

    poison = 13

    def __init__(self, slot_count: int = 4) -> None:
        super().__init__(MODEL, slot_count=slot_count)
        self.forwards: list[list[Row]] = []
        self.copies: list[int] = []
        self.gate = threading.Event()  # each forward waits for it after its start
        self.gate.set()
        self.seconds = 0.0

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.forwards.append(list(rows))
        self.gate.wait(10)
        time.sleep(self.seconds)  # stands in for the time of a model's forward
        assert len({row.slot for row in rows}) == len(rows)
        if any(self.poison in row.token_ids for row in rows):
            raise RuntimeError("out of memory")
        return super().forward(rows)

    def copy(self, source: int, target: int, token_count: int) -> None:
        self.copies.append(token_count)
        super().copy(source, target, token_count)

    @property
    def token_count(self) -> int:
        """Returns the number of tokens that went through the model."""
        return sum(len(row.token_ids) for rows in self.forwards for row in rows)


async def after(scheduler: Scheduler, ids: Sequence[int], extra: Sequence[int] = ()) -> np.ndarray:
    """Returns the logits after `ids` from a new sequence, which stays open."""
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids)
    return (await sequence.forward(extra, np.array)).value


async def drop(scheduler: Scheduler, ids: Sequence[int]) -> np.ndarray:
    """Returns the logits after `ids` from a new sequence, and closes it."""
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids)
    try:
        return (await sequence.forward((), np.array)).value
    finally:
        sequence.close()


def ids(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 200) for _ in range(count)]


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


async def test_a_long_prompt_stalls_nobody() -> None:
    engine = Watched()
    engine.seconds = 0.02  # as long as a model takes, so that the scheduler waits for the next job of a sequence
    scheduler = Scheduler(lambda: engine)
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
    scheduler.close()


async def test_two_long_prompts_share_a_forward() -> None:
    engine = Watched()
    scheduler = Scheduler(lambda: engine)
    await asyncio.gather(after(scheduler, ids(2000, 1)), after(scheduler, ids(600, 2)))
    both = [rows for rows in engine.forwards if len(rows) == 2]
    assert both
    assert all(sum(len(row.token_ids) for row in rows) <= 512 + 1 for rows in engine.forwards)
    scheduler.close()


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


async def test_prompts_share_a_chunk_evenly() -> None:
    engine = Watched()
    engine.gate.clear()
    scheduler = Scheduler(lambda: engine)
    first = asyncio.create_task(after(scheduler, ids(6, 9)))
    await asyncio.to_thread(eventually, lambda: bool(engine.forwards))
    reading = [asyncio.create_task(after(scheduler, ids(1500, seed))) for seed in (1, 2, 3)]
    await asyncio.to_thread(eventually, lambda: scheduler._inbox.qsize() == 3)
    engine.gate.set()
    await asyncio.gather(first, *reading)
    together = [rows for rows in engine.forwards if len(rows) == 3]
    assert [len(row.token_ids) for row in together[0]] == [170, 171, 171]
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


async def test_a_crash_fails_the_sequence_concerned_and_no_other() -> None:
    engine = Watched()
    scheduler = Scheduler(lambda: engine)
    prompts = [ids(40, 1), [*ids(10, 2), Watched.poison], ids(50, 3)]
    results = await asyncio.gather(*(after(scheduler, prompt) for prompt in prompts), return_exceptions=True)
    assert isinstance(results[1], EngineFailure)
    for index in (0, 2):
        np.testing.assert_array_equal(results[index][-1], engine.logits(prompts[index]))
    assert scheduler.alive
    # Its slot can be used again.
    np.testing.assert_array_equal((await after(scheduler, ids(10, 2)))[-1], engine.logits(ids(10, 2)))
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
    result = await asyncio.wait_for(other.forward((), np.array), 5)
    np.testing.assert_array_equal(result.value[-1], engine.logits(ids(6, 1)))
    idle.accept((7,), 0)
    result = await asyncio.wait_for(idle.forward((), np.array), 5)
    np.testing.assert_array_equal(result.value[-1], engine.logits([*ids(5), 7]))
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
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(EngineFailure, match="restart this server"):
        await first.forward((), len)
    assert not scheduler.alive


def best(logits: Logits) -> int:
    """Returns an id that is not `Watched.poison`."""
    return int(np.argmax(logits[0])) % 180 + 20


def times(count: int) -> Callable[[int], int | None]:
    """Returns a function that lets a job go on `count` times with the id that it chose."""
    left = iter(range(count))
    return lambda id_: id_ if next(left, None) is not None else None


async def test_a_job_goes_on_with_the_ids_that_it_chose() -> None:
    engine = Watched()
    scheduler = Scheduler(lambda: engine)
    sequence = CachedSequence(scheduler)
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
    scheduler.close()


async def test_a_job_whose_next_id_fails_gives_no_result_and_its_cache_is_not_trusted() -> None:
    engine = Watched()
    scheduler = Scheduler(lambda: engine)
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids(6))
    with pytest.raises(EngineFailure):
        await sequence.run_on(best, lambda value: engine.poison)
    sequence.replace(6, [50])
    found = await sequence.forward((), np.array)
    assert np.array_equal(found.value, await drop(scheduler, [*ids(6), 50]))
    scheduler.close()


async def test_a_job_that_is_cancelled_goes_on_no_further() -> None:
    engine = Watched()
    engine.seconds = 0.01
    scheduler = Scheduler(lambda: engine)
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids(6))
    task = asyncio.create_task(sequence.run_on(best, lambda value: value))  # by itself it would never end
    await asyncio.to_thread(eventually, lambda: len(engine.forwards) > 3)
    task.cancel()
    sequence.close()
    await drop(scheduler, ids(6, seed=1))
    count = len(engine.forwards)
    await drop(scheduler, ids(6, seed=2))
    assert len(engine.forwards) == count + 1
    scheduler.close()


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


async def test_idle_sequences_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of idle sequences, and each of them can continue at any time."""
    monkeypatch.setattr("services.engines.scheduler._IDLE_NS", 10_000_000)
    engine = Watched(slot_count=1)
    scheduler = Scheduler(lambda: engine, queue_limit=1)
    idle = []
    for seed in range(6):
        sequence = CachedSequence(scheduler)
        sequence.replace(0, ids(5, seed))
        await asyncio.wait_for(sequence.forward((), len), 5)
        idle.append(sequence)
    for seed, sequence in enumerate(idle):
        sequence.accept((7,), 0)
        result = await asyncio.wait_for(sequence.forward((), np.array), 5)
        np.testing.assert_array_equal(result.value[-1], engine.logits([*ids(5, seed), 7]))
    for sequence in idle:
        sequence.close()
    assert scheduler.free_slot_count == 1
    assert not scheduler._evicted
    scheduler.close()


@pytest.mark.parametrize("shared", [0, 1, 20])
async def test_prompts_in_turn_each_keep_their_cache(shared: int) -> None:
    """This holds even if all prompts begin alike, with a control token or the head of a chat."""
    engine = Watched(slot_count=3)
    scheduler = Scheduler(lambda: engine)
    prompts = [[*ids(shared), *ids(500, seed)] for seed in (1, 2)]
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


def test_each_width_is_met_once_and_only_those_that_fit() -> None:
    engine = Watched()
    engine.context_length, engine.device = 5, "cuda"
    warm(engine, range(1, 9))
    assert [len(row.token_ids) for (row,) in engine.forwards] == [1, 2, 3, 4, 5]
    assert all(row.keep == row.logits_from == 0 for (row,) in engine.forwards)


def test_no_forward_without_a_text_repeats_an_id() -> None:
    """One repeated id is unlike any text: it has no place in the statistics of FP8."""
    engine = Watched()
    warm(engine, range(1, 26))
    measure(engine, all_logits=True)
    for (row,) in engine.forwards:
        assert len(set(row.token_ids)) >= min(len(row.token_ids), engine.vocabulary_size // 2)
