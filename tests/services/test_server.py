"""Tests what all servers share: pings that detect vanished clients, and health that follows the model."""

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge.errors import EngineFailure
from bridge.sampling.sampler import Logits
from bridge.text.models import Model
from draftbridge import AsyncClient, CallError, Client, client
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.config import ServerConfig
from services.engines.engine import Row
from services.engines.scheduler import Scheduler
from services.metrics import ServerMetrics
from services.model.health import ModelHealth
from services.rpc.insight import Insight
from services.rpc.server import Server, Stop
from tests.support import tiny
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

METHOD = "/draftbridge.test.Service/Stream"


class Streams(grpc.GenericRpcHandler):
    """A service with one method, which responds once and then waits to be cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.stream, bytes, bytes) if details.method == METHOD else None

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"here"
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@asynccontextmanager
async def proxy(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A TCP proxy that swallows everything once its event is set, and keeps the connections open."""
    swallow, tasks, writers = asyncio.Event(), [], []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not swallow.is_set():
                    writer.write(data)
                    await writer.drain()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = address.split(":")
        to_server = await asyncio.open_connection(host, int(port))
        writers.extend([writer, to_server[1]])
        tasks.extend([asyncio.create_task(pump(reader, to_server[1])), asyncio.create_task(pump(to_server[0], writer))])

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", swallow
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def test_a_client_that_vanished_is_noticed() -> None:
    """Nothing closes the connection, as when the client's machine loses its power or its network."""
    server, streams, stop = Server("127.0.0.1:0", keepalive_seconds=1.0), Streams(), asyncio.Event()
    server.register(lambda servicer, to: to.add_generic_rpc_handlers((servicer,)), streams, None)
    started = asyncio.Event()
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set()))
    await started.wait()
    async with proxy(server.address) as (address, swallow), aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)()
        assert await call.read() == b"here"
        swallow.set()
        async with asyncio.timeout(60):
            await streams.cancelled.wait()
        call.cancel()
    stop.set()
    await running


@pytest.mark.parametrize(
    ("grace", "hurries", "least", "most"), [(0.5, False, 0.4, 30.0), (60.0, True, 1.9, 50.0), (0.0, False, 0.0, 1.9)]
)
async def test_a_call_that_does_not_end_is_cancelled_after_the_grace_period(
    grace: float, hurries: bool, least: float, most: float
) -> None:
    for _ in range(5):  # this process may be held up while the server stops
        if (taken := await seconds_to_stop(grace, hurries)) < most:
            break
    assert least <= taken < most


async def seconds_to_stop(grace: float, hurries: bool) -> float:
    """Returns how long a server takes to stop that has a call that does not end."""
    server, streams, stop = Server("127.0.0.1:0", ServerConfig(grace=grace)), Streams(), Stop()
    server.register(lambda servicer, to: to.add_generic_rpc_handlers((servicer,)), streams, None)
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set()))
    await started.wait()
    async with aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream(METHOD)()
        assert await call.read() == b"here"
        begun = loop.time()
        stop.set()
        if hurries:
            stop.hurried.set()
        await running
        taken = loop.time() - begun
        assert streams.cancelled.is_set()
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return taken


class Echo(grpc.GenericRpcHandler):
    """A service with one method, which returns its message. `begun` is set once the headers of a call have arrived."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def service(self, details: Any) -> Any:
        if details.method != METHOD:
            return None
        self.begun.set()
        return grpc.unary_unary_rpc_method_handler(self.echo, bytes, bytes)

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request


async def test_a_call_whose_message_still_arrives_may_end_within_the_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.rpc.server._IDLE_SECONDS", 0.0)
    server, echo, stop = Server("127.0.0.1:0", ServerConfig(grace=60)), Echo(), Stop()
    server.register(lambda servicer, to: to.add_generic_rpc_handlers((servicer,)), echo, None)
    started = asyncio.Event()
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set()))
    await started.wait()
    async with aio.insecure_channel(server.address) as channel, asyncio.timeout(60):
        call = channel.stream_unary(METHOD)()  # on the wire, the same as a call with one message
        await echo.begun.wait()
        stop.set()
        await asyncio.wait([running], timeout=0.5)
        assert not running.done(), "it waits for the call"
        await call.write(b"late")
        await call.done_writing()
        assert await call == b"late"
        await running


async def test_a_service_that_cannot_be_used_has_its_own_health_and_errors_are_counted_from_zero() -> None:
    metrics, usable, stop, started = ServerMetrics(), threading.Event(), Stop(), asyncio.Event()
    server = Server("127.0.0.1:0", ServerConfig(grace=0.0), Insight(metrics))
    descriptor = bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"]
    servicer = bridge_pb2_grpc.BridgeServiceServicer()
    server.register(bridge_pb2_grpc.add_BridgeServiceServicer_to_server, servicer, descriptor, usable.is_set)
    running = asyncio.create_task(server.run_until(stop, lambda address: started.set()))
    await started.wait()
    serving = health_pb2.HealthCheckResponse
    async with aio.insecure_channel(server.address) as channel, asyncio.timeout(60):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=descriptor.full_name))
        assert (await watch.read()).status == serving.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving.SERVING
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: one.status for name, one in listed.items()} == {
            "": serving.SERVING,
            descriptor.full_name: serving.NOT_SERVING,
        }
        usable.set()
        assert (await watch.read()).status == serving.SERVING
    stop.set()
    await running
    labels = {"rpc_method": f"{descriptor.full_name}/Generate", "rpc_response_status_code": "INTERNAL"}
    assert metrics.registry.get_sample_value("draftbridge_rpc_server_call_duration_seconds_count", labels) == 0


@pytest.fixture
def silent_bridge() -> Iterator[Proxy]:
    """Yields a proxy of a bridge that starts generations, and then sends nothing."""
    stopped = threading.Event()

    class Silent(bridge_pb2_grpc.BridgeServiceServicer):
        def Generate(  # noqa: N802
            self, request: bridge_pb2.GenerateRequest, context: Any
        ) -> Iterator[bridge_pb2.GenerateResponse]:
            yield bridge_pb2.GenerateResponse(started=bridge_pb2.GenerateStarted(target="one"))
            stopped.wait(60)

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with Proxy(f"127.0.0.1:{port}") as proxy:
            yield proxy
        stopped.set()
        server.stop(None)


def test_a_client_notices_that_its_bridge_has_vanished(silent_bridge: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [(name, value // 40 if name.endswith("_ms") else value) for name, value in client.CHANNEL_OPTIONS]
    monkeypatch.setattr(client, "CHANNEL_OPTIONS", quick)
    with Client(silent_bridge.address) as one:
        events = one.stream("a prompt", timeout=30)
        assert isinstance(next(events), bridge_pb2.GenerateStarted)
        silent_bridge.halve()
        with pytest.raises(CallError) as caught:
            next(events)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_generation_has_the_time_limit_that_its_client_sets(silent_bridge: Proxy) -> None:
    async with AsyncClient(silent_bridge.address) as one:
        with pytest.raises(CallError) as caught:
            await one.generate("a prompt", timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_is_closed_ends_its_calls_with_an_error(silent_bridge: Proxy) -> None:
    one = AsyncClient(silent_bridge.address)
    events = one.stream("a prompt")
    assert isinstance(await anext(events), bridge_pb2.GenerateStarted)
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await one.close()
    with pytest.raises(CallError) as caught:
        await reading
    assert caught.value.reason == "CLIENT_CLOSED"
    with Client(silent_bridge.address) as other:
        further = other.stream("a prompt")
        await asyncio.to_thread(next, further)
    with pytest.raises(CallError, match="was closed"):
        await asyncio.to_thread(next, further)


async def test_a_task_that_is_cancelled_while_it_reads_is_cancelled(silent_bridge: Proxy) -> None:
    async with AsyncClient(silent_bridge.address) as one:
        events = one.stream("a prompt")
        await anext(events)
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


class FailingEngine(tiny.HashEngine):
    """Fails while `failing` is set."""

    failing = False

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        if self.failing:
            raise RuntimeError("the device is gone")
        return super().forward(rows)


async def test_health_is_bad_while_every_forward_fails_and_good_when_one_works_again() -> None:
    engine = FailingEngine(tiny.model("byte_level"))
    scheduler = Scheduler(lambda: engine)
    health = ModelHealth(scheduler)
    assert health()
    engine.failing = True
    for _ in range(3):
        assert health(), "one or two failures may be caused by the requests"
        holder = object()
        with pytest.raises(EngineFailure):
            await scheduler.run(holder, (1, 2), (), 0, lambda logits: None)
        scheduler.release(holder)
    assert not health()
    engine.failing = False
    async with asyncio.timeout(60):
        await health._trial
    assert health()
    assert scheduler.free_slot_count == engine.slot_count, "the trial has freed its slot"
    scheduler.close()
    assert not health()


async def test_health_is_bad_while_a_model_gives_no_numbers() -> None:
    class Numberless(tiny.HashEngine):
        broken = True

        def forward(self, rows: Sequence[Row]) -> list[Logits]:
            return [logits * (np.nan if self.broken else 1) for logits in super().forward(rows)]

    engine = Numberless(tiny.model("byte_level"))
    scheduler = Scheduler(lambda: engine)
    health = ModelHealth(scheduler)
    async with asyncio.timeout(60):
        scheduler.failure_count = 3
        for good in (False, True):
            assert not health()
            await health._trial
            assert health() is good
            engine.broken = False
            if not good:
                await health._trial
                assert health()
                scheduler.failure_count = 3
    scheduler.close()


class HangingEngine(tiny.HashEngine):
    """Its forwards wait until `released` is set."""

    def __init__(self, of: Model) -> None:
        super().__init__(of)
        self.begun, self.released = threading.Event(), threading.Event()

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.begun.set()
        assert self.released.wait(60)
        return super().forward(rows)


async def test_a_forward_that_hangs_fails_its_sequences_and_the_health_until_it_ends() -> None:
    engine = HangingEngine(tiny.model("byte_level"))
    scheduler = Scheduler(lambda: engine)
    health = ModelHealth(scheduler, limit_seconds=5)
    one, other = object(), object()

    async def run(holder: object) -> object:
        async with asyncio.timeout(60):
            return await scheduler.run(holder, (1, 2), (), 0, lambda logits: None)

    waiting = [asyncio.create_task(run(one))]
    assert await asyncio.to_thread(engine.begun.wait, 60)
    waiting.append(asyncio.create_task(run(other)))
    assert [health() for _ in range(6)] == [True] * 6
    assert not any(task.done() for task in waiting)
    assert [health() for _ in range(3)] == [False] * 3
    for task in waiting:
        with pytest.raises(EngineFailure, match="does not end"):
            await task
    with pytest.raises(EngineFailure, match="does not end"):
        await run(object())
    scheduler.release(one)
    scheduler.release(other)
    assert not scheduler.close(0.01), "a server that stops does not wait for it"
    engine.released.set()
    assert scheduler.close(60)


async def test_a_forward_that_was_only_slow_makes_the_health_good_again() -> None:
    engine = HangingEngine(tiny.model("byte_level"))
    scheduler = Scheduler(lambda: engine)
    health = ModelHealth(scheduler, limit_seconds=5, token_ns=1e9)
    holder = object()
    task = asyncio.create_task(scheduler.run(holder, tuple(range(1, 5)), (), 0, lambda logits: None))
    assert await asyncio.to_thread(engine.begun.wait, 60)
    assert all(health() for _ in range(41)), "four tokens, of a second each, may take ten times as long"
    assert not health()
    with pytest.raises(EngineFailure):
        await task
    scheduler.release(holder)
    engine.released.set()
    await asyncio.to_thread(eventually, health)
    await scheduler.run(holder, (1, 2), (), 0, lambda logits: None)
    scheduler.release(holder)
    scheduler.close()


async def test_a_server_may_open_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        Server("127.0.0.1:0")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
