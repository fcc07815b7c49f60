"""Lets model servers that start at the same time load together, and measure one at a time while none loads.

While another model is loaded on the same cores, a forward can take thirty times as long. So a process that starts
several servers gives them a file in `LOCK`: a server that loads holds a shared lock of it, one that measures an
exclusive lock. The system releases the locks of a process that ends.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# The variable with the file's path.
LOCK = "DRAFTBRIDGE_START_LOCK"
supported = fcntl is not None


class _Turns:
    """This process's lock, which one thread uses at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._operation = 0

    @contextmanager
    def held(self, operation: int) -> Iterator[None]:
        """Waits for a lock, in place of the one that the caller may hold, which it gets back in the end."""
        path, before = os.environ.get(LOCK), self._operation
        if path and self._file is None:
            self._file = os.open(path, os.O_RDWR)
        self._lock(operation)
        try:
            yield
        finally:
            self._lock(before)

    def _lock(self, operation: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, operation or fcntl.LOCK_UN)
        self._operation = operation


_turns = _Turns()


@contextmanager
def loading() -> Iterator[None]:
    """Waits until no server that starts at the same time measures."""
    with _turns.held(fcntl.LOCK_SH if supported else 0):
        yield


@contextmanager
def measuring() -> Iterator[None]:
    """Waits until no server that starts at the same time measures or loads."""
    with _turns.held(fcntl.LOCK_EX if supported else 0):
        yield
