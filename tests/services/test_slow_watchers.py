"""Clients that watch a server's health, and do not read, neither hide its health from others nor keep it from stopping.

The client is written in frames of HTTP/2, because gRPC's own always reads.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.config import ServerConfig
from services.rpc.server import Server, Stop
from tests.support.secure import ALICE, KEYS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACKNOWLEDGES, ENDS_STREAM, ENDS_HEADERS = 1, 1, 4
# INITIAL_WINDOW_SIZE is 0: the server may send headers, and no data.
NO_WINDOW = b"\0\4\0\0\0\0"


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def headers(path: str) -> bytes:
    """Returns the headers of a call in HPACK, each as a literal."""
    given = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "here",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + bytes((len(n),)) + n.encode() + bytes((len(v),)) + v.encode() for n, v in given.items())


async def watch_without_reading(address: str, answers: list[asyncio.Task[None]]) -> asyncio.StreamWriter:
    """Returns the connection of a client whose watch has begun. A task, added to `answers`, answers pings."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS, 0, 0, NO_WINDOW))
    writer.write(frame(HEADERS, ENDS_HEADERS, 1, headers("/grpc.health.v1.Health/Watch")))
    writer.write(frame(DATA, ENDS_STREAM, 1, bytes(5)))  # an empty message: the health of the process
    begun = asyncio.Event()

    async def answer() -> None:
        with suppress(asyncio.IncompleteReadError, OSError):  # the connection is closed
            while True:
                head = await reader.readexactly(9)
                content = await reader.readexactly(int.from_bytes(head[:3], "big"))
                assert head[3] != DATA, "the server has no window for data"
                if head[3] in (SETTINGS, PING) and not head[4] & ACKNOWLEDGES:
                    writer.write(frame(head[3], ACKNOWLEDGES, 0, content if head[3] == PING else b""))
                if head[3] == HEADERS:
                    begun.set()

    answers.append(asyncio.create_task(answer()))
    await begun.wait()
    return writer


@pytest.mark.timeout(120)
async def test_a_watcher_that_does_not_read_delays_neither_the_health_nor_the_end() -> None:
    healthy, stop, started = asyncio.Event(), Stop(), asyncio.Event()
    healthy.set()
    server = Server("127.0.0.1:0")
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set(), healthy.is_set))
    await started.wait()
    status, answers = health_pb2.HealthCheckResponse, list[asyncio.Task[None]]()
    async with aio.insecure_channel(server.address) as channel, asyncio.timeout(60):
        stub = health_pb2_grpc.HealthStub(channel)
        with closing(await watch_without_reading(server.address, answers)):
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == status.SERVING
            healthy.clear()
            assert (await watch.read()).status == status.NOT_SERVING
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == status.NOT_SERVING
            unknown = await stub.Watch(health_pb2.HealthCheckRequest(service="other")).read()
            assert unknown.status == status.SERVICE_UNKNOWN
            with pytest.raises(aio.AioRpcError) as refused:
                await stub.Check(health_pb2.HealthCheckRequest(service="other"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            stop.set()
            await running
        await asyncio.gather(*answers)


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[health_pb2_grpc.HealthStub, aio.Channel]]:
    """Yields a stub of the health service of a server with keys, and its channel."""
    keys, stop, started = tmp_path / "keys.toml", Stop(), asyncio.Event()
    keys.write_text(KEYS)
    server = Server("127.0.0.1:0", ServerConfig.model_validate({"keys": keys}))
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set()))
    await started.wait()
    async with aio.insecure_channel(server.address) as channel, asyncio.timeout(60):
        yield health_pb2_grpc.HealthStub(channel), channel
        stop.set()
        await running


@pytest.mark.timeout(120)
async def test_strangers_have_a_limit_of_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.health._MAX_WATCHES", 2)
    request, alice = health_pb2.HealthCheckRequest(), (("authorization", f"Bearer {ALICE}"),)
    async with guarded(tmp_path) as (stub, _):
        watching = [stub.Watch(request) for _ in range(2)]
        for one in watching:
            assert (await one.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.Watch(request).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        of_a_key = [stub.Watch(request, metadata=alice) for _ in range(3)]
        for one in of_a_key:
            assert (await one.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        watching[0].cancel()
        while True:  # until the server has noticed
            with suppress(aio.AioRpcError):
                assert await stub.Watch(request).read()
                break


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_messages_of_strangers_that_do_not_arrive_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("services.rpc.gate._MANY_OPEN", 2)
    monkeypatch.setattr("services.rpc.gate._OPEN_SECONDS", (0.1, 5.0))
    async with guarded(tmp_path) as (stub, channel):
        # On the wire, a stream of one message is the same as a message, which this client does not send.
        begin = channel.stream_stream(f"/grpc.health.v1.Health/{method}")
        codes = [asyncio.ensure_future(begin().code()) for _ in range(5)]
        while sum(one.done() for one in codes) < 3:
            await asyncio.wait([one for one in codes if not one.done()], return_when=asyncio.FIRST_COMPLETED)
        assert sum(one.done() for one in codes) == 3, "two may take longer"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert set(await asyncio.gather(*codes)) == {grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["x" * 513, "x" * (2 << 20)], ids=["513", "2 MiB"])
async def test_a_long_name_of_a_service_is_neither_held_nor_returned(tmp_path: Path, name: str) -> None:
    async with guarded(tmp_path) as (stub, _):
        request = health_pb2.HealthCheckRequest(service=name)
        for call in (stub.Check(request), stub.Watch(request).read()):
            with pytest.raises(aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert "x" * 10 not in (refused.value.details() or "")
