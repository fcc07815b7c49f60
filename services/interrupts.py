"""Decides what Ctrl-C does while modules are imported, and SIGTERM in a container. Imports almost nothing itself."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Lets Ctrl-C end the process at once during the block, which only imports modules.

    A KeyboardInterrupt could come up in a callback of the import system, where Python prints a traceback and goes on.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Otherwise it is ignored, as in a background job of a shell, or a caller handles it.
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_at_sigterm() -> None:
    """Lets SIGTERM end the first process of a container at once, like any other process, until asyncio handles it.

    Linux discards a signal to such a process if its action is the default one.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
