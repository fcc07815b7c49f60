"""One thread runs the model, for all sequences of the process at once (continuous batching).

A job extends a sequence's cache to all its ids and delivers the logits of the last ones. Each forward serves all jobs:
first those that lack few ids, then candidates, which share the rest of the forward's width evenly, then long prompts,
which share a chunk evenly. So a long prompt delays nobody for long, and load reduces speculation, never progress.
After Yu et al., "Orca" (2022), and Agrawal et al., "Sarathi-Serve" (2024).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeVar

from bridge.errors import BrokenLogits, EngineFailure, InvalidGrammar
from bridge.sampling.sampler import Logits
from bridge.text.common_prefix import common_prefix_length
from services.engines.engine import Engine, Row, branching
from services.engines.job import Job, Timed
from services.engines.observer import UNOBSERVED, SchedulerObserver
from services.engines.slots import MIN_COPIED_TOKENS, SlotChoice, Slots
from services.errors import SlotsExhausted

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Candidates fill a forward up to this number of tokens, not counting prompts. Wider ones yield less per second.
_WIDTH = 64
# Prompt tokens of a forward: if it has only prompts, and if other sequences wait for their next token.
_CHUNK = 512
_SHARED_CHUNK = 128
# A job that lacks more ids than this counts as a prompt. Ordinary steps of drafts and targets lack fewer.
_MAX_STEP_IDS = 16
# After a forward, the thread waits for the next jobs: a tenth of the forward's time, within these limits.
_LINGER_NS = 500_000, 2_000_000
# A sequence without a job for this long loses its slot to one that waits. It then reads its text again.
_IDLE_NS = 2_000_000_000
_HANGS = "a forward of the model does not end: see the server's log, and restart the server if it stays NOT_SERVING"


@dataclass(frozen=True)
class Forward:
    """A forward in progress. `token_count`: tokens of all its rows."""

    started_ns: int
    token_count: int


class Scheduler:
    """Runs an engine in a thread. Sequences of any event loop may use it; `queue_limit` of them may wait for a slot.

    The thread also calls `open_engine`: OpenMP creates a team of helper threads for each thread that computes, and
    with more helpers than cores they sleep between steps. Raises what `open_engine` raises.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], queue_limit: int = 64, observer: SchedulerObserver = UNOBSERVED
    ) -> None:
        self.queue_limit = queue_limit
        self._observer = observer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Sequences that have a slot or wait for one, and sequences that lost theirs while they were idle.
        self._holders: set[object] = set()
        self._evicted: set[object] = set()
        self._lock = threading.Lock()
        self._closed = False
        # Sequences in a row whose forward failed though they ran alone.
        self.failure_count = self._earlier_failures = 0
        # The present forward, and the time of the slowest one that has ended.
        self.present: Forward | None = None
        self.slowest_ns = 0
        # The forward whose jobs were failed because it does not end, and the jobs that `run` waits for.
        self._hung: Forward | None = None
        self._waiting: set[Job] = set()
        # Only the thread uses the fields below.
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
    def hangs(self) -> bool:
        """Whether the present forward was given up; see `give_up`."""
        present = self.present
        return present is not None and present is self._hung

    @property
    def free_slot_count(self) -> int:
        """The number of slots that no sequence holds or waits for."""
        return max(self.engine.slot_count - len(self._holders), 0)

    @property
    def queue_length(self) -> int:
        """The number of sequences that wait for a slot."""
        return max(len(self._holders) - self.engine.slot_count, 0)

    @property
    def held_token_count(self) -> int:
        """The number of tokens in the caches of running sequences."""
        return self._slots.held_token_count

    async def run(
        self,
        holder: object,
        ids: Sequence[int],
        extra: Sequence[int],
        agreed: int,
        finish: Callable[[Logits], T],
        next_id: Callable[[T], int | None] = lambda value: None,
        branches: Sequence[tuple[int, int]] = (),
    ) -> list[Timed[T]]:
        """Runs a job for the sequence `holder`, which must not have another. A cancelled job gets no further forward.

        Returns one result, or several if `next_id` returned ids; then there may be no `extra` ids. See `Job`. Raises
        `SlotsExhausted` if too many sequences wait already, and `EngineFailure` if the model fails.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Timed[T]]] = loop.create_future()
        ids, now = (*ids, *extra), perf_counter_ns()
        job = Job(holder, ids, len(extra), agreed, finish, next_id, loop, future, now, tuple(branches))
        with self._lock:
            if self._closed:
                raise EngineFailure("the model's thread has died: restart this server")
            if self.hangs:
                raise EngineFailure(_HANGS)
            # The limit does not apply to a sequence that lost its slot while idle: it is in the middle of a text.
            new = holder not in self._holders and holder not in self._evicted
            if new and len(self._holders) >= self.engine.slot_count + self.queue_limit:
                raise SlotsExhausted(self.engine.slot_count, self.queue_limit)
            self._evicted.discard(holder)
            self._holders.add(holder)
            self._inbox.put(lambda: self._jobs.append(job))
            self._waiting.add(job)
        try:
            return await future
        finally:
            with self._lock:
                self._waiting.discard(job)

    def give_up(self, forward: Forward) -> None:
        """Fails all jobs, and refuses new ones until `forward` ends, which has not ended in time."""
        with self._lock:
            self._hung = forward
            waiting = list(self._waiting)
        self._observer.on_failure()
        for job in waiting:
            job.settle(EngineFailure(_HANGS))

    def release(self, holder: object) -> None:
        """Frees a sequence's slot, or takes it out of the queue for one."""
        with self._lock:
            self._evicted.discard(holder)
            self._holders.discard(holder)
        # Also one that is in neither: it may have got a slot again with a job that came while it was evicted.
        self._inbox.put(lambda: self._forget(holder))

    def close(self, seconds: float | None = None) -> bool:
        """Ends the thread after its present forward. Unfinished jobs fail with `EngineFailure`.

        Returns whether the thread has ended within `seconds`.
        """
        self._inbox.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _forget(self, holder: object) -> None:
        self._jobs = [job for job in self._jobs if job.holder is not holder]
        self._slots.release(holder)

    def _work(self, open_engine: Callable[[], Engine], opened: "Future[Engine]") -> None:
        try:
            engine = open_engine()
        except BaseException as error:  # `__init__` raises it
            opened.set_exception(error)
            return
        self._slots = Slots(engine.slot_count)
        opened.set_result(engine)
        try:
            idle = True
            while self._receive(idle):
                planned = self._plan()
                idle = not planned
                self._run(planned)
        except Exception:
            _log.exception("the model's thread died")
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        """Fails all jobs when the thread ends, so that nobody waits forever."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            if action := self._inbox.get():
                action()
        for job in list(self._jobs):
            self._end(job, EngineFailure("the model's thread has ended: restart this server"))

    def _receive(self, idle: bool) -> bool:
        """Runs the actions in the inbox, and returns False when the scheduler is closed. Waits while there is no job.

        Also waits briefly for the next jobs of sequences that were in the last forward: otherwise one forward would
        serve the quickest and another one the rest. `idle`: no job can run now, because all wait for slots.
        """
        until = perf_counter_ns() + self._linger_ns
        while True:
            left = 0.0 if len(self._jobs) >= self._expected else (until - perf_counter_ns()) / 1e9
            if idle:
                # Then a slot whose sequence is idle can be taken.
                left = _IDLE_NS / 1e9
            try:
                action = self._inbox.get(timeout=max(left, 0.0) if self._jobs else None)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()
            idle = False

    def _plan(self) -> list[tuple[Job, Row]]:
        """Returns the jobs of the next forward with their rows, by the rules at the top of this file."""
        self._jobs = [job for job in self._jobs if not job.future.done()]
        begun: list[Job] = []
        full = False
        for job in self._jobs:
            if self._slots.of(job.holder):
                begun.append(job)
            elif not full:  # with no slot for one new sequence, there is none for those after it
                place = self._place(job)
                full = place is None
                if place and not _is_being_read(job, place, begun):
                    self._take(job, place)
                    begun.append(job)
        steps = [job for job in begun if job.lacks <= _MAX_STEP_IDS]
        prompts = [job for job in begun if job.lacks > _MAX_STEP_IDS]
        chunks = _shared(_SHARED_CHUNK if steps else _CHUNK, [(job, job.lacks) for job in prompts])
        ready = steps + [job for job in prompts if chunks[job] == job.lacks]
        extras = _shared(_WIDTH - sum(job.lacks for job in steps), [(job, job.extra_count) for job in ready])
        return [
            (job, self._row(job, chunks.get(job, job.lacks), extras.get(job))) for job in begun if chunks.get(job, 1)
        ]

    def _place(self, job: Job) -> SlotChoice | None:
        """Returns a slot for a new sequence, for which an idle one may lose its own; None if there is none."""
        place = self._slots.place(job.ids)
        if place is None:
            busy = {one.holder for one in self._jobs}
            idle = self._slots.evict(busy, perf_counter_ns() - _IDLE_NS)
            with self._lock:
                if idle in self._holders:
                    self._holders.discard(idle)
                    self._evicted.add(idle)
            place = self._slots.place(job.ids)
        return place

    def _take(self, job: Job, place: SlotChoice) -> None:
        length = place.length
        if place.source is not None:
            try:
                self.engine.copy(place.source.index, place.slot.index, length)
            except Exception:
                job.context.run(_log.exception, "a slot could not be copied; its tokens are computed again")
                length = 0
        self._slots.take(place.slot, job.holder, job.ids, length)
        job.agreed = job.cached_token_count = min(length, len(job.ids) - job.extra_count - 1)
        self._observer.on_start(len(job.ids) - job.extra_count, job.cached_token_count)

    def _row(self, job: Job, count: int, extra: int | None) -> Row:
        """Returns a row of `count` ids that the job lacks; with `extra` candidates and logits unless that is None."""
        slot = self._slots.of(job.holder)
        assert slot is not None
        end = job.agreed + count
        if extra is None:
            return Row(slot.index, job.agreed, job.ids[job.agreed : end], count)
        return Row(slot.index, job.agreed, job.ids[job.agreed : end + extra], count - 1)

    def _run(self, planned: Sequence[tuple[Job, Row]]) -> None:
        if not planned:
            return
        branches = self._branches(planned)
        token_count = sum(len(row.token_ids) for _, row in planned) + len(branches)
        self.present = Forward(perf_counter_ns(), token_count)
        try:
            if branches and (tree := branching(self.engine)):
                tables = [tree.forward_branches(planned[0][1], branches)]
            else:
                tables = self.engine.forward([row for _, row in planned])
            forward_ns = perf_counter_ns() - self.present.started_ns
            if not self.hangs:
                self.slowest_ns = max(self.slowest_ns, forward_ns)
        except Exception as error:
            if len(planned) > 1:  # runs each job alone, so that only the one at fault fails
                for one in planned:
                    if one[0].future.done():  # it has left, or was failed because the forward hung
                        self._hold(one[0], 0)
                    else:
                        self._run([one])
                return
            job, row = planned[0]
            job.context.run(_log.exception, "a forward failed")
            self.failure_count += 1
            self._fail(
                job, EngineFailure(f"the model failed in a forward ({type(error).__name__}): see the server's log")
            )
            return
        finally:
            self.present = None
        self._observer.on_forward(len(planned), token_count, forward_ns)
        self._expected, self._linger_ns = len(self._jobs), min(max(forward_ns // 10, _LINGER_NS[0]), _LINGER_NS[1])
        self._earlier_failures = self.failure_count
        for (job, row), logits in zip(planned, tables, strict=True):
            job.forward_ns += forward_ns
            job.token_count += len(row.token_ids) + len(branches)
            job.agreed = row.keep + len(row.token_ids)
            self._hold(job, job.agreed)
            if row.logits_from < len(row.token_ids):
                self._finish(job, logits, len(branches))

    def _branches(self, planned: Sequence[tuple[Job, Row]]) -> list[tuple[int, int]]:
        """Returns the branches that run, as pairs of an index into the row and an id."""
        job, row = planned[0]
        end = row.keep + len(row.token_ids)
        narrow = len(row.token_ids) + len(job.branches) <= _WIDTH
        if len(planned) > 1 or end < len(job.ids) or not narrow or not branching(self.engine):
            return []
        first = len(row.token_ids) - job.extra_count
        return [(first + index, id_) for index, id_ in job.branches]

    def _hold(self, job: Job, length: int) -> None:
        slot = self._slots.of(job.holder)
        assert slot is not None
        self._slots.hold(slot, job.ids, length)

    def _finish(self, job: Job, logits: Logits, branch_count: int) -> None:
        """Ends the job with its results, unless another id follows."""
        try:
            value = job.finish(logits)
            next_id = job.next_id(value)
        except BrokenLogits as error:
            self.failure_count = self._earlier_failures + 1  # all such rows of a forward are one failure
            self._fail(job, error)
            return
        except (EngineFailure, InvalidGrammar) as error:
            self._end(job, error)
            return
        except Exception:
            job.context.run(_log.exception, "sampling failed")
            self._end(job, EngineFailure("sampling from the model's logits failed: see the server's log"))
            return
        self.failure_count = self._earlier_failures = 0
        waited_ns = max(perf_counter_ns() - job.submitted_ns - job.forward_ns, 0)
        self._observer.on_job(waited_ns)
        cached, extra_count = job.cached_token_count, len(logits) - 1 - branch_count
        timed = Timed(value, waited_ns, job.forward_ns, job.token_count, cached, extra_count, branch_count)
        job.results.append(timed)
        if next_id is None:
            self._end(job, job.results)
        else:
            job.go_on(next_id)

    def _fail(self, job: Job, error: EngineFailure) -> None:
        """Ends a job whose forward was the model's fault. What that has cached counts no more."""
        self._observer.on_failure()
        self._end(job, error)
        self._hold(job, 0)

    def _end(self, job: Job, result: list[Timed[Any]] | EngineFailure | InvalidGrammar) -> None:
        self._jobs.remove(job)
        job.settle(result)


def _shared(amount: int, wanted: Sequence[tuple[Job, int]]) -> dict[Job, int]:
    """Distributes an amount evenly: jobs that want less than an even share get it all, the others get equal shares."""
    given = dict[Job, int]()
    left = max(amount, 0)
    for index, (job, want) in enumerate(sorted(wanted, key=lambda one: one[1])):
        part = min(want, left // (len(wanted) - index))
        given[job] = part
        left -= part
    return given


def _is_being_read(job: Job, place: SlotChoice, begun: Sequence[Job]) -> bool:
    """Returns whether one of the jobs reads a prompt whose beginning a new sequence can copy afterwards."""
    return any(
        other.lacks > _MAX_STEP_IDS and common_prefix_length(other.ids, job.ids) >= place.length + MIN_COPIED_TOKENS
        for other in begun
    )
