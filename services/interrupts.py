"""Decides what signals do in code that would swallow or delay them, and in containers. Imports almost nothing."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Lets Ctrl-C end the process at once during the block, which only imports modules.

    A KeyboardInterrupt could come up in a callback of the import system, where Python prints a traceback and goes on.
    """
    # Otherwise it is ignored, as in a background job of a shell, or a caller handles it.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _by_the_system([signal.SIGINT] if usual else []):
        yield


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Lets Ctrl-C, and a SIGTERM that a caller handles, end the process at once during the block.

    It is for code that waits for its own threads before it lets a KeyboardInterrupt pass, and leaves nothing that the
    next run could not continue.
    """
    with _by_the_system([one for one in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(one))]):
        yield


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Lets a SIGTERM, and the end of the terminal, raise KeyboardInterrupt during the block, which then tidies up.

    Signals that a caller handles, or ignores as `nohup` does, are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _by_the_system(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Lets these signals end the process during the block; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Linux discards a signal to the first process of a container if its action is the default one.
    action = _exit if os.getpid() == 1 else signal.SIG_DFL
    handlers = {number: signal.signal(number, action) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_at_sigterm() -> None:
    """Lets SIGTERM end the first process of a container at once, like any other process, until asyncio handles it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: object) -> None:
    os._exit(128 + number)
