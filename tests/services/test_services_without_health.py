"""How the bridge notices that a refused service has restarted: by its description, with or without health checks."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from draftbridge.v1 import model_pb2
from services.bridge.connection import Connection, State
from services.bridge.endpoint import Endpoint, ModelReader
from tests.support import tiny
from tests.support.waiting import eventually


class NoHealth:
    """A service without health checks."""

    def __init__(self, channel: object) -> None:
        pass

    def Watch(self, request: object) -> "NoHealth":  # noqa: N802
        return self

    async def Check(self, request: object, timeout: float) -> None:  # noqa: N802, ASYNC109
        raise self._error()

    async def __aiter__(self) -> AsyncIterator[None]:
        raise self._error()
        yield

    def cancel(self) -> None:
        pass

    def _error(self) -> aio.AioRpcError:
        return aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, aio.Metadata(), aio.Metadata())


class LostHealth(NoHealth):
    """A service whose connection is lost each time that `lost` is set."""

    lost: asyncio.Event

    async def Check(self, request: object, timeout: float) -> None:  # noqa: N802, ASYNC109
        pass

    async def __aiter__(self) -> AsyncIterator[None]:
        await self.lost.wait()
        self.lost.clear()
        raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata())
        yield


@pytest.mark.parametrize("health", [NoHealth, LostHealth])
async def test_a_refused_service_is_used_again_after_its_restart(
    health: type[NoHealth], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = LostHealth.lost = asyncio.Event()
    monkeypatch.setattr(health_pb2_grpc, "HealthStub", health)
    monkeypatch.setattr("services.bridge.connection._POLL_SECONDS", 0.0)
    monkeypatch.setattr("services.bridge.connection._RETRY_SECONDS", 0.0)
    instance_id, calls = "first", asyncio.Queue[str]()

    async def describe(*_: object, **__: object) -> tuple[model_pb2.Model, int]:
        await asyncio.sleep(0)
        calls.put_nowait(instance_id)
        return model_pb2.Model(name="tiny", instance_id=instance_id), 0

    async def state_after_calls() -> State:
        lost.set()
        while not calls.empty():
            calls.get_nowait()
        async with asyncio.timeout(20):
            for _ in range(8):
                await calls.get()
        return one.state

    async with aio.insecure_channel("127.0.0.1:1") as channel:
        one = Connection("x", model_pb2.ROLE_DRAFT, channel, channel, ModelReader(), 1.0, lambda new, old: None)
        monkeypatch.setattr(one._reader, "describe", describe)
        described = model_pb2.Model(name="tiny", instance_id=instance_id)
        one.known = Endpoint("x", model_pb2.ROLE_DRAFT, channel, described, tiny.model(tiny.EXACT_KINDS[0]))
        one.start()
        try:
            await asyncio.to_thread(eventually, lambda: one.endpoint is not None)
            one.refuse("it broke the contract")
            assert await state_after_calls() is State.REFUSED, "the same process describes itself as before"
            assert one.problem == "it broke the contract"
            instance_id = "second"
            await asyncio.to_thread(eventually, lambda: one.state is State.AVAILABLE)
        finally:
            await one.close()
