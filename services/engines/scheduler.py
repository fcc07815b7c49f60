"""One thread runs the model, for all sequences of the process at once (continuous batching).

A job brings a sequence's cache up to its ids and hands on the logits of the last ones. Before every forward the
thread looks at all jobs. Each that lacks little gets its part; candidates get what is then left of the width, shared
out evenly; and long prompts get a chunk, shared out evenly too. So a long prompt stalls nobody, and load squeezes out
speculation, never progress. After Yu et al., "Orca" (2022), and Agrawal et al., "Sarathi-Serve" (2024).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from bridge.errors import EngineFailure, SlotsExhausted
from bridge.sampling.sampler import Logits
from bridge.text.common_prefix import common_prefix_length
from services.engines.engine import Engine, Row
from services.engines.slots import LEAST_COPIED, Place, Slots

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Tokens of a forward that serves no prompt; beyond, forwards get slower faster than they get more done.
_WIDTH = 64
# Tokens of prompts in a forward: by themselves, and beside others who wait for their next token.
_CHUNK = 512
_SHARED_CHUNK = 128
# Ids that a sequence may lack before it counts as a prompt: a draft is told as many at a time.
_FEW = 16
# What is waited for sequences to come back: a tenth of the forward before, within these.
_LINGER_NS = 500_000, 2_000_000
# A sequence that has not asked for anything for so long loses its slot to one that waits. It costs time, not text.
_IDLE_NS = 2_000_000_000


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A result, and how long it waited and took in nanoseconds.

    `cached_token_count`: ids that were found in a cache. `extra_count`: candidates that were taken along.
    """

    value: T
    queue_ns: int
    forward_ns: int
    cached_token_count: int
    extra_count: int


@dataclass(eq=False)
class Job:
    """Ids of a sequence, and `extra_count` candidates behind them.

    `agreed`: how many of them its slot still holds. `finish` gets logits for the last id of the sequence and for as
    many of the candidates as were taken along; it is called in the model's thread, and they are valid only inside it.
    """

    holder: object
    ids: tuple[int, ...]
    extra_count: int
    agreed: int
    finish: Callable[[Logits], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Timed[Any]]"
    submitted_ns: int
    forward_ns: int = 0
    cached_token_count: int = 0

    @property
    def lacks(self) -> int:
        """Ids of the sequence that must go through the model; at least the last, whose logits are asked for."""
        return len(self.ids) - self.extra_count - self.agreed


class Scheduler:
    """Runs an engine. Sequences of any event loop may use it; `queue_limit` of them may wait for a slot.

    `open_engine` is called in the thread that will run it: OpenMP gives each thread that computes helpers of its own,
    and where they are more than the cores it lets them sleep at every step. Raises what it raises.
    """

    def __init__(self, open_engine: Callable[[], Engine], queue_limit: int = 64) -> None:
        self.queue_limit = queue_limit
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Who has a slot or waits for one, and who lost it to one that waited.
        self._holders: set[object] = set()
        self._evicted: set[object] = set()
        self._lock = threading.Lock()
        self._closed = False
        # What follows belongs to the thread.
        self._jobs: list[Job] = []
        self._expected = self._linger_ns = 0
        opened: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._work, args=(open_engine, opened), name="model", daemon=True)
        self._thread.start()
        self.engine = opened.result()

    @property
    def alive(self) -> bool:
        """Whether the model's thread still takes jobs."""
        return self._thread.is_alive()

    @property
    def free_slot_count(self) -> int:
        """Slots that no sequence has or waits for."""
        return max(self.engine.slot_count - len(self._holders), 0)

    async def run(
        self, holder: object, ids: Sequence[int], extra: Sequence[int], agreed: int, finish: Callable[[Logits], T]
    ) -> Timed[T]:
        """Does a job for a sequence that has no other. Cancelling takes it out, at the latest behind a forward.

        Raises `SlotsExhausted` if too many wait already, and `EngineFailure` if the model fails.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Timed[T]] = loop.create_future()
        job = Job(holder, (*ids, *extra), len(extra), agreed, finish, loop, future, perf_counter_ns())
        with self._lock:
            if self._closed:
                raise EngineFailure("the model's thread has died: restart this server")
            # One that lost its slot while it was idle is in the middle of a text: it may wait with the others.
            new = holder not in self._holders and holder not in self._evicted
            if new and len(self._holders) >= self.engine.slot_count + self.queue_limit:
                raise SlotsExhausted(self.engine.slot_count, self.queue_limit)
            self._evicted.discard(holder)
            self._holders.add(holder)
            self._inbox.put(lambda: self._jobs.append(job))
        return await future

    def release(self, holder: object) -> None:
        """Gives up a sequence's slot, or its wait for one."""
        with self._lock:
            self._evicted.discard(holder)
            if holder not in self._holders:
                return
            self._holders.discard(holder)
        self._inbox.put(lambda: self._forget(holder))

    def close(self) -> None:
        """Ends the thread, and with it what is under way."""
        self._inbox.put(None)
        self._thread.join()

    def _forget(self, holder: object) -> None:
        self._jobs = [job for job in self._jobs if job.holder is not holder]
        self._slots.release(holder)

    def _work(self, open_engine: Callable[[], Engine], opened: "Future[Engine]") -> None:
        try:
            engine = open_engine()
        except BaseException as error:  # it is raised again where the engine was asked for
            opened.set_exception(error)
            return
        self._slots = Slots(engine.slot_count)
        opened.set_result(engine)
        try:
            idle = True
            while self._listen(idle):
                planned = self._plan()
                idle = not planned
                self._run(planned)
        except Exception:
            _log.exception("the model's thread died")
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Nobody waits for a thread that is gone."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            if news := self._inbox.get():
                news()
        for job in list(self._jobs):
            self._end(job, EngineFailure("the model's thread has ended: restart this server"))

    def _listen(self, idle: bool) -> bool:
        """Takes in what came; False at the end. Waits as long as there is no job.

        And for a moment if sequences that just got their token are about to ask for the next, or there would be a
        forward for the quickest of them and another for the rest. `idle`: none of the jobs can be run.
        """
        until = perf_counter_ns() + self._linger_ns
        while True:
            left = 0.0 if len(self._jobs) >= self._expected else (until - perf_counter_ns()) / 1e9
            if idle:
                # Who waits for a slot looks again whether somebody has left his lying.
                left = _IDLE_NS / 1e9
            try:
                news = self._inbox.get(timeout=max(left, 0.0) if self._jobs else None)
            except queue.Empty:
                return True
            if news is None:
                return False
            news()
            idle = False

    def _plan(self) -> list[tuple[Job, Row]]:
        """The next forward."""
        self._jobs = [job for job in self._jobs if not job.future.cancelled()]
        begun: list[Job] = []
        for job in self._jobs:
            if self._slots.of(job.holder) or self._begin(job, begun):
                begun.append(job)
        few = [job for job in begun if job.lacks <= _FEW]
        many = [job for job in begun if job.lacks > _FEW]
        chunks = dict(_shared(_SHARED_CHUNK if few else _CHUNK, [(job, job.lacks) for job in many]))
        ready = few + [job for job in many if chunks[job] == job.lacks]
        extras = dict(_shared(_WIDTH - sum(job.lacks for job in few), [(job, job.extra_count) for job in ready]))
        return [
            (job, self._row(job, chunks.get(job, job.lacks), extras.get(job))) for job in begun if chunks.get(job, 1)
        ]

    def _begin(self, job: Job, begun: Sequence[Job]) -> bool:
        """Gives a new sequence its slot, if there is one and nobody is just reading a prompt that begins like it."""
        place = self._slots.place(job.ids)
        if place is None:
            busy = {one.holder for one in self._jobs}
            idle = self._slots.evict(busy, perf_counter_ns() - _IDLE_NS)
            with self._lock:
                if idle in self._holders:
                    self._holders.discard(idle)
                    self._evicted.add(idle)
            place = self._slots.place(job.ids)
        if place is None:
            return False
        for other in begun:
            if other.lacks > _FEW and common_prefix_length(other.ids, job.ids) >= place.length + LEAST_COPIED:
                return False
        self._take(job, place)
        return True

    def _take(self, job: Job, place: Place) -> None:
        length = place.length
        if place.source is not None:
            try:
                self.engine.copy(place.source.index, place.slot.index, length)
            except Exception:  # then it is read anew
                _log.exception("a slot could not be copied")
                length = 0
        self._slots.take(place.slot, job.holder, job.ids, length)
        job.agreed = job.cached_token_count = min(length, len(job.ids) - job.extra_count - 1)

    def _row(self, job: Job, count: int, extra: int | None) -> Row:
        """So many of the ids that a job lacks, and of its candidates; no logits as long as it still lacks some."""
        slot = self._slots.of(job.holder)
        assert slot is not None
        end = job.agreed + count
        if extra is None:
            return Row(slot.index, job.agreed, job.ids[job.agreed : end], count)
        return Row(slot.index, job.agreed, job.ids[job.agreed : end + extra], count - 1)

    def _run(self, planned: Sequence[tuple[Job, Row]]) -> None:
        if not planned:
            return
        started = perf_counter_ns()
        try:
            tables = self.engine.forward([row for _, row in planned])
        except Exception as error:
            if len(planned) > 1:  # it is the fault of one of them; the others go on
                for one in planned:
                    self._run([one])
                return
            _log.exception("a forward failed")
            job, row = planned[0]
            self._end(
                job, EngineFailure(f"the model failed in a forward ({type(error).__name__}): see the server's log")
            )
            self._hold(job, 0)
            return
        forward_ns = perf_counter_ns() - started
        self._expected, self._linger_ns = len(self._jobs), min(max(forward_ns // 10, _LINGER_NS[0]), _LINGER_NS[1])
        for (job, row), logits in zip(planned, tables, strict=True):
            job.forward_ns += forward_ns
            job.agreed = row.keep + len(row.token_ids)
            self._hold(job, job.agreed)
            if row.logits_from < len(row.token_ids):
                self._end(job, self._finished(job, logits))

    def _hold(self, job: Job, length: int) -> None:
        slot = self._slots.of(job.holder)
        assert slot is not None
        self._slots.hold(slot, job.ids, length)

    def _finished(self, job: Job, logits: Logits) -> Timed[Any] | EngineFailure:
        try:
            value = job.finish(logits)
        except EngineFailure as error:
            return error
        except Exception:
            _log.exception("sampling failed")
            return EngineFailure("sampling from the model's logits failed: see the server's log")
        waited_ns = perf_counter_ns() - job.submitted_ns - job.forward_ns
        return Timed(value, max(waited_ns, 0), job.forward_ns, job.cached_token_count, len(logits) - 1)

    def _end(self, job: Job, result: Timed[Any] | EngineFailure) -> None:
        self._jobs.remove(job)

        def settle() -> None:
            if job.future.done():
                return
            if isinstance(result, EngineFailure):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)

        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(settle)


def _shared(amount: int, wanted: Sequence[tuple[Job, int]]) -> list[tuple[Job, int]]:
    """Shares out an amount evenly: who wants little gets it, the others as much as one another."""
    given = []
    left = max(amount, 0)
    for place, (job, want) in enumerate(sorted(wanted, key=lambda one: one[1])):
        part = min(want, left // (len(wanted) - place))
        given.append((job, part))
        left -= part
    return given
