"""Measures what the HTTP door adds to the latency of a streamed event over the gRPC door.

    python -m benchmarks.doors [--streams 1 64] [--events 200] [--pace-ms 20] [--together] [--json FILE]

One process serves both doors over a gateway whose generations are scripted: each event's text is the time at which the
gateway was to yield it, so that the time spent waiting for other streams' events counts. The streams' times are spread
evenly over the pace, or the same for all with `--together`, as after one pass for all of them. "remote http" is
`draftbridge http`, in a process in front of the gRPC door. The client, in another process of the same machine,
subtracts the time in the text from the time at which it has the text, without a garbage collection of its own. The HTTP
client reads the socket itself; the gRPC client is `draftbridge.AsyncClient`. A first run of each is left out. "longest
gap" is the longest time between two events of one stream, which is near the pace if none stalls.
"""

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from benchmarks import scripted
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode
from bridge.ports import FinishReason
from bridge.request import Request
from bridge.statistics import Statistics
from draftbridge import AsyncClient
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.bridge.backend import Opened
from services.bridge.gateway import Gateway
from services.bridge.servicer import BridgeServicer
from services.cli.processes import announce, launched
from services.config import BridgeServerConfig
from services.http.server import http_door
from services.rpc.server import Server, stop_event


class _TimedGateway(Gateway):
    """Yields one delta each `pace_seconds`, whose text is the time at which it was due.

    The request's seed is the part of the pace, in percent, by which its times differ from the multiples of the pace.
    """

    def __init__(self, pace_seconds: float) -> None:
        model = SimpleNamespace(model=scripted.model())
        zoo = SimpleNamespace(target=lambda name: model, of_role=lambda role: [], connections=())
        super().__init__(zoo)  # type: ignore[arg-type]
        self._pace = pace_seconds

    async def generate(
        self, request: Request, target_name: str = "", wish: object = None
    ) -> AsyncGenerator[Opened | Delta | Finished, None]:
        """See `Gateway`."""
        count = request.max_tokens or 0
        yield Opened("scripted", "", request.seed, 1)
        loop = asyncio.get_running_loop()
        first = loop.time() // self._pace + 1 + request.seed / 100
        for number in range(count):
            due = (first + number) * self._pace
            await asyncio.sleep(due - loop.time())
            yield Delta(f"{int(due * 1e9)} ", (1,))
        yield Finished(FinishReason.LENGTH, 1, count, 0, 0, 0, Mode.OFF, Statistics())


class _Servicer(BridgeServicer):
    """Lists the scripted model, as `draftbridge http` asks for it."""

    async def ListModels(self, request: object, context: object) -> bridge_pb2.ListModelsResponse:  # noqa: N802
        """See the contract."""
        model = model_pb2.Model(name="scripted", context_length=scripted.CONTEXT)
        state = bridge_pb2.ServiceState.STATE_AVAILABLE
        return bridge_pb2.ListModelsResponse(
            services=[bridge_pb2.ServiceState(role=model_pb2.ROLE_TARGET, state=state, model=model)]
        )


async def serve(pace_seconds: float) -> None:
    """Serves both doors and prints their addresses."""
    gateway = _TimedGateway(pace_seconds)
    server, stop = Server("127.0.0.1:0"), stop_event(True)
    add = bridge_pb2_grpc.add_BridgeServiceServicer_to_server
    server.register(add, _Servicer(gateway), bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"])
    config = BridgeServerConfig(target=("none:1",), http="127.0.0.1:0")
    async with http_door(config, gateway, stop) as url:
        await server.run_until(stop, lambda address: announce(f"{address} and {url}"))


async def over_grpc(client: AsyncClient, count: int, phase: int) -> list[tuple[int, int]]:
    """Returns when each event of a stream was due and received, in nanoseconds. `phase`: see `_TimedGateway`."""
    times = []
    async for event in client.stream("a", max_tokens=count, seed=phase):
        if isinstance(event, bridge_pb2.GenerateDelta):
            times.append((int(event.text), monotonic_ns()))
    return times


async def over_http(url: str, count: int, phase: int) -> list[tuple[int, int]]:
    """See `over_grpc`."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps({"prompt": "a", "max_tokens": count, "seed": phase, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
            times.append((int(text), monotonic_ns()))
    writer.close()
    return times


def summary(streams: list[list[tuple[int, int]]]) -> dict[str, float]:
    """Returns the latency of all events and the longest gap in any stream, in milliseconds."""
    latencies = [(got - due) / 1e6 for times in streams for due, got in times]
    gap = max((after[1] - before[1]) / 1e6 for times in streams for before, after in pairwise(times))
    return {"median": median(latencies), "p99": quantiles(latencies, n=100)[98], "longest gap": gap}


async def measure(
    address: str, url: str, remote_url: str, streams: list[int], events: int, together: bool
) -> dict[str, Any]:
    """Returns a summary for each door and each number of streams."""
    results: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(address))
        doors: dict[str, Callable[[int, int], Coroutine[Any, Any, list[tuple[int, int]]]]] = {
            "grpc": partial(over_grpc, client),
            "http": partial(over_http, url),
            "remote http": partial(over_http, remote_url),
        }
        await asyncio.gather(*(door(20, 0) for door in doors.values()))
        for number in streams:
            phases = [0 if together else index * 100 // number for index in range(number)]
            results[str(number)] = {}
            for name, door in doors.items():
                gc.collect()
                gc.disable()
                found = await asyncio.gather(*(door(events, phase) for phase in phases))
                gc.enable()
                assert all(len(times) == events for times in found), "an event was lost"
                results[str(number)][name] = summary(found)
    return results


def main() -> None:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--together", action="store_true", help="all streams have their events at the same times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.pace_ms / 1000))
        return
    pace = ("--pace-ms", str(options.pace_ms))
    with ExitStack() as stack:
        addresses, _ = stack.enter_context(launched("doors", "--serve", *pace, module="benchmarks.doors"))
        address, _, url = addresses.partition(" and ")
        front = ("--bridge", address, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        remote_url, _ = stack.enter_context(launched("http", "http", *front))
        results = asyncio.run(measure(address, url, remote_url, options.streams, options.events, options.together))
    print(f"milliseconds, {options.events} events a stream, one each {options.pace_ms:g} ms")
    print("| streams | door | median | p99 | longest gap |\n|---|---|---|---|---|")
    for number, doors in results.items():
        for name, values in doors.items():
            print(f"| {number} | {name} | {' | '.join(f'{value:.2f}' for value in values.values())} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
