"""Waiting for something that comes about by itself."""

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns as soon as the condition holds; fails if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        threading.Event().wait(0.02)
