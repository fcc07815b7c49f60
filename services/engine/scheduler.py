"""One thread runs the model. Whatever rows are waiting when it is free go into one forward."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from bridge.errors import EngineFailure
from bridge.sampling import Logits
from services.engine.engine import Engine, Row

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A result, and how long it waited and took, in nanoseconds."""

    value: T
    queue_ns: int
    forward_ns: int


@dataclass(frozen=True)
class _Job:
    row: Row
    finish: Callable[[Logits], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Timed[Any]]"
    submitted_ns: int


class Scheduler:
    """Batches the rows of all sessions of a process. `forward` may be called from any event loop."""

    def __init__(self, engine: Engine, max_rows: int = 16) -> None:
        self._engine = engine
        self._max_rows = max_rows
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model's thread still takes rows."""
        return self._thread.is_alive()

    async def forward(self, row: Row, finish: Callable[[Logits], T]) -> Timed[T]:
        """Runs a row and, in the model's thread, `finish` on its logits, which are only valid inside it.

        Raises `EngineFailure` if the forward fails. Cancelling takes the row out if it has not begun.
        """
        if not self.alive:
            raise EngineFailure("the model's thread has died: restart this server")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Timed[T]] = loop.create_future()
        self._jobs.put(_Job(row, finish, loop, future, perf_counter_ns()))
        return await future

    def close(self) -> None:
        """Ends the thread behind the rows that are waiting."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (jobs := self._gather()) is not None:
            if jobs:
                self._run(jobs)

    def _gather(self) -> list[_Job] | None:
        """The rows that are waiting and still wanted; None at the end.

        No slot is in it twice: a sequence waits for its row, and a slot given up in the middle of one has
        its row cancelled.
        """
        first = self._jobs.get()
        if first is None:
            return None
        jobs = [first]
        while len(jobs) < self._max_rows and not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)
                break
            jobs.append(job)
        return [job for job in jobs if not job.future.cancelled()]

    def _run(self, jobs: list[_Job]) -> None:
        started = perf_counter_ns()
        try:
            logits = self._engine.forward([job.row for job in jobs])
        except Exception as error:  # any failure is that of these sessions, not of the process
            _log.exception("a forward failed")
            failure = EngineFailure(f"the model failed in a forward ({type(error).__name__}): see the server's log")
            for job in jobs:
                _settle(job, failure)
            return
        forward_ns = perf_counter_ns() - started
        for job, row_logits in zip(jobs, logits, strict=True):
            try:
                value = job.finish(row_logits)
            except EngineFailure as error:
                _settle(job, error)
                continue
            except Exception:
                _log.exception("sampling failed")
                _settle(job, EngineFailure("sampling from the model's logits failed: see the server's log"))
                continue
            _settle(job, Timed(value, started - job.submitted_ns, forward_ns))


def _settle(job: _Job, result: Timed[Any] | Exception) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    if not job.loop.is_closed():
        job.loop.call_soon_threadsafe(settle)
