"""Tests which services `/health` needs, of a bridge's own HTTP server and of `draftbridge http`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
from grpc import aio

from draftbridge.security import Credentials
from draftbridge.v1 import bridge_pb2_grpc
from services.bridge import endpoint
from services.bridge.connection import State
from services.bridge.gateway import Gateway
from services.bridge.remote_gateway import RemoteGateway
from services.bridge.servicer import BridgeServicer
from services.config import BridgeServerConfig
from services.errors import SlowDownload
from services.http import app
from services.http.server import http_door
from services.metrics import HttpMetrics
from services.traces import Traces
from tests.support.ports import free_address
from tests.support.waiting import eventually
from tests.support.zoo import bridge, hurry, serving, trained


@asynccontextmanager
async def doors(gateway: Gateway) -> AsyncIterator[list[str]]:
    """Yields the URLs of a door of the bridge's process, and of one that reaches the bridge over gRPC."""
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    bridge_pb2_grpc.add_BridgeServiceServicer_to_server(BridgeServicer(gateway), server)
    await server.start()
    remote = RemoteGateway(f"127.0.0.1:{port}", Credentials(), HttpMetrics(), Traces())
    config = BridgeServerConfig(http="127.0.0.1:0")
    try:
        async with (
            http_door(config, gateway, asyncio.Event()) as own,
            http_door(config, remote, asyncio.Event()) as other,  # type: ignore[arg-type]
        ):
            yield [own, other]
    finally:
        await remote.close()
        await server.stop(None)


async def test_health_fails_only_if_a_target_model_has_no_usable_service(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(app, "_HEALTH_SECONDS", 0.0)
    async with AsyncExitStack() as stack:
        replica, other = AsyncExitStack(), AsyncExitStack()
        targets = [await replica.enter_async_context(serving(trained("gpt-2")))]
        targets.append(await stack.enter_async_context(serving(trained("gpt-2"))))
        targets.append(await other.enter_async_context(serving(trained("gemma"))))
        never = free_address()
        gateway = await stack.enter_async_context(bridge([*targets, never], []))
        urls = await stack.enter_async_context(doors(gateway))
        http = await stack.enter_async_context(httpx.AsyncClient())

        async def health() -> list[tuple[int, set[str]]]:
            """Returns the status of each door, and the addresses of services with a problem."""
            answers = [await http.get(f"{url}/health") for url in urls]
            return [
                (one.status_code, {service["address"] for service in one.json()["services"] if service["problem"]})
                for one in answers
            ]

        async def until_away(number: int) -> None:
            await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[number].state is State.AWAY)

        assert await health() == 2 * [(200, {never})], "a service that never answered may be a further replica"
        await replica.aclose()
        await until_away(0)
        assert await health() == 2 * [(200, {targets[0], never})], "requests use the other replica"
        await other.aclose()
        await until_away(2)
        assert await health() == 2 * [(503, {targets[0], targets[2], never})]


async def test_a_target_whose_tokenizer_does_not_arrive_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has described itself, so it is not a replica of the other target."""
    hurry(monkeypatch)
    download, slow = endpoint._download, ""

    async def held_up(stub: Any, address: str) -> tuple[bytearray, str]:
        if address == slow:
            raise SlowDownload(address, "after 0 bytes the next ones did not come in time")
        return await download(stub, address)

    monkeypatch.setattr(endpoint, "_download", held_up)
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(serving(trained("gpt-2")))
        slow = await stack.enter_async_context(serving(trained("gemma")))
        gateway = await stack.enter_async_context(bridge([good, slow], []))
        await asyncio.to_thread(eventually, lambda: "tokenizer" in gateway.zoo.connections[1].problem)
        states = {one.address: one for one in await gateway.check()}
        assert not states[good].is_missed
        assert states[slow].is_missed and "did not come in time" in states[slow].problem
