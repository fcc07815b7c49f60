"""A bridge server: connects to model services and serves until stopped."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack

from bridge.sources.ngrams import NgramMemory
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, candidate_pb2, candidate_pb2_grpc
from services.bridge.draft_choice import DraftChooser
from services.bridge.gateway import Gateway
from services.bridge.guests import CandidateServicer
from services.bridge.pair_memory import PairMemory
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.config import BridgeServerConfig
from services.guests.budget import GuestLimits
from services.metrics import BridgeMetrics
from services.rpc.insight import Insight
from services.rpc.keys import Keys
from services.rpc.security import warn_of_open_token
from services.rpc.server import Server, stop_event, unless
from services.traces import NO_TRACES, Traces

_log = logging.getLogger(__name__)

# Another way in: serves the gateway while the context is open, yields its address, and stops with the event.
Door = Callable[[BridgeServerConfig, Gateway, asyncio.Event, Keys | None], AbstractAsyncContextManager[str]]


def run(
    config: BridgeServerConfig,
    on_start: Callable[[str], None],
    until_stdin_closes: bool = False,
    door: Door | None = None,
    metrics: BridgeMetrics | None = None,
    traces: Traces = NO_TRACES,
) -> None:
    """Connects to the model services and serves until stopped. `on_start` receives the address, or "ADDRESS and URL".

    `door` serves the same gateway, and so the same estimates and counts, in the same event loop.
    """
    metrics = metrics or BridgeMetrics()

    async def serve() -> None:
        zoo = Zoo(
            config.target,
            config.draft,
            config.connect_timeout,
            config.credentials,
            config.service_keepalive,
            config.resolve_interval,
        )
        stack = ExitStack()
        try:
            stop = stop_event(until_stdin_closes)
            insight = Insight(metrics, traces, config.channelz)
            server = Server(config.listen, config, insight, share_port=config.share_port)
            warn_of_open_token(config.credentials, (*config.target, *config.draft))
            if not config.target:
                _log.warning("a bridge without --target serves candidates to guests only: it cannot generate texts")
            metrics.watch(zoo)  # before it waits for a target, which its metrics must show
            if await unless(stop.wait(), zoo.connect()) is None:
                return
            memory = NgramMemory(config.ngram_memory << 20) if config.ngram_memory else None
            chooser = _chooser(config, stack)
            gateway = Gateway(
                zoo,
                memory,
                chooser=chooser,
                max_requests=config.max_requests,
                prompt_limit_bytes=config.prompt_limit << 10,
                metrics=metrics,
                traces=traces,
            )
            server.register(
                bridge_pb2_grpc.add_BridgeServiceServicer_to_server,
                BridgeServicer(gateway),
                bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"],
                # A bridge for guests only has no target.
                usable=lambda: not config.target or bool(gateway.targets),
            )
            guests = CandidateServicer(zoo, _guest_limits(config), metrics, memory, gateway.pairing.balancer)
            server.register(
                candidate_pb2_grpc.add_CandidateServiceServicer_to_server,
                guests,
                candidate_pb2.DESCRIPTOR.services_by_name["CandidateService"],
            )
            async with AsyncExitStack() as doors:
                doors.callback(gateway.close)
                ending = asyncio.create_task(_end_guests(stop, guests))
                doors.callback(ending.cancel)
                url = await doors.enter_async_context(door(config, gateway, stop, server.keys)) if door else ""
                await server.run_until(stop, lambda address: on_start(f"{address} and {url}" if url else address))
        finally:
            await zoo.close()
            stack.close()

    asyncio.run(serve())


async def _end_guests(stop: asyncio.Event, guests: CandidateServicer) -> None:
    await stop.wait()
    guests.end_streams()


def _guest_limits(config: BridgeServerConfig) -> GuestLimits:
    return GuestLimits(config.guest_sequences, config.guest_memory << 20, config.guest_drafts, config.guest_idle)


def _chooser(config: BridgeServerConfig, stack: ExitStack) -> DraftChooser:
    """Returns what chooses drafts, with what an earlier bridge has learned. The stack closes its file."""
    if not config.pair_memory:
        return DraftChooser()
    memory = PairMemory(config.pair_memory)
    stack.callback(memory.close)
    chooser = DraftChooser(memory.add)
    chooser.restore(memory.records)
    return chooser
