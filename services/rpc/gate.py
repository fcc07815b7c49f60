"""Admits calls: checks their token, and limits how many run at once, in all and for each key."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import grpc
from grpc import aio

from bridge.errors import DraftBridgeError
from services.errors import Overloaded
from services.rpc.arrival import Arrivals
from services.rpc.handlers import called_early, wrapped
from services.rpc.insight import send_request_id
from services.rpc.keys import Key, Keys
from services.rpc.status import abort

# Open to all, because load balancers and orchestrators have no tokens.
_OPEN = "/grpc.health.v1.Health/"
_OURS = "/draftbridge."
# Calls that the limits of a key apply to.
_GENERATING = ("/Generate", "/Draft", "/Verify", "/Propose")
_TRANSLATING = "/Translate"

# How long a call waits for its message: if many calls do so, and if not. Those that need no key have small messages,
# which arrive with their headers; `_MANY_OPEN` of them are not many. A client on a slow link needs a minute for the
# largest of the other ones, but must not keep others out.
_MANY_OPEN, _OPEN_SECONDS, _MESSAGE_SECONDS = 16, (1.0, 5.0), (5.0, 60.0)

# The name of the key of the present call; empty if it has none.
CALLER: ContextVar[str] = ContextVar("caller", default="")


class Gate(aio.ServerInterceptor):
    """Comes before the interceptors that parse. `keys`: None admits calls without a token."""

    def __init__(self, keys: Keys | None, call_limit: int) -> None:
        self._keys, self._call_limit = keys, call_limit
        self._running = 0
        self._open_arrivals = Arrivals(_MANY_OPEN, *_OPEN_SECONDS)
        self._arrivals = Arrivals(call_limit // 2, *_MESSAGE_SECONDS)
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns as soon as no admitted call runs."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Returns the method's handler, or one that refuses the call."""
        method, key, refused = handler_call_details.method, None, None
        if self._keys:
            try:
                key = self._keys.find(_authorization(handler_call_details.invocation_metadata))
                CALLER.set(key.name)
            except DraftBridgeError as error:
                refused = error
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method, so that a client cannot make up names for metrics
            return None
        if method.startswith(_OPEN):
            return called_early(handler, self._open_arrivals.receive)
        if refused:
            return _refusal(refused)
        if not method.startswith(_OURS):
            return handler
        # A call is admitted before its message is received, which would have no limit otherwise.
        handler = called_early(handler, self._receive)
        if key and method.endswith(_TRANSLATING):
            return self._counted(handler, None, key.translation)
        if key and method.endswith(_GENERATING):
            return self._counted(handler, key, key.request)
        return self._counted(handler)

    async def _receive(self, context: "aio.ServicerContext[Any, Any]") -> Any:
        """Returns the message of a call, and lets its client know the id before the first answer."""
        message = await self._arrivals.receive(context)
        await send_request_id(context)
        return message

    def _counted(
        self,
        handler: "grpc.RpcMethodHandler[Any, Any]",
        key: Key | None = None,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Returns a handler that counts its calls. `key` spends the tokens of its answers; `limited` admits a call."""

        def streaming(behavior: Any) -> Any:
            async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
                try:
                    with self._admitted(limited):
                        # The call must have ended before it counts as ended.
                        async with aclosing(behavior(request, context)) as responses:
                            async for response in responses:
                                if key:
                                    key.spend(_token_count(response))
                                yield response
                except DraftBridgeError as error:
                    await abort(context, error)

            return call

        def single(behavior: Any) -> Any:
            async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> Any:
                try:
                    with self._admitted(limited):
                        return await behavior(request, context)
                except DraftBridgeError as error:
                    await abort(context, error)

            return call

        return wrapped(handler, streaming, single)

    @contextmanager
    def _admitted(self, limited: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        if self._running >= self._call_limit:
            raise Overloaded(self._call_limit)
        self._running += 1
        self._idle.clear()
        try:
            with limited():
                yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def _authorization(metadata: Any) -> str | None:
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _token_count(response: Any) -> int:
    message = getattr(response, "delta", response)
    # Candidates are proposals: an engine that uses them generates its own tokens.
    return len(getattr(message, "token_ids", ()))


def _refusal(error: DraftBridgeError) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler that refuses a call of any kind, before anything of it is parsed."""

    async def refuse(requests: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        await abort(context, error)
        yield  # a generator, as the methods are

    return grpc.stream_stream_rpc_method_handler(refuse)
