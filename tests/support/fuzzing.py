"""A house of honest and lying services for fuzz tests, and the check that a test leaves nothing in it.

`DRAFTBRIDGE_FUZZ_CASES` sets the number of cases of all tests together; more than the default are drawn anew each time.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from grpc import aio
from hypothesis import settings

from draftbridge.v1 import bridge_pb2_grpc, candidate_pb2_grpc, model_pb2, model_pb2_grpc
from services.bridge.gateway import Gateway
from services.bridge.guests import CandidateServicer
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.config import Role
from services.guests.budget import GuestLimits
from services.metrics import BridgeMetrics
from services.model.host import LoadedModel
from services.model.server import register
from services.model.servicer import ModelServicer, describe
from services.rpc.server import Server
from tests.support import tiny
from tests.support.depth import DEEP
from tests.support.waiting import eventually

T = TypeVar("T")

DEFAULT_CASES = 2000 if DEEP else 600
CASES = int(os.environ.get("DRAFTBRIDGE_FUZZ_CASES", DEFAULT_CASES))
# A call that takes longer hangs.
DEADLINE_SECONDS = 60.0


def cases(share: float) -> Callable[[Any], Any]:
    """Returns the settings for a share of all cases."""
    return settings(max_examples=max(int(CASES * share), 1), deadline=None, derandomize=CASES <= DEFAULT_CASES)


class Liar:
    """Sends given bytes as responses to a stream of Verify or Draft, once it has read the first two messages.

    `stream_count`: the streams that have got this far.
    """

    def __init__(self) -> None:
        self.stream_count = 0
        self.messages: list[bytes] = []
        self.stays = False

    async def stream(self, requests: Any, context: Any) -> Any:
        await anext(requests, None)
        await anext(requests, None)
        self.stream_count += 1
        for data in self.messages:
            yield data
        if self.stays:
            await asyncio.Event().wait()

    def handlers(self) -> list[Any]:
        """Returns handlers for both methods, which neither parse nor serialize."""
        return [
            grpc.method_handlers_generic_handler(
                f"draftbridge.v1.{name}Service", {method: grpc.stream_stream_rpc_method_handler(self.stream)}
            )
            for name, method in (("Target", "Verify"), ("Draft", "Draft"))
        ]


class House:
    """An honest target and draft, lying ones, and bridges over them, in an event loop of another thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.target = tiny.loaded("sentencepiece", 1)
        self.draft = tiny.loaded("byte_level", 2)
        self.liar = Liar()
        self._servers: list[aio.Server] = []
        self._zoos: list[Zoo] = []
        self._closing: list[Callable[[], None]] = []
        self.call(self._open())
        self.channels = {name: grpc.insecure_channel(address) for name, address in self.addresses.items()}

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_SECONDS)

    async def _open(self) -> None:
        target, draft = await self._serve(self.target, "target"), await self._serve(self.draft, "draft")
        false_target, false_draft = await self._lie(self.target, "target"), await self._lie(self.draft, "draft")
        self.gateway = await self._bridge(target, draft)
        self.false_target, self.false_draft = (
            await self._bridge(false_target, draft),
            await self._bridge(target, false_draft),
        )
        server = Server("127.0.0.1:0")
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(BridgeServicer(self.gateway), server._server)
        self.guests = CandidateServicer(
            self._zoos[0], GuestLimits(sequence_count=8, memory_bytes=1 << 20), BridgeMetrics()
        )
        candidate_pb2_grpc.add_CandidateServiceServicer_to_server(self.guests, server._server)
        await self._start(server)
        self.addresses = {"bridge": server.address, "target": target, "draft": draft}

    async def _start(self, server: Server) -> str:
        await server._server.start()
        self._servers.append(server._server)
        return server.address

    async def _serve(self, loaded: LoadedModel, name: str) -> str:
        server = Server("127.0.0.1:0")
        named = LoadedModel(loaded.files, loaded.engine, _named(loaded, name), loaded.scheduler)
        self._closing.append(register(server, named, Role.BOTH).close)
        return await self._start(server)

    async def _lie(self, loaded: LoadedModel, name: str) -> str:
        server = aio.server()
        named = LoadedModel(loaded.files, loaded.engine, _named(loaded, name), loaded.scheduler)
        servicer = ModelServicer(describe(named, model_pb2.ROLE_BOTH), loaded.files.tokenizer_json)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
        server.add_generic_rpc_handlers(self.liar.handlers())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def _bridge(self, target: str, draft: str) -> Gateway:
        zoo = await Zoo([target], [draft]).connect()
        self._zoos.append(zoo)
        gateway = Gateway(zoo)
        self._closing.append(gateway.close)
        return gateway

    def close(self) -> None:
        """Ends everything."""

        async def close() -> None:
            for zoo in self._zoos:
                await zoo.close()
            for server in self._servers:
                await server.stop(None)

        for channel in self.channels.values():
            channel.close()
        self.call(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for close in (*self._closing, self.target.scheduler.close, self.draft.scheduler.close):
            close()

    @property
    def quiet(self) -> bool:
        """Returns whether no session and no request is left."""
        gateways = (self.gateway, self.false_target, self.false_draft)
        schedulers = (self.target.scheduler, self.draft.scheduler)
        idle = not self.guests._connections and not self.guests._budget.count
        return (
            idle
            and all(not one.counts.active and not one.running for one in gateways)
            and all(one.free_slot_count == one.engine.slot_count and one.queue_length == 0 for one in schedulers)
        )


def _named(loaded: LoadedModel, name: str) -> Any:
    return replace(loaded.model, name=name)


class Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "grpc._common":  # the client's side logs responses that cannot be parsed
            self.lines.append(self.format(record))


@contextmanager
def leaves_nothing(house: House) -> Iterator[None]:
    """Checks that the block logs no error, and leaves no thread and no task."""
    errors, threads = Errors(), threading.active_count()
    tasks = len(asyncio.all_tasks(house.loop))
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    assert errors.lines == []
    eventually(lambda: house.quiet)
    eventually(lambda: len(asyncio.all_tasks(house.loop)) <= tasks + 4)  # channels keep a few
    eventually(lambda: threading.active_count() <= threads + 10)  # so do pools of threads
