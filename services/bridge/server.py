"""A bridge server: connects to model services and serves until stopped."""

import asyncio
from collections.abc import Callable

from bridge.sources.suffix_memory import SuffixMemory
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.bridge.gateway import Gateway
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.config import BridgeServerConfig
from services.metrics import BridgeMetrics
from services.rpc.insight import Insight
from services.rpc.server import Server, stop_event, unless
from services.traces import NO_TRACES, Traces


def run(
    config: BridgeServerConfig,
    on_start: Callable[[str], None],
    until_stdin_closes: bool = False,
    metrics: BridgeMetrics | None = None,
    traces: Traces = NO_TRACES,
) -> None:
    """Connects to the model services and serves until stopped. `on_start` receives the address."""
    metrics = metrics or BridgeMetrics()

    async def serve() -> None:
        zoo = Zoo(config.target, config.draft, config.connect_timeout)
        try:
            server = Server(config.listen, insight=Insight(metrics, traces, config.channelz))
            stop = stop_event(until_stdin_closes)
            if await unless(stop, zoo.connect()) is None:
                return
            memory = SuffixMemory(config.suffix_memory << 20) if config.suffix_memory else None
            server.register(
                bridge_pb2_grpc.add_BridgeServiceServicer_to_server,
                BridgeServicer(Gateway(zoo, memory, metrics, traces)),
                bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"],
            )
            await server.run_until(stop, on_start)
        finally:
            await zoo.close()

    asyncio.run(serve())
