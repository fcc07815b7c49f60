"""From errors to gRPC status and back: one table, one interceptor, nothing lost on the way.

An error of ours leaves as its status code, its text and an `ErrorInfo` with its reason and metadata. An
unknown one is logged whole and leaves as INTERNAL with a fixed text.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from bridge import errors
from bridge.errors import DraftBridgeError
from draftbridge.errors import read_report

_log = logging.getLogger(__name__)

DOMAIN = "draftbridge"
_LONGEST_BYTES = 600
_DETAILS_KEY = "grpc-status-details-bin"

# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[DraftBridgeError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unreachable, grpc.StatusCode.UNAVAILABLE),
    (errors.DraftBridgeError, grpc.StatusCode.INTERNAL),
)


class RemoteError(DraftBridgeError):
    """An error that a service on the other side reported; `reason` and `metadata` are as it said."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str]) -> None:
        super().__init__(message, **metadata)
        self.code = code
        self.reason = reason  # type: ignore[misc]  # an instance speaks for the class at the other end


def code_of(error: DraftBridgeError) -> grpc.StatusCode:
    """The status code that an error leaves with."""
    if isinstance(error, RemoteError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))


def from_rpc_error(error: aio.AioRpcError, address: str) -> DraftBridgeError:
    """The error of ours that a failed call stands for."""
    if report := read_report(error.trailing_metadata()):
        return RemoteError(error.code(), report.reason, report.message, dict(report.metadata))
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.Unreachable(address, error.code().name)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.NotReady(
            f"{address} does not offer this service: check that the address is that of the right kind of server",
            address=address,
        )
    return RemoteError(error.code(), error.code().name, f"{address}: {error.details()}", {"address": address})


async def _abort(context: "aio.ServicerContext[Any, Any]", error: Exception) -> NoReturn:
    if not isinstance(error, DraftBridgeError):
        _log.error("unexpected error in a call", exc_info=error)
        error = DraftBridgeError("an internal error occurred; the server's log has it whole")
    metadata = {key: _clipped(value) for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    message = _clipped(str(error))
    details: list[Message] = [info]
    if seconds := error.metadata.get("retry_seconds"):
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(nanos=0, seconds=math.ceil(float(seconds)))))
    code = code_of(error)
    packed = [AnyMessage() for _ in details]
    for detail, one in zip(packed, details, strict=True):
        detail.Pack(one)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    await context.abort(code, message, trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")


def _clipped(text: str) -> str:
    """Trailing metadata have a limit of a few kilobytes, and what a user sent can be long."""
    data = text.encode(errors="replace")
    return text if len(data) <= _LONGEST_BYTES else data[:_LONGEST_BYTES].decode(errors="ignore") + "..."


class _Malformed:
    """A request that could not be parsed."""

    def __init__(self, error: DecodeError) -> None:
        self.error = errors.ProtocolViolation(
            f"the request could not be parsed ({error}): text must be valid UTF-8 and the message one of the contract"
        )


class StatusInterceptor(aio.ServerInterceptor):
    """Wraps every call of a server, so that servicers simply raise."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Replaces the handler by one that maps errors."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/draftbridge."):
            return handler
        parse = handler.request_deserializer
        assert parse is not None

        def parse_or_keep(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return _Malformed(error)

        options = {"request_deserializer": parse_or_keep, "response_serializer": handler.response_serializer}
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(_streaming(handler.stream_stream), **options)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream), **options)
        assert handler.unary_unary is not None, "the contract has no client streams"
        return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary), **options)


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise request.error
    if hasattr(request, "__aiter__"):
        return _checked_each(request)
    return request


async def _checked_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _single(behavior: Callable[..., Awaitable[Any]]) -> Any:
    async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> Any:
        try:
            return await behavior(_checked(request), context)
        except Exception as error:
            await _abort(context, error)

    return call


def _streaming(behavior: Any) -> Any:
    async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        try:
            async for response in behavior(_checked(request), context):
                yield response
        except Exception as error:
            await _abort(context, error)

    return call
