"""Runs the choices of one request on the gateway, and ends them when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import monotonic
from typing import Any, TypeVar

from starlette.types import Receive

from bridge.errors import DraftBridgeError
from bridge.generation import Delta, Finished
from bridge.request import Request
from services.bridge.backend import Backend, Opened
from services.bridge.pairing import Wish
from services.http.errors import TooManySequences
from services.rpc.server import unless
from services.rpc.status import code_of

T = TypeVar("T")

# How often a choice that waited for another one tries to take its place, and the seconds between two attempts.
_MAX_ATTEMPTS, _FREEING_SECONDS = 5, 0.2

Event = tuple[int, Opened | Delta | Finished]


class Sequences:
    """Counts the choices that are being generated, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._active = limit, 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Takes room for `count` choices during the block. Raises `TooManySequences`."""
        if self._active + count > self._limit:
            raise TooManySequences(self._limit)
        self._active += count
        try:
            yield
        finally:
            self._active -= count


async def generate(backend: Backend, requests: Sequence[Request], target: str, wish: Wish) -> AsyncGenerator[Event]:
    """Yields the events of all requests, each with the index of its request. Raises the first error.

    Several requests run side by side; each waits while its last event has not been taken. One that has no room beside
    the others begins when another has ended.
    """
    if len(requests) == 1:
        async with aclosing(backend.generate(requests[0], target, wish=wish)) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue(1)
    running: set[int] = set()
    ended = asyncio.Semaphore(0)

    async def run(index: int, request: Request) -> bool:
        """Runs a request to its end. Returns False if the model is full."""
        running.add(index)
        begun = False
        try:
            async with aclosing(backend.generate(request, target, wish=wish)) as events:
                async for event in events:
                    begun = begun or isinstance(event, Delta)
                    await queue.put((index, event))
        except DraftBridgeError as error:
            if begun or code_of(error).name != "RESOURCE_EXHAUSTED" or not (len(running) > 1 or attempts[index]):
                raise
            return False
        finally:
            running.discard(index)
        ended.release()
        return True

    async def run_when_there_is_room(index: int, request: Request) -> None:
        try:
            while not await run(index, request):
                # A model may have fewer slots than the request has choices.
                if running:
                    await ended.acquire()
                    attempts[index] = _MAX_ATTEMPTS
                else:  # the room of the last one is not free yet
                    await asyncio.sleep(_FREEING_SECONDS)
                    attempts[index] -= 1
        except Exception as error:  # raised again below
            await queue.put(error)

    attempts = [0] * len(requests)
    tasks = [asyncio.create_task(run_when_there_is_room(index, request)) for index, request in enumerate(requests)]
    left = len(tasks)
    try:
        while left:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            left -= isinstance(got[1], Finished)
            yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def noting_silence(events: AsyncGenerator[Event], seconds: float) -> AsyncGenerator[Event | None]:
    """Passes events on, with None among them if the first delta takes longer than `seconds`."""

    async def following() -> Event | None:
        return await anext(events, None)

    begun, end = False, monotonic() + seconds
    async with aclosing(events):
        while not begun:
            # In a task, because a time limit would end the generation.
            task = asyncio.create_task(following())
            try:
                if not (await asyncio.wait((task,), timeout=max(end - monotonic(), 0.0)))[0]:
                    begun = True
                    yield None
                    await asyncio.wait((task,))
                event = task.result()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if event is None:
                return
            begun = begun or isinstance(event[1], Delta)
            yield event
        async for event in events:
            yield event


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the work's result, or None if the client leaves first, which cancels the work.

    The request's body must have been received.
    """

    async def leaving() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await unless(leaving(), work)
