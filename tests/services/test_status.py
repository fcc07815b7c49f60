"""Tests errors as gRPC status in both directions: no report of a peer can break the status or replace its code."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.errors import DraftBridgeError
from draftbridge import CallError
from draftbridge.errors import read_report
from draftbridge.v1 import model_pb2, model_pb2_grpc, target_pb2, target_pb2_grpc
from services.config import ServerConfig
from services.errors import Overloaded, SlotsExhausted
from services.metrics import ServerMetrics
from services.rpc.insight import Insight, InsightInterceptor
from services.rpc.server import Server
from services.rpc.status import RemoteError, StatusInterceptor, code_of, from_rpc_error, status_of

KEY = "grpc-status-details-bin"
# Every client accepts this size; a client may refuse larger trailing metadata and with them the status.
LIMIT_BYTES = 8 << 10
# The bridge reports UNAUTHENTICATED as its own error, because the refused token is not its client's.
CODES = [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)]

# A message can hold only UTF-8. The first keys are names of parameters in the code that reads a report.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=2000)
KEYS = st.sampled_from(["message", "self", "code", "reason", "metadata", "retry_seconds", "", "a\nb"]) | TEXTS
NUMBERS = st.sampled_from(["abc", "-5", "0", "1e400", "nan", "1e300", "0.3", "12"])
METADATA = st.dictionaries(KEYS, NUMBERS | TEXTS, max_size=8) | st.dictionaries(
    st.text("abcdef", min_size=1, max_size=8), st.text(max_size=900), min_size=50, max_size=150
)
REASONS = st.sampled_from(["", "SLOTS_EXHAUSTED", "X" * 5000, "new\nline"]) | TEXTS


def details(reason: str, message: str, metadata: dict[str, str]) -> bytes:
    """Returns a report as a service sends it."""
    packed = AnyMessage()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="elsewhere", metadata=metadata))
    return status_pb2.Status(code=3, message=message, details=[packed]).SerializeToString()


def failed(code: grpc.StatusCode, trailing: tuple[tuple[str, Any], ...], text: str = "") -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details=text)


def wire_size(status: status_pb2.Status) -> int:
    """Returns the most bytes that the trailing metadata can take in the HTTP/2 frame."""
    text = sum(1 if 0x20 <= byte < 0x7F else 3 for byte in status.message.encode())
    return text + -(-status.ByteSize() // 3) * 4 + len(KEY) + len("grpc-message") + len("grpc-status") + 2 + 3 * 32


@given(code=st.sampled_from(CODES), reason=REASONS, message=TEXTS, metadata=METADATA)
@example(code=grpc.StatusCode.ABORTED, reason="X", message="x", metadata={"message": "1", "self": "2", "code": "3"})
@example(code=grpc.StatusCode.ABORTED, reason="X", message="x", metadata={"retry_seconds": "1e400"})
@example(code=grpc.StatusCode.ABORTED, reason="X", message="\U0010ffff" * 2000, metadata={"a": "\U0010ffff" * 2000})
def test_a_report_is_passed_on_with_its_code(
    code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str]
) -> None:
    error = from_rpc_error(failed(code, ((KEY, details(reason, message, metadata)),)), "host:1")
    status = status_of(error)
    assert status.code == code.value[0]
    assert wire_size(status) < LIMIT_BYTES
    assert status.message.isprintable()
    report = read_report([(KEY, status.SerializeToString())])
    assert report is not None
    assert report.reason
    assert len(report.reason) <= 63
    assert set(report.metadata) <= set(metadata)
    # Further bridges in between do not change it.
    again = status_of(from_rpc_error(failed(code, ((KEY, status.SerializeToString()),)), "host:2"))
    assert (again.code, read_report([(KEY, again.SerializeToString())])) == (status.code, report)


@pytest.mark.parametrize("filler", ["x", "é", "\U0001f600", "\ud800"])
def test_a_long_text_keeps_its_beginning_and_its_remedy(filler: str) -> None:
    begin, remedy = "the model's file is broken (", "): download the model again"
    error = DraftBridgeError(f"{begin}{filler * 5000}{remedy}", path=f"/{filler * 5000}/name")
    status = status_of(error)
    assert status.message.startswith(begin) and status.message.endswith(remedy)
    assert 590 < len(status.message.encode()) <= 600
    report = read_report([(KEY, status.SerializeToString())])
    assert report is not None and report.metadata["path"].endswith("/name")
    passed_on = from_rpc_error(failed(grpc.StatusCode.INTERNAL, ((KEY, status.SerializeToString()),)), "host:1")
    assert str(passed_on) == status.message


@given(
    code=st.sampled_from(CODES),
    trailing=st.lists(
        st.tuples(st.just(KEY), st.binary(max_size=200))
        | st.tuples(st.sampled_from(["x-note", "retry_seconds", "message"]), TEXTS),
        max_size=3,
    ).map(tuple),
    text=TEXTS,
)
@example(code=grpc.StatusCode.ABORTED, trailing=((KEY, b"\xff"),), text="")
@example(
    code=grpc.StatusCode.ABORTED,
    trailing=(
        (KEY, status_pb2.Status(details=[AnyMessage(
            type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\x0a\x02\xff\xfe"
        )]).SerializeToString()),
    ),
    text="",
)  # fmt: skip
def test_trailing_metadata_that_cannot_be_read_leave_the_calls_own_status(
    code: grpc.StatusCode, trailing: tuple[tuple[str, Any], ...], text: str
) -> None:
    ours = {
        # The bridge reports these as its own errors: its client's call goes on, and named a valid method.
        grpc.StatusCode.DEADLINE_EXCEEDED: grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED: grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED: grpc.StatusCode.FAILED_PRECONDITION,
        # These change if the text is one of gRPC's own about connections.
        grpc.StatusCode.UNKNOWN: grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL: grpc.StatusCode.UNAVAILABLE,
    }
    error = from_rpc_error(failed(code, trailing, text), "host:1")
    assert code_of(error) in (code, ours.get(code))
    status = status_of(error)
    assert status.message
    assert wire_size(status) < LIMIT_BYTES
    assert CallError.from_rpc(failed(code, trailing, text), "host:1").code is code


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed (Unwrap failed (TSI_DATA_CORRUPTED))"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
def test_a_service_that_is_lost_in_mid_call_is_unreachable(code: grpc.StatusCode, text: str) -> None:
    error = from_rpc_error(failed(code, (), text), "host:1")
    assert (code_of(error), error.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE")
    assert str(from_rpc_error(failed(code, (), f"{text}\na line of the service"), "host:1")).isprintable()
    # A service's own report stays its own error.
    reported = from_rpc_error(failed(code, ((KEY, details("ENGINE_FAILURE", text, {})),), text), "host:1")
    assert reported.reason == "ENGINE_FAILURE"


def test_a_client_whose_connection_breaks_is_told_that_the_bridge_is_unreachable() -> None:
    damaged = failed(grpc.StatusCode.UNKNOWN, (), "Stream removed (Unwrap failed (TSI_DATA_CORRUPTED))")
    reset = failed(grpc.StatusCode.INTERNAL, (), "Received RST_STREAM with error code 2")
    for error in (damaged, reset):
        found = CallError.from_rpc(error, "host:1")
        assert (found.code, found.reason) == (error.code(), "SERVICE_UNREACHABLE")
        assert "try again" in str(found)
    bug = CallError.from_rpc(failed(grpc.StatusCode.UNKNOWN, (), "Unexpected exception"), "host:1")
    assert bug.reason == "UNKNOWN"


class Refusing(target_pb2_grpc.TargetServiceServicer):
    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for _ in requests:
            raise Overloaded(3)
        yield target_pb2.VerifyResponse()  # a generator


async def test_the_reason_of_a_refusal_reaches_a_client_that_is_still_writing() -> None:
    async def write(call: Any) -> None:
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(target_pb2.VerifyRequest())

    server = aio.server(interceptors=[InsightInterceptor(Insight()), StatusInterceptor()])
    target_pb2_grpc.add_TargetServiceServicer_to_server(Refusing(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            for _ in range(30):
                call = stub.Verify()
                writer = asyncio.create_task(write(call))
                with pytest.raises(aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                await writer
                for error in (from_rpc_error(caught.value, "host:1"), CallError.from_rpc(caught.value, "host:1")):
                    assert (error.reason, str(error)) == ("OVERLOADED", str(Overloaded(3)))
                assert code_of(from_rpc_error(caught.value, "host:1")) is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert CallError.from_rpc(caught.value, "host:1").request_id
    finally:
        await server.stop(None)


class Late(target_pb2_grpc.TargetServiceServicer):
    """Reads on after its call was cancelled."""

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield target_pb2.VerifyResponse()
        async for _ in requests:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


def _counts(metrics: ServerMetrics) -> list[Any]:
    (family,) = metrics.call_duration.collect()
    return [one for one in family.samples if one.name.endswith("_count")]


async def test_a_call_that_the_end_of_the_server_cuts_off_is_no_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = ServerMetrics()
    server = Server("127.0.0.1:0", ServerConfig(grace=0.1), Insight(metrics))
    descriptor = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
    server.register(target_pb2_grpc.add_TargetServiceServicer_to_server, Late(), descriptor)
    stop, started = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(server.run_until(stop, lambda _: started.set()))
    await started.wait()
    async with aio.insecure_channel(server.address) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        await call.write(target_pb2.VerifyRequest())
        await call.read()
        stop.set()
        await running
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert not caplog.messages
    codes = {one.labels["rpc_response_status_code"] for one in _counts(metrics) if one.value}
    assert codes and codes <= {"CANCELLED", "OK"}, "others would alert"


def test_a_service_that_refuses_the_bridges_token_is_not_the_clients_fault() -> None:
    report = details("UNAUTHENTICATED", "the token is not known here", {})
    error = from_rpc_error(failed(grpc.StatusCode.UNAUTHENTICATED, ((KEY, report),)), "host:1")
    assert (code_of(error), error.reason) == (grpc.StatusCode.UNAVAILABLE, "TOKEN_REFUSED")
    assert "host:1" in str(error) and "not known here" in str(error) and "--service-token-file" in str(error)


@given(
    message=st.text(max_size=2000), metadata=st.dictionaries(st.text(max_size=80), st.text(max_size=2000), max_size=20)
)
@example(message="a lone \ud800 surrogate", metadata={"field": "\udfff"})
def test_an_error_of_ours_leaves_whatever_it_holds(message: str, metadata: dict[str, str]) -> None:
    error = DraftBridgeError(message)
    error.metadata = metadata
    status = status_of(error)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert wire_size(status) < LIMIT_BYTES


@pytest.mark.parametrize(
    ("seconds", "delay"),
    [
        ("abc", None),
        ("-5", None),
        ("0", None),
        ("nan", None),
        ("1e400", None),
        ("inf", None),
        ("0.3", 1),
        ("1e9", 86400),
    ],
)
def test_a_delay_that_is_none_is_left_out(seconds: str, delay: int | None) -> None:
    error = RemoteError(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY", "come again", {"retry_seconds": seconds})
    assert _retry_of(status_of(error)) == delay


def _retry_of(status: status_pb2.Status) -> int | None:
    retry = error_details_pb2.RetryInfo()
    return retry.retry_delay.seconds if any(one.Unpack(retry) for one in status.details) else None


def test_what_is_well_formed_arrives_as_it_was() -> None:
    sent = status_of(SlotsExhausted(8, 64))
    error = from_rpc_error(
        failed(grpc.StatusCode.RESOURCE_EXHAUSTED, ((KEY, sent.SerializeToString()),), sent.message), "host:1"
    )
    assert (error.reason, str(error)) == ("SLOTS_EXHAUSTED", str(SlotsExhausted(8, 64)))
    assert error.metadata == {"slot_count": "8", "queue_limit": "64", "retry_seconds": "1.0"}
    assert _retry_of(sent) == _retry_of(status_of(error)) == 1


class Failing(model_pb2_grpc.ModelServiceServicer):
    """Fails with a given status."""

    def __init__(self, code: grpc.StatusCode, text: str, trailing: tuple[tuple[str, Any], ...]) -> None:
        self._failure = code, text, trailing

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:  # noqa: N802
        code, text, trailing = self._failure
        await context.abort(code, text, trailing_metadata=trailing)
        raise AssertionError("abort raises")


class Between(model_pb2_grpc.ModelServiceServicer):
    """Calls another server, and raises its error as the bridge does."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:  # noqa: N802
        async with aio.insecure_channel(self._address) as channel:
            try:
                return await model_pb2_grpc.ModelServiceStub(channel).GetModel(request)
            except aio.AioRpcError as error:
                raise from_rpc_error(error, self._address) from error


async def _passed_on(code: grpc.StatusCode, text: str, trailing: tuple[tuple[str, Any], ...]) -> aio.AioRpcError:
    """Returns the error that a client gets through a server between it and one that fails."""
    far, near = aio.server(), aio.server(interceptors=[StatusInterceptor()])
    address = f"127.0.0.1:{far.add_insecure_port('127.0.0.1:0')}"
    model_pb2_grpc.add_ModelServiceServicer_to_server(Failing(code, text, trailing), far)
    model_pb2_grpc.add_ModelServiceServicer_to_server(Between(address), near)
    port = near.add_insecure_port("127.0.0.1:0")
    await far.start()
    await near.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=20)
            except aio.AioRpcError as error:
                return error
        raise AssertionError("the call went well")
    finally:
        await near.stop(None)
        await far.stop(None)


# Longer texts would exceed what the first server can send.
SMALL = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=40)
@given(
    code=st.sampled_from([code for code in CODES if code.name not in ("DEADLINE_EXCEEDED", "UNIMPLEMENTED")]),
    text=SMALL,
    report=st.tuples(
        st.sampled_from(["", "BUSY", "X" * 500]) | SMALL, SMALL, st.dictionaries(KEYS.map(lambda key: key[:60]), SMALL)
    ).map(lambda parts: details(*parts)[:4000])
    | st.binary(max_size=300),
)
@example(
    code=grpc.StatusCode.RESOURCE_EXHAUSTED,
    text="busy",
    report=details("BUSY", "busy", {f"key-{number}": "x" for number in range(100)}),
)
@example(
    code=grpc.StatusCode.NOT_FOUND,
    text="x",
    report=details("", "", {"message": "a\nb", "self": "", "retry_seconds": "nan"}),
)
def test_over_the_wire_the_code_stays(code: grpc.StatusCode, text: str, report: bytes) -> None:
    error = asyncio.run(_passed_on(code, text, ((KEY, report), ("x-odd-bin", b"\x00\xff"), ("x-odd", "~ %"))))
    assert error.code() is code
    assert error.details()
    assert read_report(error.trailing_metadata()) is not None
