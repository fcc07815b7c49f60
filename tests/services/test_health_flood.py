"""A service that reports its health without end does not occupy the bridge."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftbridge.v1 import model_pb2
from services.bridge.connection import Connection
from services.bridge.endpoint import ModelReader


class Flood:
    """A call whose answers never end."""

    read_count = 0

    def __init__(self, channel: object) -> None:
        pass

    def Watch(self, request: object) -> "Flood":  # noqa: N802
        return self

    async def __aiter__(self) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        while True:
            Flood.read_count += 1
            await asyncio.sleep(0)
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def cancel(self) -> None:
        pass


async def test_reports_of_good_health_are_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_pb2_grpc, "HealthStub", Flood)
    async with aio.insecure_channel("127.0.0.1:1") as channel:
        one = Connection("x", model_pb2.ROLE_DRAFT, channel, channel, ModelReader(), 1.0, lambda new, old: None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one._until_unhealthy(), 0.3)
    assert 0 < Flood.read_count < 10
