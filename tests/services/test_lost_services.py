"""Tests how a bridge notices that a service is lost, and what its log has of services that come and go."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftbridge import Credentials
from services.bridge import connection
from services.bridge.pairing import Wish
from services.config import Role
from services.errors import TokenRefused
from services.rpc.channel import open_channel
from tests.support.ports import free_address
from tests.support.proxy import Proxy
from tests.support.secure import ALICE, KEYS
from tests.support.waiting import eventually
from tests.support.zoo import bridge, hurry, serving, text_of, trained


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


@pytest.mark.parametrize("found_by", ["a request", "the status"])
async def test_a_target_that_refuses_the_bridges_token_is_away_until_it_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found_by: str
) -> None:
    """Its health stays good meanwhile, because health checks need no token."""
    monkeypatch.setattr("services.rpc.keys._CHECK_SECONDS", 0.0)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(trained("gpt-2"), keys=keys))
        gateway = await stack.enter_async_context(bridge([address], [], Credentials(token=ALICE)))
        zoo, (target,) = gateway.zoo, gateway.zoo.connections
        keys.write_text('[carol]\ntoken = "carol-token-0123456789"\n')
        if found_by == "a request":
            with pytest.raises(TokenRefused):
                await text_of(gateway, "", Wish())
        else:
            assert "refuses the token" in (await zoo.check())[0].problem
        assert zoo.connected() == [(address, "target", False)] and not gateway.targets
        with pytest.raises(TokenRefused):
            await text_of(gateway, "", Wish())
        await asyncio.sleep(0.2)  # in which the connection is tried again several times
        assert target.endpoint is None

        def warnings() -> list[str]:
            return [one.getMessage() for one in caplog.records if one.name == connection.__name__]

        (refused,) = warnings()
        assert f"requests go on without the target at {address}" in refused and "refuses the token" in refused
        keys.write_text(KEYS)
        await until(lambda: target.endpoint is not None)
        assert "can be used now" in warnings()[-1] and len(warnings()) == 2
        assert (await text_of(gateway, "", Wish()))[0]
        keys.write_text('[carol]\ntoken = "carol-token-0123456789"\n')
        for _ in range(2):  # as from one of several processes that share the address
            with pytest.raises(TokenRefused):
                await text_of(gateway, "", Wish())
            assert target.endpoint is not None
        monkeypatch.setattr("services.bridge.connection._TRUSTED_SECONDS", 0.0)
        with pytest.raises(TokenRefused):
            await text_of(gateway, "", Wish())
        assert target.endpoint is None
