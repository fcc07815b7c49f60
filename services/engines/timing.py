"""Times work on this process's threads, and notices whether they had the cores that they needed.

A time that was measured while another process had the cores is wrong by any factor, and nothing in it shows that. On
Linux the kernel counts how long each thread waited for a core; elsewhere nothing is noticed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

_THREADS = Path("/proc/self/task")
# Disturbed: a thread waited for a core for this part of the time. Two processes that share a core each wait half of it,
# threads on cores of their own a few thousandths.
_DISTURBED_PART = 0.25


@dataclass(frozen=True, order=True)
class Timing:
    """How long something took. Undisturbed times sort before disturbed ones, then shorter before longer ones.

    `disturbed`: a thread of this process waited for a core for a quarter of the time or longer.
    """

    disturbed: bool
    taken_ns: int


def timed(work: Callable[[], object]) -> Timing:
    """Runs `work` and returns how long it took."""
    before = _waited_ns()
    started = perf_counter_ns()
    work()
    taken_ns = perf_counter_ns() - started
    longest_ns = max((waited - before.get(thread, 0) for thread, waited in _waited_ns().items()), default=0)
    return Timing(longest_ns >= _DISTURBED_PART * taken_ns, taken_ns)


def _waited_ns() -> dict[str, int]:
    """Returns how long each thread of this process has waited for a core, in nanoseconds; empty if unknown."""
    found = dict[str, int]()
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
                found[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return found
