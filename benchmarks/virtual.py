"""Virtual time for `benchmarks.simulate`: a simulated minute takes about a second, and every run is the same.

Loop, planner and sessions are the real ones. Instead of a thread that runs an engine, the scheduler waits for the time
of each forward, in an event loop that never sleeps.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from benchmarks.scripted import ScriptedEngine
from bridge.sampling.sampler import Logits
from services.engines.engine import Row
from services.engines.job import Timed

T = TypeVar("T")

# Milliseconds that each forward takes in addition, for messages, threads and sampling, as in real time.
_AROUND_MS = 0.3


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Returns the virtual seconds since the loop was created."""
        return self._now

    def pass_by(self, seconds: float) -> None:
        """Advances the clock."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.pass_by(timeout)
        return ready


class VirtualScheduler:
    """A `Scheduler` of one sequence, which waits for the time of each forward."""

    def __init__(self, open_engine: Callable[[], ScriptedEngine]) -> None:
        self.engine = open_engine()

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
        """See `Scheduler.run`. The scripted engine takes no branches."""
        found: list[Timed[T]] = []
        last: int | None = ids[-1]
        while last is not None:
            row = Row(0, len(ids) - 1 + len(found), (last, *extra), 0)
            milliseconds = self.engine.takes_ms((row,))
            await asyncio.sleep((milliseconds + _AROUND_MS) / 1000)
            (logits,) = self.engine.logits((row,))
            value = finish(logits)
            count = 1 if found else len(ids) - agreed + len(extra)
            found.append(Timed(value, 0, int(milliseconds * 1e6), count, 0, len(extra)))
            last = next_id(value)
        return found

    def release(self, holder: object) -> None:
        """See `Scheduler.release`."""

    def close(self) -> None:
        """See `Scheduler.close`."""


def clock() -> float:
    """Returns the seconds of the running loop."""
    return asyncio.get_running_loop().time()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in virtual time, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
