"""Limits each step of the library, and adds up the memory and the processor time that all steps of a text take."""

import sys
from abc import ABC, abstractmethod
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


class _Usage(ABC):
    """Adds up by how much a quantity grows within `with` blocks, which are not nested."""

    def __init__(self, limit: float) -> None:
        self._limit, self._total, self._before = limit, 0.0, 0.0

    @abstractmethod
    def _measured(self) -> float:
        """Returns the quantity now."""

    def __enter__(self) -> None:
        self._before = self._measured()

    def __exit__(self, *_: object) -> None:
        self._total += self._measured() - self._before

    def allow(self, more: float) -> None:
        """Raises the limit, because the text has grown."""
        self._limit += more

    @property
    def exceeds(self) -> bool:
        """Whether the total is above the limit."""
        return self._total > self._limit


class Growth(_Usage):
    """The memory of the process, in bytes.

    What other threads take and return meanwhile counts, too. Blocks are short, so that it is little. Where only the
    highest memory is known, the process still cannot exceed it by more than the limit.
    """

    def _measured(self) -> float:
        return resident_bytes()


class TimeSpent(_Usage):
    """The processor time of the thread, in seconds, which does not grow while it waits for a core."""

    def _measured(self) -> float:
        return thread_time()
