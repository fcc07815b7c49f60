"""What both kinds of model streams have in common: open first, then listen and speak at the same time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from bridge.errors import ModelChanged, ModelNotFound, ProtocolViolation
from bridge.models import Model

T = TypeVar("T")
R = TypeVar("R")


async def first_message(requests: AsyncIterator[R]) -> R:
    """The message that opens a stream. Raises `ProtocolViolation` if it is another, or none."""
    request: Any = await anext(requests, None)
    if request is None or request.WhichOneof("kind") != "open":
        raise ProtocolViolation("a stream begins with an open message: send one first")
    return request  # type: ignore[no-any-return]


def check_model(name: str, tokenizer_sha256: str, model: Model) -> None:
    """Raises `ModelNotFound` or `ModelChanged` where the client expects another model than is served."""
    if name not in ("", model.name):
        raise ModelNotFound(
            f"this server has {model.name}, not {name}: ask the server that has it, or restart the bridge",
            expected=name,
            model=model.name,
        )
    if tokenizer_sha256 not in ("", model.vocabulary.sha256):
        raise ModelChanged(model.name)


async def listening(
    requests: AsyncIterator[R],
    hear: Callable[[R], Awaitable[None]],
    no_more: Callable[[Exception | None], None],
    says: AsyncGenerator[T, None],
) -> AsyncIterator[T]:
    """Yields what a session says while it is told what comes in.

    When the client closes its side the session is told `no_more`; and why, if it was because of an error, which it
    raises then.
    """

    async def listen() -> None:
        try:
            async for request in requests:
                await hear(request)
        except Exception as error:  # the session raises it
            no_more(error)
        else:
            no_more(None)

    listener = asyncio.create_task(listen())
    try:
        async with aclosing(says):
            async for one in says:
                yield one
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
