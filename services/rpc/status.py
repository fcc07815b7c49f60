"""From errors to gRPC status and back: one table, one interceptor, nothing lost on the way.

An error of ours leaves as its status code, its text and an `ErrorInfo` with its reason and metadata. An
unknown one is logged whole and leaves as INTERNAL with a fixed text.
"""

import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
_DETAILS_KEY = "grpc-status-details-bin"

# A client takes 8 KiB of trailing metadata and may refuse more, and with them the status. The text travels twice, once
# with three bytes for each that is not ASCII; the details travel as base64. With these limits it all fits into 6 KiB.
_MAX_TEXT_BYTES = 600
_MAX_METADATA_BYTES = 2000
_MAX_RETRY_SECONDS = 86_400
# Google's rules for reasons and keys of an ErrorInfo, a little relaxed: both end up in logs and in statistics.
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_METADATA_KEY = re.compile(r"[A-Za-z0-9_.-]{1,63}")

# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[DraftBridgeError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unreachable, grpc.StatusCode.UNAVAILABLE),
    (errors.DraftBridgeError, grpc.StatusCode.INTERNAL),
)


class RemoteError(DraftBridgeError):
    """An error that a service on the other side reported.

    `code` is that of the call. What the other side said besides is not trusted: a `reason` that no ErrorInfo may have
    is replaced by the code's name, and the text becomes one line of limited length, fit for a log.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, str]) -> None:
        line = "".join(char if char.isprintable() else " " for char in message)
        super().__init__(_clipped(line) or f"the call failed with {code.name}")
        self.code = code
        # An instance speaks for the class at the other end.
        self.reason = reason if _REASON.fullmatch(reason) else code.name  # type: ignore[misc]
        self.metadata = dict(metadata)


def code_of(error: DraftBridgeError) -> grpc.StatusCode:
    """The status code that an error leaves with."""
    if isinstance(error, RemoteError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))


def from_rpc_error(error: aio.AioRpcError, address: str) -> DraftBridgeError:
    """The error of ours that a failed call stands for."""
    code, details = error.code(), error.details() or ""
    if report := read_report(error.trailing_metadata()):
        return RemoteError(code, report.reason, report.message or details, report.metadata)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.Unreachable(address, code.name)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.NotReady(
            f"{address} does not offer this service: check that the address is that of the right kind of server",
            address=address,
        )
    return RemoteError(code, code.name, f"{address}: {details}", {"address": address})


def status_of(error: Exception) -> status_pb2.Status:
    """The status that an error leaves with: small enough for trailing metadata, whatever the error holds.

    An error that is not one of ours is logged, and leaves as INTERNAL with a fixed text.
    """
    if not isinstance(error, DraftBridgeError):
        _log.error("unexpected error in a call", exc_info=error)
        error = DraftBridgeError("an internal error occurred; the server's log has it whole")
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_bounded(error.metadata))
    details: list[Message] = [info]
    if delay := _retry_delay(error.metadata.get("retry_seconds", "")):
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [AnyMessage() for _ in details]
    for detail, one in zip(packed, details, strict=True):
        detail.Pack(one)
    return status_pb2.Status(code=code_of(error).value[0], message=_clipped(str(error)), details=packed)


async def _abort(context: "aio.ServicerContext[Any, Any]", error: Exception) -> NoReturn:
    status = status_of(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")


def _bounded(metadata: Mapping[str, str]) -> dict[str, str]:
    """Those entries that there is room for, in order, without those whose key an ErrorInfo may not have."""
    kept, room = {}, _MAX_METADATA_BYTES
    for key, value in metadata.items():
        clipped = _clipped(value)
        # A map's entry takes a few bytes besides.
        size = len(key) + len(clipped.encode()) + 8
        if _METADATA_KEY.fullmatch(key) and size <= room:
            kept[key] = clipped
            room -= size
    return kept


def _retry_delay(seconds: str) -> Duration | None:
    """When to try again, if that is a number of seconds that somebody could wait."""
    try:
        delay = float(seconds)
    except ValueError:
        return None
    if not (math.isfinite(delay) and delay > 0):
        return None
    return Duration(seconds=min(math.ceil(delay), _MAX_RETRY_SECONDS))


def _clipped(text: str) -> str:
    """The text's beginning, as UTF-8 can say it: lone surrogates are replaced."""
    data = text.encode(errors="replace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    return data[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."


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
