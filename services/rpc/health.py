"""gRPC's health service. Unlike the library's, a change of health does not wait for clients that watch it slowly."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.gate import CALLER

# Of calls without a key: strangers may watch too, and a watch takes up to 40 KB. Each worker of a bridge, which has at
# most 256, watches once.
_MAX_WATCHES = 2048
# Of a request for a watch, which is held until the watch ends; it may have fields that the contract lacks.
_MAX_REQUEST_BYTES = 512
_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package is not typed
    """Answers with the latest of what `set` was given. gRPC prescribes the method names."""

    def __init__(self) -> None:
        self._serving: Mapping[str, bool] = {}
        self._changed = asyncio.Event()
        self._watch_count = 0

    def set(self, serving: Mapping[str, bool]) -> None:
        """Sets which services can serve, by full name; "" is the process."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> health_pb2.HealthCheckResponse:
        """Returns the present health. Aborts with NOT_FOUND for an unknown service."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server does not have the service")
        return _Response(status=self._status(request.service))

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> health_pb2.HealthListResponse:
        """Returns the present health of the process and of each service."""
        statuses = {name: _Response(status=self._status(name)) for name in self._serving}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yields the health, and each change of it that the client is quick enough for.

        Aborts with NOT_FOUND if the request is too long, and with RESOURCE_EXHAUSTED if too many calls without a key
        watch already.
        """
        name, is_counted = request.service, not CALLER.get()
        if request.ByteSize() > _MAX_REQUEST_BYTES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server does not have the service")
        if is_counted and self._watch_count >= _MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"already {_MAX_WATCHES} calls watch the health")
        self._watch_count += is_counted
        try:
            sent = None
            while True:
                changed, status = self._changed, self._status(name)
                if status != sent:
                    yield _Response(status=status)
                    sent = status
                await changed.wait()
        finally:
            self._watch_count -= is_counted

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        serving = self._serving.get(service)
        if serving is None:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if serving else _Response.NOT_SERVING
