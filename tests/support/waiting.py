"""Waits for conditions."""

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns once the condition holds; fails if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        threading.Event().wait(0.02)
