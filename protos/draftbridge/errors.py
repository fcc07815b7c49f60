"""Errors of gRPC calls, with the reason and metadata that the server reported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from draftbridge.tracing import REQUEST_ID_KEY

DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
# What gRPC reports of a handshake, such as "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:
# SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: ...: OK".
_HANDSHAKE = re.compile(
    r"(?:handshake failed[^:]*: (?:SSL_ERROR_SSL: error:\w+:SSL routines:OPENSSL_internal:)?|(?=hostname verification))"
    r"(.+)",
    re.IGNORECASE,
)
# What gRPC reports of a call whose connection breaks in mid-message, or carries damaged data.
_BROKEN = {
    grpc.StatusCode.UNKNOWN: ("Stream removed",),
    grpc.StatusCode.INTERNAL: ("RST_STREAM", "GOAWAY"),
}


@dataclass(frozen=True)
class ErrorReport:
    """The code and message of a `google.rpc.Status`, and the reason and metadata of its `ErrorInfo`."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: Mapping[str, str]


def read_report(metadata: Any) -> ErrorReport | None:
    """Returns the report in the metadata of a failed call, or None if they have no readable one."""
    for key, value in metadata or ():
        if key == DETAILS_KEY and (report := _parsed(value)):
            return report
    return None


def _parsed(data: bytes) -> ErrorReport | None:
    try:
        status = status_pb2.Status.FromString(data)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
                return ErrorReport(code, status.message, info.reason, dict(info.metadata))
    except DecodeError:  # the status code of the call itself is reported then
        return None
    return None


def tls_failure(code: grpc.StatusCode, details: str) -> str:
    """Returns why a call's TLS handshake failed, or "" if that is not what failed."""
    if code is grpc.StatusCode.UNAVAILABLE and (found := _HANDSHAKE.search(details)):
        return found[1].strip().removesuffix(": OK").removesuffix(".")
    return ""


def connection_broke(code: grpc.StatusCode, details: str) -> bool:
    """Returns whether a call failed because its connection broke in mid-message, or carried damaged data."""
    return any(word in details for word in _BROKEN.get(code, ()))


class CallError(Exception):
    """A call failed. The text names the remedy; `reason` identifies the error for programs, such as INVALID_FIELD.

    `request_id`: the call's id in the server's log; empty if no server has answered.
    """

    request_id = ""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata = metadata

    @classmethod
    def from_rpc(cls, error: Any, address: str) -> "CallError":
        """Converts a `grpc.RpcError` or `grpc.aio.AioRpcError` of a call to `address`."""
        failure = cls._from_rpc(error, address)
        sent = (value for key, value in error.initial_metadata() or () if key == REQUEST_ID_KEY)
        failure.request_id = next(sent, "")
        return failure

    @classmethod
    def _from_rpc(cls, error: Any, address: str) -> "CallError":
        code = error.code()
        if report := read_report(error.trailing_metadata()):
            return cls(code, report.reason, report.message, report.metadata)
        # A refused stream that was still written to.
        if code is grpc.StatusCode.INTERNAL and (report := read_report(error.initial_metadata())):
            return cls(report.code, report.reason, report.message, report.metadata)
        if failure := tls_failure(code, error.details() or ""):
            message = (
                f"no secure connection to {address} ({failure}): check that the server uses TLS, that its certificate "
                "is valid now and for this address, and that the client trusts its authority (--ca)"
            )
            return cls(code, "TLS_FAILED", message, {"address": address})
        # CANCELLED, though nobody has cancelled the call: the bridge was stopping, or a proxy on the way has reset it.
        broke = code is grpc.StatusCode.CANCELLED or connection_broke(code, error.details() or "")
        if broke or code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            late, answered = code is grpc.StatusCode.DEADLINE_EXCEEDED, bool(error.initial_metadata())
            check = (
                "check the address (a bridge's own port, not its HTTP port), that a server is running there, and that "
                "it and the client both use TLS or both do not; with mutual TLS, also the client's certificate"
            )
            if late:
                remedy = "give a longer timeout, or fewer tokens" if answered else f"give a longer timeout, or {check}"
                message = f"no complete answer of {address} came in time: {remedy}"
            elif answered or broke:
                message = (
                    f"{address} broke off its answer: it has stopped, or the connection was lost; try again when it "
                    "answers (draftbridge health)"
                )
            else:
                message = f"nothing answers at {address}: {check}"
            return cls(code, "SERVICE_UNREACHABLE", message, {"address": address})
        if code is grpc.StatusCode.UNIMPLEMENTED:
            message = f"{address} is not a bridge: give the address that `draftbridge bridge` or `up` prints"
            return cls(code, "NOT_A_BRIDGE", message, {"address": address})
        return cls(code, code.name, f"{address}: {error.details()}", {"address": address})
