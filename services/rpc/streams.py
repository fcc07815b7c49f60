"""What both kinds of model streams have in common: open first, then listen and speak at the same time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from bridge.errors import ModelChanged, ModelNotFound, ProtocolViolation, RoleNotServed
from bridge.text.models import Model

T = TypeVar("T")
R = TypeVar("R")


class RoleServicer(Generic[T]):
    """Sessions of one model in one role, which `open_session` opens; refuses all where the role is not served, None."""

    role: ClassVar[str]

    def __init__(self, model: Model, open_session: T | None) -> None:
        self._model = model
        self._open_session = open_session

    @property
    def serves(self) -> bool:
        """Whether the role is served."""
        return self._open_session is not None

    @property
    def opener(self) -> T:
        """What opens a session. Raises `RoleNotServed`."""
        if self._open_session is None:
            raise RoleNotServed("this server", self._model.name, self.role)
        return self._open_session


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
    no_more: Callable[[], None],
    says: AsyncIterator[T],
) -> AsyncIterator[T]:
    """Yields what a session says while it is told what comes in.

    When the client closes its side the session is told `no_more`. An error of either side ends both.
    """
    speaking: asyncio.Future[T] | None = None

    async def listen() -> None:
        async for request in requests:
            await hear(request)
        no_more()

    listener = asyncio.create_task(listen())
    try:
        while True:
            speaking = asyncio.ensure_future(anext(says))
            waiting = (speaking,) if listener.done() else (listener, speaking)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if listener.done():
                listener.result()
            yield await speaking
    except StopAsyncIteration:
        return
    finally:
        listener.cancel()
        if speaking is not None:
            speaking.cancel()
        await asyncio.gather(listener, *([speaking] if speaking else []), return_exceptions=True)
