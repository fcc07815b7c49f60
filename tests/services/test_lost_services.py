"""Tests what the log of a bridge contains of services that come and go."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from services.bridge import connection
from services.config import Role
from tests.support.ports import free_address
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
