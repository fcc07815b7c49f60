"""Traces of requests by OpenTelemetry: one trace across client, bridge and model services, off unless configured.

Processes pass the trace on as W3C `traceparent` metadata. Spans carry counts and times, never a text.
"""

import importlib.util
import logging
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from bridge.errors import DraftBridgeError
from services.extras import install_extra
from services.logs import REQUEST_ID_KEY, request_id

_TRACE_KEYS = ("traceparent", "tracestate")
# Status codes that the server is to blame for.
_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
# Spans are sent every second, and the rest when the process ends.
_SEND_MILLISECONDS = 1000
# A collector that is away delays the end of the process by this long.
_TIMEOUT_SECONDS = 2
# It would also fill the log: the exporter writes two lines for each failed sending.
_LOG_SECONDS = 60.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.exporter"

# The OpenTelemetry span of the call that the present task serves.
_current: ContextVar[Any] = ContextVar("current", default=None)


class TracingNotInstalled(DraftBridgeError, reason="TRACING_NOT_INSTALLED"):
    """`--otlp` was given, but OpenTelemetry is not installed."""

    def __init__(self) -> None:
        super().__init__(f"--otlp needs OpenTelemetry, which is not installed: {install_extra('otel')}")


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that makes a call part of the present request: its id, and its trace if there is one."""
    carrier: dict[str, str] = {}
    if (span := _current.get()) is not None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    if id_ := request_id.get():
        carrier[REQUEST_ID_KEY] = id_
    return tuple(carrier.items())


class CallSpan:
    """The span of one call or HTTP request."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, code: str | int) -> None:
        """Ends the span with the name of a gRPC status or with an HTTP status. Faults of the server are errors."""
        from opentelemetry.trace import StatusCode

        kind = "http" if isinstance(code, int) else "rpc"
        self._span.set_attribute(f"{kind}.response.status_code", code)
        if (code >= 500) if isinstance(code, int) else (code in _FAULTS):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class _Seldom(logging.Filter):
    """Passes errors only, and one in `_LOG_SECONDS`."""

    _last: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno < logging.ERROR or (self._last is not None and now - self._last < _LOG_SECONDS):
            return False
        self._last = now
        return True


class Traces:
    """Creates the spans of a process, and sends them to an OTLP/gRPC `endpoint`; without one, there are no spans.

    `service`: the process's name in the traces. Raises `TracingNotInstalled`.
    """

    def __init__(self, endpoint: str = "", service: str = "") -> None:
        self._provider: Any = None
        self._tracer: Any = None
        if not endpoint:
            return
        if not importlib.util.find_spec("opentelemetry") or not importlib.util.find_spec("opentelemetry.exporter"):
            raise TracingNotInstalled
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logging.getLogger(_EXPORTER).addFilter(_Seldom())
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        # A scheme of https makes the exporter use TLS.
        exporter = OTLPSpanExporter(endpoint, not endpoint.startswith("https:"), timeout=_TIMEOUT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_SEND_MILLISECONDS))
        self._tracer = self._provider.get_tracer("draftbridge")

    def begin_call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> CallSpan | None:
        """Begins the span of a call that this process serves, in the caller's trace if the metadata names one."""
        return self._begin(method, metadata, {"rpc.system.name": "grpc", "rpc.method": method})

    def begin_request(self, method: str, route: str, headers: Iterable[tuple[str, Any]]) -> CallSpan | None:
        """Begins the span of an HTTP request, in the caller's trace if the headers name one."""
        return self._begin(f"{method} {route}", headers, {"http.request.method": method, "http.route": route})

    def _begin(self, name: str, metadata: Iterable[tuple[str, Any]], attributes: dict[str, str]) -> CallSpan | None:
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: value for key, value in metadata if key in _TRACE_KEYS and isinstance(value, str)}
        attributes |= {"draftbridge.request_id": request_id.get()}
        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes)
        _current.set(span)
        return CallSpan(span)

    def add_span(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, str | int | float]) -> None:
        """Adds a part of the present call, with its begin and end in nanoseconds since the epoch."""
        parent = _current.get()
        if self._tracer is None or parent is None:
            return
        from opentelemetry import trace

        named = {f"draftbridge.{key}": value for key, value in attributes.items()}
        span = self._tracer.start_span(name, trace.set_span_in_context(parent), start_time=start_ns, attributes=named)
        span.end(end_ns)

    def close(self) -> None:
        """Sends the spans that are left."""
        if self._provider is not None:
            self._provider.shutdown()


NO_TRACES = Traces()


class Stages:
    """The stages of a request, one after the other, as parts of the span of the present call."""

    def __init__(self, traces: Traces, name: str) -> None:
        self._traces = traces
        self._name, self._began_ns = name, time.time_ns()

    def begin(self, name: str, **attributes: str | int | float) -> None:
        """Ends the present stage, with attributes, and begins the next."""
        self.end(**attributes)
        self._name, self._began_ns = name, time.time_ns()

    def end(self, **attributes: str | int | float) -> None:
        """Ends the present stage."""
        self._traces.add_span(self._name, self._began_ns, time.time_ns(), attributes)
