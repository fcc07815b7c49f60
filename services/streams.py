"""What both kinds of model streams have in common: open first, then listen and speak at the same time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from bridge.errors import ModelNotFound, ProtocolViolation
from bridge.models import Model

T = TypeVar("T")
R = TypeVar("R")


async def first_message(requests: AsyncIterator[R]) -> R:
    """The message that opens a stream. Raises `ProtocolViolation` if it is another, or none."""
    request: Any = await anext(requests, None)
    if request is None or request.WhichOneof("kind") != "open":
        raise ProtocolViolation("a stream begins with an open message: send one first")
    return request  # type: ignore[no-any-return]


def check_model(expected: str, model: Model) -> None:
    """Raises `ModelNotFound` where the client expects another model than is served."""
    if expected not in ("", model.name):
        raise ModelNotFound(
            f"this server has {model.name}, not {expected}: ask the server that has it, or restart the bridge",
            expected=expected,
            model=model.name,
        )


async def listening(
    requests: AsyncIterator[R], hear: Callable[[R], Awaitable[None]], says: AsyncIterator[T]
) -> AsyncIterator[T]:
    """Yields what a session says while it is told what comes in; ends when the client closes its side.

    An error of either side ends both.
    """
    speaking: asyncio.Future[T] | None = None

    async def listen() -> None:
        async for request in requests:
            await hear(request)

    listener = asyncio.create_task(listen())
    try:
        while True:
            speaking = asyncio.ensure_future(anext(says))
            await asyncio.wait((listener, speaking), return_when=asyncio.FIRST_COMPLETED)
            if speaking.done():
                yield speaking.result()
            elif listener.done():
                listener.result()
                return
    except StopAsyncIteration:
        return
    finally:
        listener.cancel()
        if speaking is not None:
            speaking.cancel()
        await asyncio.gather(listener, *([speaking] if speaking else []), return_exceptions=True)
