"""Runs slow work in threads of its own, so that it delays only other slow work.

asyncio's own threads are few, and every short request needs one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

# Inputs above this size take milliseconds to convert or to tokenize.
_MAX_SHORT_BYTES = 64 << 10
# Two, so that one very large input does not keep all other large ones waiting.
_LARGE = ThreadPoolExecutor(2, "large")


def threads_for(byte_count: int) -> Executor | None:
    """Returns the threads for an input of that size; None: asyncio's own."""
    return _LARGE if is_large(byte_count) else None


def is_large(byte_count: int) -> bool:
    """Returns whether an input of that size is slow to process."""
    return byte_count > _MAX_SHORT_BYTES


async def run(threads: Executor | None, function: Callable[..., T], *args: object) -> T:
    """Returns the result of a function that runs in one of `threads`; None: asyncio's own, for short work.

    In `threads`, a cancellation waits until a function that has begun ends: otherwise a client that leaves would free
    its place in all limits, but not the thread.
    """
    if threads is None:
        return await asyncio.to_thread(function, *args)
    work = threads.submit(copy_context().run, function, *args)
    ended = asyncio.wrap_future(work)
    try:
        await asyncio.wait((ended,))
    except asyncio.CancelledError:
        if not work.cancel():
            while not ended.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((ended,))
            ended.exception()  # has been retrieved, so that asyncio does not log it
        raise
    return ended.result()
