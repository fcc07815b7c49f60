"""Clients that watch a server's health, and do not read, neither hide its health from others nor keep it from stopping.

The client is written in frames of HTTP/2, because gRPC's own always reads.
"""

import asyncio
from contextlib import closing, suppress

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.server import Server, Stop

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


@pytest.mark.timeout(60)
async def test_a_watcher_that_does_not_read_delays_neither_the_health_nor_the_end() -> None:
    healthy, stop, started = asyncio.Event(), Stop(), asyncio.Event()
    healthy.set()
    server = Server("127.0.0.1:0")
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set(), healthy.is_set))
    await started.wait()
    status, answers = health_pb2.HealthCheckResponse, list[asyncio.Task[None]]()
    async with aio.insecure_channel(server.address) as channel, asyncio.timeout(20):
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
