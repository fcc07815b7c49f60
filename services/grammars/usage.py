"""Limits the library's steps, and measures the memory and the processor time of a text, which it does not add up."""

import sys
from contextlib import suppress
from mmap import PAGESIZE
from time import thread_time

from llguidance import LLParserLimits

# Of an ordinary text, a byte makes about nine states of the lexer at most.
STEP_LIMITS = LLParserLimits(
    max_lexer_states=100_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_grammar_size=60_000,
    verbose_errors=False,
    precompute_large_lexemes=False,
)


def resident_bytes() -> int:
    """Returns the memory of this process; without /proc its highest so far, and 0 on Windows."""
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * PAGESIZE
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0


class Growth:
    """Adds up by how much the process grows within `with` blocks.

    What other threads take and return meanwhile counts, too. Blocks are short, so that it is little. Where only the
    highest memory is known, the process still cannot exceed it by more than the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._total, self._before = limit, 0, 0

    def __enter__(self) -> None:
        self._before = resident_bytes()

    def __exit__(self, *_: object) -> None:
        self._total += resident_bytes() - self._before

    @property
    def exceeds(self) -> bool:
        """Whether the total is above the limit."""
        return self._total > self._limit


class TimeSpent:
    """Adds up the processor time of the thread within `with` blocks, which does not grow while it waits for a core."""

    def __init__(self, limit: float) -> None:
        self._limit, self._total, self._before = limit, 0.0, 0.0

    def __enter__(self) -> None:
        self._before = thread_time()

    def __exit__(self, *_: object) -> None:
        self._total += thread_time() - self._before

    def allow(self, seconds: float) -> None:
        """Raises the limit, because the text has grown."""
        self._limit += seconds

    @property
    def exceeds(self) -> bool:
        """Whether the total is above the limit."""
        return self._total > self._limit
