"""Tests how a bridge notices that a service is lost, and what its log has of services that come and go."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.bridge import connection
from services.config import Role
from services.rpc.channel import open_channel
from tests.support.ports import free_address
from tests.support.proxy import Proxy
from tests.support.waiting import eventually
from tests.support.zoo import bridge, hurry, serving, trained


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, condition)


async def test_each_loss_of_a_service_is_logged_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = free_address()
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        gateway = await stack.enter_async_context(bridge([target], [at]))
        (draft,) = (one for one in gateway.zoo.connections if one.address == at)

        def lines() -> list[str]:
            return [one.getMessage().partition(at)[2] for one in caplog.records if at in one.getMessage()]

        async def come_and_go() -> None:
            caplog.clear()
            async with serving("suffix", at, Role.DRAFT):
                await until(lambda: draft.endpoint is not None)
            await until(lambda: draft.endpoint is None)

        await come_and_go()
        for _ in range(2):
            await come_and_go()
            # Not only when a further try to connect has failed, which may take as long as `connect-timeout`.
            await until(lambda: len(lines()) == 2)
            can_be_used, lost = lines()
            assert can_be_used == " can be used now: it is suffix"
            assert "cannot serve now" in lost or "was lost" in lost
        for _ in range(connection._MAX_LOG_LINES):
            await come_and_go()
        assert not lines(), "a service that changes all the time does not fill the log"
        monkeypatch.setattr(connection, "_LOG_SECONDS", 0.0)
        await come_and_go()
        await until(lambda: len(lines()) == 2)


async def test_a_service_that_hangs_after_a_long_silence_is_noticed() -> None:
    async with AsyncExitStack() as stack:
        proxy = stack.enter_context(Proxy(await stack.enter_async_context(serving("suffix", role=Role.DRAFT))))
        channel = await stack.enter_async_context(open_channel(proxy.address, keepalive_seconds=0.5))
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        reading = asyncio.ensure_future(health.read())
        done, _ = await asyncio.wait({reading}, timeout=5.0)
        assert not done, "the service answers its pings, of which there were more than two"
        proxy.halve()
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(reading, 20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
