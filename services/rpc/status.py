"""Converts errors to gRPC status and back.

A `DraftBridgeError` is sent as a status code, its text, and an `ErrorInfo` with its reason and metadata. Any other
error is logged with its traceback and sent as INTERNAL with a fixed text.
"""

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from bridge.errors import DraftBridgeError, InvalidRequest, NotReady, ProtocolViolation, Unreachable
from draftbridge.errors import DETAILS_KEY, connection_broke, read_report, tls_failure
from services.errors import Exhausted, ModelNotFound, StreamEnded, TlsFailed, TokenRefused, Unauthenticated
from services.logs import REQUEST_ID_KEY, request_id
from services.quoting import clipped, one_line
from services.rpc.handlers import wrapped

_log = logging.getLogger(__name__)

DOMAIN = "draftbridge"

# Clients may refuse more than 8 KiB of trailing metadata and lose the status with it. The text is sent twice, once with
# three bytes for each that is not ASCII; the details are sent as base64. This limit, and that of `clipped`, keep the
# total below 6 KiB.
_MAX_METADATA_BYTES = 2000
_MAX_RETRY_SECONDS = 86_400
# What gRPC itself reports of a call that its server did not answer. CANCELLED: the server was stopping, or a proxy on
# the way has reset the call; one that this side cancels does not fail.
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# What grpc.aio reports of a write to a stream that the server has ended, in place of the server's status.
_FAILED_WRITE = "Internal error from Core"
# What a call raises that reads on when the grace period of its server is over.
_STOPPED = "_ServerStoppedError"
# Reasons and keys of an ErrorInfo, slightly wider than Google's rules: both end up in logs and statistics.
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_METADATA_KEY = re.compile(r"[A-Za-z0-9_.-]{1,63}")

# The first class that the error is an instance of gives the code.
_CODES: tuple[tuple[type[DraftBridgeError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Unreachable, grpc.StatusCode.UNAVAILABLE),
    (DraftBridgeError, grpc.StatusCode.INTERNAL),
)


class RemoteError(DraftBridgeError):
    """An error that a remote service reported.

    `code` is the call's. The rest is not trusted: an invalid `reason` is replaced by the code's name, and the text is
    cut to one printable line for the log.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, str]) -> None:
        super().__init__(clipped(one_line(message)) or f"the call failed with {code.name}")
        self.code = code
        # The class's reason is a placeholder: each instance has that of the remote error.
        self.reason = reason if _REASON.fullmatch(reason) else code.name  # type: ignore[misc]
        self.metadata = dict(metadata)


def code_of(error: DraftBridgeError) -> grpc.StatusCode:
    """Returns the status code that an error is sent with."""
    if isinstance(error, RemoteError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))


def from_rpc_error(error: aio.AioRpcError, address: str) -> DraftBridgeError:
    """Converts a failed call to `address` to a `DraftBridgeError`."""
    code, details = error.code(), one_line(error.details() or "")
    report = read_report(error.trailing_metadata())
    failed_write = code is grpc.StatusCode.INTERNAL and _FAILED_WRITE in details
    if failed_write and not report and (report := read_report(error.initial_metadata())):
        code = report.code
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return TokenRefused(address, str(RemoteError(code, "", report.message if report else details, {})))
    if failure := tls_failure(code, details):
        return TlsFailed(address, failure)
    if report:
        return RemoteError(code, report.reason, report.message or details, report.metadata)
    if code in _UNANSWERED:
        return Unreachable(address, code.name)
    if failed_write:
        return StreamEnded(address)
    if connection_broke(code, details):
        return Unreachable(address, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotReady(
            f"{address} does not offer this service: check that this is the address of the right kind of server",
            address=address,
        )
    return RemoteError(code, code.name, f"{address}: {details}", {"address": address})


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status that an error is sent with, always small enough for trailing metadata.

    An error that is not a `DraftBridgeError` is logged and becomes INTERNAL with a fixed text.
    """
    if not isinstance(error, DraftBridgeError):
        _log.error("unexpected error in a call", exc_info=error)
        error = DraftBridgeError("an internal error occurred; see the server's log")
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_bounded(error.metadata))
    details: list[Message] = [info]
    if seconds := retry_seconds(error.metadata):
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds)))
    packed = [AnyMessage() for _ in details]
    for detail, one in zip(packed, details, strict=True):
        detail.Pack(one)
    return status_pb2.Status(code=code_of(error).value[0], message=clipped(str(error)), details=packed)


async def abort(context: "aio.ServicerContext[Any, Any]", error: Exception) -> NoReturn:
    """Ends a call with the status of an error, unless the server has stopped and with it the call."""
    if type(error).__name__ == _STOPPED:
        raise asyncio.CancelledError from error
    status = status_of(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    report = (DETAILS_KEY, status.SerializeToString())
    # A client whose next message finds the stream ended loses the trailing metadata, but not the initial ones.
    with suppress(aio.UsageError):  # they have been sent
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id.get()), report))
    await context.abort(code, status.message, trailing_metadata=(report,))
    raise AssertionError("abort raises")


def _bounded(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the first entries that fit into the limit, without those whose key is not allowed in an ErrorInfo."""
    kept, room = {}, _MAX_METADATA_BYTES
    for key, value in metadata.items():
        short = clipped(value)
        # Each map entry has a few bytes of overhead.
        size = len(key) + len(short.encode()) + 8
        if _METADATA_KEY.fullmatch(key) and size <= room:
            kept[key] = short
            room -= size
    return kept


def retry_seconds(metadata: Mapping[str, str]) -> int:
    """Returns the delay in whole seconds, at most a day; 0 if there is none. A remote error may hold any text."""
    try:
        delay = float(metadata.get("retry_seconds", 0))
    except ValueError:
        return 0
    return min(math.ceil(delay), _MAX_RETRY_SECONDS) if math.isfinite(delay) and delay > 0 else 0


class _Malformed:
    """A request that could not be parsed."""

    def __init__(self, error: DecodeError) -> None:
        self.error = ProtocolViolation(
            f"the request could not be parsed ({error}): send a message of the contract, with text in valid UTF-8"
        )


class StatusInterceptor(aio.ServerInterceptor):
    """Maps errors that a servicer raises to the status of its call."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Returns a handler that maps errors; calls of other packages are left unchanged."""
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

        return wrapped(handler, _streaming, _single, parse_or_keep)


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
            await abort(context, error)

    return call


def _streaming(behavior: Any) -> Any:
    async def call(request: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        try:
            async with aclosing(behavior(_checked(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort(context, error)

    return call
