"""Observes HTTP requests: gives each its id, its span, its metrics and a line in the log."""

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.logs import REQUEST_ID_KEY, read_request_id, request_id
from services.metrics import HttpMetrics
from services.traces import Traces

_log = logging.getLogger(__name__)

# A client that leaves before the answer gets none; proxies log this status for it.
_CLIENT_LEFT = 499
# Paths that have a name in metrics and traces. A client cannot make up others.
_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/segmentations", "/health", "/metrics", "/")
_GENERATING = ("/v1/completions", "/v1/chat/completions")
_PREFIXES = {"/v1/models/": "/v1/models/{name}", "/static/": "/static/{file}"}
_METHODS = ("GET", "POST", "HEAD", "OPTIONS")
# Other requests, such as those of probes, do not become spans and log lines.
_TRACED = "/v1/"


class Insight:
    """Observes the requests of an application. Everything that a request does runs in its context."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, traces: Traces) -> None:
        self._app, self._metrics, self._traces = app, metrics, traces
        for route in _GENERATING:
            # Prometheus sees an increase only of a series that it knows: the first such error would not alert.
            metrics.http_duration.labels("POST", route, "500")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = perf_counter(), _CLIENT_LEFT
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
        request_id.set(read_request_id(headers))
        id_ = request_id.get().encode()
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        route = _route(scope["path"])
        traced = route.startswith(_TRACED)
        span = self._traces.begin_request(method, route, headers) if traced else None
        self._metrics.active_http_requests.labels(route).inc()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_KEY.encode(), id_)]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            seconds = perf_counter() - started
            self._metrics.active_http_requests.labels(route).dec()
            self._metrics.http_duration.labels(method, route, str(status)).observe(seconds)
            if span:
                span.end(status)
            if traced:
                fields = {"method": f"{method} {route}", "code": str(status), "seconds": round(seconds, 6)}
                _log.info("%s %s ended with %d after %.3f s", method, route, status, seconds, extra=fields)


def _route(path: str) -> str:
    if path in _ROUTES:
        return path
    return next((name for prefix, name in _PREFIXES.items() if path.startswith(prefix)), "_OTHER")
