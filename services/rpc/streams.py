"""What Draft and Verify streams share: an open message first, then requests and responses concurrently."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from bridge.errors import ProtocolViolation
from bridge.sampling.sampler import SamplingParameters
from bridge.text.models import Model
from services.errors import ModelChanged, ModelNotFound, RoleNotServed
from services.rpc import limits

T = TypeVar("T")
R = TypeVar("R")


class RoleServicer(Generic[T]):
    """Serves one model in one role. `open_session` opens a session; None if the server does not serve the role."""

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
        """Returns `open_session`. Raises `RoleNotServed`."""
        if self._open_session is None:
            raise RoleNotServed("this server", self._model.name, self.role)
        return self._open_session

    async def read_opening(self, requests: AsyncIterator[Any]) -> tuple[Any, SamplingParameters]:
        """Returns the open message of a stream, and its sampling parameters.

        Raises `ProtocolViolation`, `ModelNotFound`, `ModelChanged` or `InvalidField`.
        """
        opening = (await first_message(requests)).open
        check_model(opening.model, opening.tokenizer_sha256, self._model)
        return opening, await limits.read_sampling(opening.sampling, self._model)


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
    responses: AsyncGenerator[T, None],
) -> AsyncGenerator[T, None]:
    """Yields the responses that `responses` yields, and meanwhile passes each request to `on_request`.

    Calls `on_end_of_requests` when the client closes its side. An error in either direction ends both.
    """
    failure: Exception | None = None
    ended = reading = cancelled = False
    waiting: asyncio.Task[Any] | None = None

    async def listen() -> None:
        nonlocal failure, reading, cancelled
        try:
            while True:
                reading = True
                request = await anext(requests, None)
                reading = False
                if request is None or ended:
                    break
                await on_request(request)
            if not ended:
                on_end_of_requests()
        except Exception as error:  # raised below, unless the responses have ended
            failure = error
            if waiting:
                cancelled = waiting.cancel()

    listener = asyncio.create_task(listen())
    try:
        async with aclosing(responses):
            while not failure:
                waiting = asyncio.current_task()
                try:
                    response = await anext(responses)
                except StopAsyncIteration:
                    return
                finally:
                    waiting = None
                yield response
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not cancelled or (task and task.uncancel()):  # the client has left
            raise
    finally:
        ended = True
        if not reading:  # gRPC never frees the memory of a read that is cancelled; this one ends with the call
            listener.cancel()
    if failure:
        raise failure
