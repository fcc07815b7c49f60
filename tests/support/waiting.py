"""Waits for conditions, and makes processes wait."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns once the condition holds; fails if it does not within `seconds`.

    The limit is generous, because a busy machine may stall processes for seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        threading.Event().wait(0.02)


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Stops a process for as long as the context is open, so that what it works on cannot end meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # A thread that runs on another core goes on until the kernel has interrupted it.
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)
