"""A service whose reports of its health have no end, or contradict one another, does not occupy the bridge."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftbridge.v1 import model_pb2
from services.bridge.connection import _HEALTHY_SECONDS, Connection
from services.bridge.endpoint import Endpoint, ModelReader
from tests.support import tiny


async def seconds_until(work: Coroutine[Any, Any, Any], condition: Callable[[], bool]) -> float:
    """Returns how long some work, which has no end, takes until the condition holds. Then it is cancelled."""
    loop = asyncio.get_running_loop()
    started, task = loop.time(), asyncio.create_task(work)
    async with asyncio.timeout(60):
        while not condition():
            assert not task.done()
            await asyncio.sleep(0)
    taken = loop.time() - started
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return taken


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
        taken = await seconds_until(one._until_unhealthy(), lambda: Flood.read_count >= 4)
    assert taken > 2.9 * _HEALTHY_SECONDS


class Contradiction:
    """A service whose `Check` is fine, and whose `Watch` ends at once, after the reports in `answers`."""

    answers: tuple[health_pb2.HealthCheckResponse, ...] = ()
    watch_count = 0

    def __init__(self, channel: object) -> None:
        pass

    async def Check(self, request: object, timeout: float) -> health_pb2.HealthCheckResponse:  # noqa: N802, ASYNC109
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def Watch(self, request: object) -> "Contradiction":  # noqa: N802
        Contradiction.watch_count += 1
        return self

    async def __aiter__(self) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        for answer in self.answers:
            yield answer

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("reports", [(), (health_pb2.HealthCheckResponse.NOT_SERVING,)])
async def test_a_connection_that_never_lasts_is_not_tried_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[health_pb2.HealthCheckResponse.ServingStatus.ValueType, ...]
) -> None:
    monkeypatch.setattr(health_pb2_grpc, "HealthStub", Contradiction)
    monkeypatch.setattr(Contradiction, "answers", [health_pb2.HealthCheckResponse(status=one) for one in reports])
    monkeypatch.setattr(Contradiction, "watch_count", 0)
    monkeypatch.setattr("services.bridge.connection._RETRY_SECONDS", 0.1)
    description = model_pb2.Model(name="tiny")
    known = Endpoint(
        "x", model_pb2.ROLE_DRAFT, aio.insecure_channel("127.0.0.1:1"), description, tiny.model(tiny.EXACT_KINDS[0])
    )

    async def describe(*_: object, **__: object) -> tuple[model_pb2.Model, int]:
        await asyncio.sleep(0)
        return description, 0

    one = Connection("x", known.role, known.channel, known.channel, ModelReader(), 1.0, lambda new, old: None)
    monkeypatch.setattr(one._reader, "describe", describe)
    one.known = known
    taken = await seconds_until(one._run(), lambda: Contradiction.watch_count >= 4)
    await one.close()
    assert taken > 2.9 * 0.1, "a pause between two tries"
