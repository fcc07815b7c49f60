"""What Draft and Verify streams share: an open message first, then requests and responses concurrently."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from bridge.errors import ProtocolViolation
from bridge.sampling.sampler import SamplingParameters
from bridge.text.models import Model
from services.errors import ModelChanged, ModelNotFound, RoleNotServed

# Prepares for sessions with these sampling parameters.
Prepare = Callable[[SamplingParameters], Awaitable[None]]

T = TypeVar("T")
R = TypeVar("R")


class RoleServicer(Generic[T]):
    """Serves one model in one role. `open_session` opens a session; None if the server does not serve the role.

    `prepare` is awaited before a session opens, for work that takes time.
    """

    role: ClassVar[str]

    def __init__(self, model: Model, open_session: T | None, prepare: Prepare | None = None) -> None:
        self._model = model
        self._open_session = open_session
        self._prepare = prepare or _nothing

    @property
    def serves(self) -> bool:
        """Whether the role is served."""
        return self._open_session is not None

    @property
    def opener(self) -> T:
        """Returns `open_session`. Raises `RoleNotServed`."""
        if self._open_session is None:
            raise RoleNotServed("this server", self._model.name, self.role)
        return self._open_session


async def _nothing(sampling: SamplingParameters) -> None:
    pass


async def first_message(requests: AsyncIterator[R]) -> R:
    """Returns the first message of a stream. Raises `ProtocolViolation` unless it is an open message."""
    request: Any = await anext(requests, None)
    if request is None or request.WhichOneof("kind") != "open":
        raise ProtocolViolation("a stream must begin with an open message: send one first")
    return request  # type: ignore[no-any-return]


def check_model(name: str, tokenizer_sha256: str, model: Model) -> None:
    """Raises `ModelNotFound` or `ModelChanged` if the client expects another model than the served one."""
    if name not in ("", model.name):
        raise ModelNotFound(
            f"this server serves {model.name}, not {name}: use the server of {name}",
            expected=name,
            model=model.name,
        )
    if tokenizer_sha256 not in ("", model.vocabulary.sha256):
        raise ModelChanged(model.name)


async def exchange(
    requests: AsyncIterator[R],
    on_request: Callable[[R], Awaitable[None]],
    on_end_of_requests: Callable[[], None],
    responses: AsyncIterator[T],
) -> AsyncIterator[T]:
    """Yields the responses that `responses` yields, and meanwhile passes each request to `on_request`.

    Calls `on_end_of_requests` when the client closes its side. An error in either direction ends both.
    """

    async def listen() -> None:
        while True:
            # Shielded: gRPC never frees the memory of a read that is cancelled. This one ends with the call.
            reading = asyncio.ensure_future(anext(requests, None))
            reading.add_done_callback(_retrieve)
            if (request := await asyncio.shield(reading)) is None:
                break
            await on_request(request)
        on_end_of_requests()

    listener, responding = asyncio.create_task(listen()), asyncio.ensure_future(anext(responses))
    try:
        while True:
            if not listener.done():
                await asyncio.wait((listener, responding), return_when=asyncio.FIRST_COMPLETED)
            if listener.done():
                listener.result()  # it may also have failed while the last response was sent
            yield await responding
            responding = asyncio.ensure_future(anext(responses))
    except StopAsyncIteration:
        return
    finally:
        for task in (listener, responding):
            task.cancel()
        await asyncio.gather(listener, responding, return_exceptions=True)


def _retrieve(reading: "asyncio.Future[Any]") -> None:
    """Retrieves the error of a read, which asyncio would log if nobody awaits the read any more."""
    if not reading.cancelled():
        reading.exception()
