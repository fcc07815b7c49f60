"""Lets model servers that start at the same time load together, and measure one at a time while none loads.

While another model is loaded on the same cores, a forward can take thirty times as long. So a process that starts
several servers gives them a file in the variable `LOCK`: a server that loads holds a shared lock of it, and one that
measures holds an exclusive lock. The system releases the lock of a process that ends. Without the file, or where it
cannot be locked, nobody waits.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

# Whether files can be locked here.
possible = fcntl is not None
# The variable with the file's path.
LOCK = "DRAFTBRIDGE_START_LOCK"


class _Turns:
    """The lock of this process. Only one of its threads uses it at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._held = ""

    @contextmanager
    def holding(self, wanted: str) -> Iterator[None]:
        """Holds a lock, "shared" or "exclusive", in place of the one that the caller holds and gets back in the end."""
        before = self._held
        self._change(wanted)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, wanted: str) -> None:
        path = os.environ.get(LOCK)
        if fcntl is None or not path or wanted == self._held:
            return
        try:
            if self._file is None:
                self._file = os.open(path, os.O_RDWR)
            if wanted:
                fcntl.flock(self._file, fcntl.LOCK_EX if wanted == "exclusive" else fcntl.LOCK_SH)
            self._held = wanted
        except OSError as error:
            _log.warning("%s cannot be locked (%s): this server waits for no other", path, error.strerror)
            wanted = ""
        if not wanted and self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file, self._held = None, ""


_turns = _Turns()


@contextmanager
def loading() -> Iterator[None]:
    """Waits until no server that starts at the same time measures, and keeps others from measuring."""
    with _turns.holding("shared"):
        yield


@contextmanager
def measuring() -> Iterator[None]:
    """Waits until no server that starts at the same time loads or measures, and keeps others from both.

    Inside of `loading`, others may measure before this one does.
    """
    with _turns.holding("exclusive"):
        yield
