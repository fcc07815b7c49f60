"""Observes every call of our services: its metrics, its span, its request id and a line in the log."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import grpc
from grpc import aio

from services.logs import REQUEST_ID_KEY, read_request_id, request_id
from services.metrics import ServerMetrics
from services.rpc.handlers import wrapped
from services.traces import Traces

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Insight:
    """What a server shows of its work."""

    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    traces: Traces = field(default_factory=Traces)
    channelz: bool = False


class InsightInterceptor(aio.ServerInterceptor):
    """Observes calls. It must be the first interceptor, so that it sees the status that a call ends with."""

    def __init__(self, insight: Insight) -> None:
        self._insight = insight

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Returns a handler that observes its call; calls of other packages are left unchanged."""
        handler = await continuation(handler_call_details)
        # Unknown methods have no handler, so that a client cannot make up names for metrics.
        if handler is None or not handler_call_details.method.startswith("/draftbridge."):
            return handler
        method = handler_call_details.method.removeprefix("/")
        return wrapped(handler, partial(self._streaming, method), partial(self._single, method))

    @contextmanager
    def _call(self, method: str, context: "aio.ServicerContext[Any, Any]") -> Iterator[None]:
        """Observes the block as a call. The context variables that it sets last as long as the call's task."""
        started = perf_counter()
        metrics, metadata = self._insight.metrics, context.invocation_metadata() or ()
        request_id.set(read_request_id(metadata))
        id_ = request_id.get()
        span = self._insight.traces.begin_call(method, metadata)
        metrics.active_calls.labels(method).inc()
        code = grpc.StatusCode.CANCELLED
        try:
            yield
            code = _code(context, grpc.StatusCode.OK)
        except Exception:  # `abort` has set the code
            code = _code(context, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            seconds = perf_counter() - started
            metrics.active_calls.labels(method).dec()
            metrics.call_duration.labels(method, code.name).observe(seconds)
            if span:
                span.end(code.name)
            # A call that is closed early ends in another task.
            request_id.set(id_)
            fields = {"method": method, "code": code.name, "seconds": round(seconds, 6)}
            _log.info("%s ended with %s after %.3f s", method, code.name, seconds, extra=fields)

    def _single(self, method: str, behavior: Callable[..., Awaitable[Any]]) -> Any:
        async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> Any:
            with self._call(method, context):
                response = await behavior(request, context)
                await send_request_id(context)
                return response

        return call

    def _streaming(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
            with self._call(method, context):
                is_first = True
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        if is_first:
                            await send_request_id(context)
                            is_first = False
                        yield response

        return call


async def send_request_id(context: "aio.ServicerContext[Any, Any]") -> None:
    """Sends the initial metadata, unless they have been sent.

    Not before a call's first message has arrived: a call that is refused earlier sends them with the reason.
    """
    with suppress(aio.UsageError):
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id.get()),))


def _code(context: "aio.ServicerContext[Any, Any]", otherwise: grpc.StatusCode) -> grpc.StatusCode:
    """Returns the status code that was set for a call, as its enumeration member."""
    number = context.code()
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK and number in (code, code.value[0]):
            return code
    return otherwise
