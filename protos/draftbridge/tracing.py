"""Makes calls part of the application's own trace, if the application uses OpenTelemetry."""

import sys
from typing import Any

REQUEST_ID_KEY = "x-request-id"


class CallTrace:
    """The client's span of one call. Without OpenTelemetry in this process, there is none.

    `metadata`: what the call sends, so that its logs and spans elsewhere belong to it.
    """

    def __init__(self, method: str, request_id: str) -> None:
        carrier = {REQUEST_ID_KEY: request_id} if request_id else {}
        self._span: Any = None
        # An application that traces has imported it; others should not wait for the import.
        if "opentelemetry.trace" in sys.modules:
            from opentelemetry import propagate, trace

            attributes = {"rpc.system.name": "grpc", "rpc.method": method}
            self._span = trace.get_tracer("draftbridge").start_span(
                method, kind=trace.SpanKind.CLIENT, attributes=attributes
            )
            propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.metadata = tuple(carrier.items())

    def end(self, code: str = "") -> None:
        """Ends the span. `code`: the name of the status of a call that failed."""
        if self._span is None:
            return
        if code:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("rpc.response.status_code", code)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
