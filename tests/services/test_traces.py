"""Tests that a request is one trace across client, bridge and model services, which are real processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftbridge import CallError, Client
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.traces import NO_TRACES, Traces, outgoing_metadata
from tests.support.observed import Collector, Observed, collector, observed
from tests.support.waiting import eventually

PROMPT = "The quick xyzzy fox"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Sets up tracing in this process, as an application would."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def traced(
    tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Observed, Collector]]:
    """Runs a target, a draft and a bridge that send their spans to a collector here. Yields the bridge."""
    directory = tmp_path_factory.mktemp("traced")
    with ExitStack() as stack:
        endpoint, got = stack.enter_context(collector())
        options = ("--dtype", "float32", "--threads", "1", "--slots", "3", "--otlp", endpoint)
        target, draft = (
            stack.enter_context(observed(directory, role, "serve", str(path), "--role", role, *options))
            for role, path in zip(("target", "draft"), tiny_models, strict=True)
        )
        models = ("--target", target.address, "--draft", draft.address)
        more = ("--otlp", endpoint, "--http", "127.0.0.1:0")
        bridge = stack.enter_context(observed(directory, "bridge", "bridge", *models, *more))
        yield bridge, got


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


def test_a_request_is_one_trace(traced: tuple[Observed, Collector], exporter: InMemorySpanExporter) -> None:
    bridge, got = traced
    exporter.clear()
    with Client(bridge.address) as client, trace.get_tracer("application").start_as_current_span("work") as work:
        result = client.generate(PROMPT, max_tokens=12, speculation="lockstep", request_id="traced-1")
    [calling] = [one for one in exporter.get_finished_spans() if one.name.endswith("/Generate")]
    trace_id = work.get_span_context().trace_id.to_bytes(16)
    assert calling.context.trace_id.to_bytes(16) == trace_id and calling.parent == work.get_span_context()

    def ours() -> dict[tuple[str, str], Span]:
        return {(service, span.name): span for service, span in got.spans if span.trace_id == trace_id}

    eventually(lambda: len(ours()) == 6)
    spans = ours()
    service = "draftbridge.v1.BridgeService/Generate"
    request = spans["draftbridge-bridge", service]
    assert request.parent_span_id == calling.context.span_id.to_bytes(8)
    children = {
        ("draftbridge-bridge", "encode"),
        ("draftbridge-bridge", "prefill"),
        ("draftbridge-bridge", "decode"),
        ("draftbridge-target", "draftbridge.v1.TargetService/Verify"),
        ("draftbridge-draft", "draftbridge.v1.DraftService/Draft"),
    }
    assert set(spans) == children | {("draftbridge-bridge", service)}
    assert all(spans[name].parent_span_id == request.span_id for name in children)
    encode, prefill, decode = (spans["draftbridge-bridge", name] for name in ("encode", "prefill", "decode"))
    times = [request.start_time_unix_nano, encode.start_time_unix_nano, encode.end_time_unix_nano]
    times += [prefill.end_time_unix_nano, decode.end_time_unix_nano, request.end_time_unix_nano]
    assert times == sorted(times)

    statistics = result.finished.speculation
    summary = attributes(decode)
    assert summary["draftbridge.target_passes"] == statistics.target_pass_count
    assert summary["draftbridge.candidates"] == statistics.num_draft_tokens > 0
    assert summary["draftbridge.accepted"] == statistics.num_accepted_tokens
    assert summary["draftbridge.generated_tokens"] == 12
    assert attributes(encode)["draftbridge.prompt_tokens"] == result.started.prompt_token_count
    values = attributes(request)
    assert values["draftbridge.request_id"] == "traced-1" and values["rpc.response.status_code"] == "OK"
    assert (
        attributes(spans["draftbridge-target", "draftbridge.v1.TargetService/Verify"])["draftbridge.request_id"]
        == "traced-1"
    )
    assert all("xyzzy" not in str(span) and result.text not in str(span) for span in spans.values())


def test_a_failed_request_has_its_code(traced: tuple[Observed, Collector], exporter: InMemorySpanExporter) -> None:
    bridge, got = traced
    exporter.clear()
    with Client(bridge.address) as client, pytest.raises(CallError, match="no target"):
        client.generate(PROMPT, target="nobody")
    [calling] = exporter.get_finished_spans()
    assert calling.attributes is not None and calling.attributes["rpc.response.status_code"] == "NOT_FOUND"
    trace_id = calling.context.trace_id.to_bytes(16)
    eventually(lambda: any(span.trace_id == trace_id for _, span in got.spans))
    [request] = [span for _, span in got.spans if span.trace_id == trace_id]
    assert attributes(request)["rpc.response.status_code"] == "NOT_FOUND"
    assert request.status.code != Status.STATUS_CODE_ERROR, "it is the caller's mistake"


def test_a_request_of_a_client_that_does_not_trace_is_a_trace_too(traced: tuple[Observed, Collector]) -> None:
    bridge, got = traced
    script = (
        "import sys; from draftbridge import Client\n"
        f"with Client({bridge.address!r}) as client: client.generate('fox', max_tokens=3, request_id='untraced')\n"
        "assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    named = [("draftbridge.request_id", "untraced")]

    def root() -> list[Span]:
        return [
            span
            for service, span in got.spans
            if service == "draftbridge-bridge" and attributes(span).items() >= dict(named).items()
        ]

    eventually(lambda: len(root()) == 1)
    assert root()[0].parent_span_id == b""


def test_an_http_request_is_one_trace(traced: tuple[Observed, Collector]) -> None:
    bridge, got = traced
    trace_id, parent = bytes(range(1, 17)), bytes(range(1, 9))
    headers = {"traceparent": f"00-{trace_id.hex()}-{parent.hex()}-01", "x-request-id": "traced-http"}
    body = {"prompt": PROMPT, "max_tokens": 12, "draftbridge": {"mode": "lockstep"}}
    with httpx.Client(base_url=bridge.http, headers=headers, timeout=60) as http:
        assert http.post("/v1/completions", json=body).headers["x-request-id"] == "traced-http"
        assert http.post("/v1/completions", json={}).status_code == 400
        assert http.get("/health").status_code == 200

    def ours() -> list[tuple[str, Span]]:
        return [(service, span) for service, span in got.spans if span.trace_id == trace_id]

    eventually(lambda: len(ours()) == 7)
    doors = [span for _, span in ours() if span.name == "POST /v1/completions"]
    done, refused = sorted(doors, key=lambda span: span.start_time_unix_nano)
    assert attributes(done)["http.response.status_code"] == 200
    assert attributes(refused)["http.response.status_code"] == 400
    assert done.parent_span_id == parent and attributes(done)["draftbridge.request_id"] == "traced-http"
    children = {span.name for _, span in ours() if span.parent_span_id == done.span_id}
    stages = {"encode", "prefill", "decode"}
    assert children == stages | {"draftbridge.v1.TargetService/Verify", "draftbridge.v1.DraftService/Draft"}
    assert all("xyzzy" not in str(span) for _, span in ours())


def test_a_collector_that_is_away_costs_spans_only(tmp_path: Path) -> None:
    with observed(tmp_path, "draft", "serve", "suffix", "--role", "draft", "--otlp", "http://127.0.0.1:1") as server:
        with grpc.insecure_channel(server.address) as channel:
            model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=30)
        server.process.terminate()
        assert server.process.wait(25) == 0


def test_a_collector_that_is_away_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = "http://127.0.0.1:1"
    traces = Traces(nowhere, "x")
    for _ in range(3):
        OTLPSpanExporter(nowhere, insecure=True, timeout=0.2).export(())
    traces.close()
    assert len([one for one in caplog.records if one.name.startswith("opentelemetry.exporter")]) == 1


def test_nothing_is_traced_unless_configured() -> None:
    assert NO_TRACES.begin_call("x", ()) is None
    assert outgoing_metadata() == ()


def test_without_opentelemetry_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.traces import TracingNotInstalled

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TracingNotInstalled, match=r"pip install .*\[otel\]"):
        Traces("http://127.0.0.1:1", "x")
