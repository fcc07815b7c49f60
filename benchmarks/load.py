"""Measures a bridge under load: throughput, latencies, errors, memory and processor time, by number of clients.

    python -m benchmarks.load [--clients 1 4 16 64] [--seconds 10] [--tokens 64] [--speculation off] [--workers 1]
    python -m benchmarks.load --forward-ms 20 --tokens 16 --load 0.8 --open-requests 1000 --seconds 8

The second measures latencies under load within six minutes: at 20 ms for each forward, several requests run at once.

The generator is a process of its own, in which each client has its own connection. For each number of clients it first
sends requests as fast as they are answered, which measures throughput. Then it is an open loop: requests arrive at
random times at a rate of `--load` times that throughput, whether earlier ones have been answered or not, and latencies
count from the time at which a request was due. It lasts for `--seconds`, or until `--open-requests` have arrived, with
at most `--open-seconds`. "running" is the mean number of requests that ran at once. A first second is left out. Rates
include the time until the last requests have been answered, so choose loops that are much longer than a request.

Without `--target`, target and draft are scripted services, which compute nothing (`benchmarks.scripted_service`), and
every text is compared with the right one. With it, they are real models. `--bridge-cores` and `--other-cores` pin the
bridge, and everything else, to cores.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import grpc
import psutil
from grpc import aio

from benchmarks.prompts import OWN
from benchmarks.prompts import read as read_prompts
from benchmarks.scripted_service import expected
from draftbridge.errors import CallError
from draftbridge.messages import generate_request
from draftbridge.v1 import bridge_pb2_grpc
from services.cli.processes import launched, pinned

_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_PERCENTILES = (50, 95, 99)
# Texts differ from their beginning on, so that no request finds its prompt in a cache.
_PROMPTS = [f"{index * 7919:06d} scripted" for index in range(32)]


@dataclass
class Sample:
    """What one part of a run measured. Times are in milliseconds; `late`: from the due time to the first token."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    passes: int = 0
    # The sum of the requests' durations in seconds, from their start.
    busy_seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Generator:
    """Sends requests over one connection for each client."""

    def __init__(self, address: str, clients: int, options: dict[str, Any], prompts: Sequence[Any]) -> None:
        self._channels = [aio.insecure_channel(address, _OPTIONS) for _ in range(clients)]
        self._stubs = [bridge_pb2_grpc.BridgeServiceStub(channel) for channel in self._channels]
        self._requests = [
            generate_request(**options, **(one if isinstance(one, dict) else {"prompt": one})) for one in prompts
        ]
        tokens = options["max_tokens"]
        scripted = prompts is _PROMPTS
        self._texts = [expected(prompt, tokens) for prompt in _PROMPTS] if scripted else None
        self._random, self._count = random.Random(0), 0

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def closed_loop(self, seconds: float) -> Sample:
        """Each client sends its next request when the one before it has been answered."""
        sample, end = Sample(), perf_counter() + seconds

        async def client(number: int) -> None:
            while perf_counter() < end:
                await self._send(number, perf_counter(), sample)

        started = perf_counter()
        await asyncio.gather(*map(client, range(len(self._stubs))))
        sample.seconds = perf_counter() - started
        return sample

    async def open_loop(self, seconds: float, rate: float) -> Sample:
        """Requests arrive at random times, `rate` of them a second on average, at the clients in turn."""
        sample, running = Sample(), set()
        started = due = perf_counter()
        while (due := due + self._random.expovariate(rate)) < started + seconds:
            await asyncio.sleep(max(due - perf_counter(), 0))
            task = asyncio.create_task(self._send(self._count % len(self._stubs), due, sample))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        sample.seconds = perf_counter() - started
        return sample

    async def _send(self, client: int, due: float, sample: Sample) -> None:
        index = self._count % len(self._requests)
        self._count += 1
        begun, first, text, count, passes = perf_counter(), 0.0, [], 0, 0
        try:
            async for response in self._stubs[client].Generate(self._requests[index]):
                if response.HasField("delta"):
                    first = first or perf_counter()
                    text.append(response.delta.text)
                    count += len(response.delta.token_ids)
                elif response.HasField("finished"):
                    passes = response.finished.speculation.target_pass_count
        except grpc.aio.AioRpcError as error:
            sample.errors[CallError.from_rpc(error, "the bridge").reason] += 1
            return
        finally:
            sample.busy_seconds += perf_counter() - begun
        if self._texts and "".join(text) != self._texts[index]:
            sample.errors["WRONG_TEXT"] += 1
        sample.requests, sample.tokens, sample.passes = (
            sample.requests + 1,
            sample.tokens + count,
            sample.passes + passes,
        )
        sample.first_token.append(1e3 * (first - due))
        if count > 1:
            sample.per_token.append(1e3 * (perf_counter() - first) / (count - 1))


async def generate(arguments: argparse.Namespace) -> None:
    """Prints a JSON line when each part of the measurement begins and ends, for `measure`."""
    address, (clients,), options = arguments.generate, arguments.clients, json.loads(arguments.options)
    prompts = options.pop("prompts") or _PROMPTS
    generator = Generator(address, clients, options, prompts)
    await generator.closed_loop(1.0)
    print(json.dumps({"begins": "closed"}), flush=True)
    closed = await generator.closed_loop(arguments.seconds)
    print(json.dumps({"ends": "closed", **vars(closed)}), flush=True)
    if arguments.load and closed.requests:
        await asyncio.sleep(0.2)
        print(json.dumps({"begins": "open"}), flush=True)
        rate = arguments.load * closed.requests / closed.seconds
        opened = await generator.open_loop(open_seconds(arguments, rate), rate)
        print(json.dumps({"ends": "open", **vars(opened)}), flush=True)
    await generator.close()


def open_seconds(arguments: argparse.Namespace, rate: float) -> float:
    """Returns how long the open loop lasts at a rate in requests per second."""
    if not arguments.open_requests:
        return float(arguments.seconds)
    return float(min(arguments.open_requests / rate, arguments.open_seconds))


def percentiles(values: Sequence[float]) -> list[float]:
    """Returns the 50th, 95th and 99th percentile."""
    if len(values) < 2:
        return [values[0] if values else 0.0] * len(_PERCENTILES)
    cuts = quantiles(values, n=100, method="inclusive")
    return [cuts[one - 1] for one in _PERCENTILES]


class Observed:
    """The processor time and the memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._processes = [root, *root.children(recursive=True)]

    @property
    def seconds(self) -> float:
        """Returns the processor time so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    @property
    def mebibytes(self) -> float:
        """Returns the resident memory."""
        return sum(process.memory_info().rss for process in self._processes) / 2**20


def measure(bridge: str, pid: int, clients: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the generator, and returns a row for each of its parts."""
    options = {
        "max_tokens": arguments.tokens,
        "speculation": arguments.speculation,
        "prompts": [*map(_input, read_prompts(arguments.prompts or OWN))] if arguments.target else None,
    }
    words = ["--generate", bridge, "--clients", str(clients), "--options", json.dumps(options)]
    for name in ("load", "seconds", "open_requests", "open_seconds"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    rows, before, watched = [], 0.0, Observed(pid)
    with (
        pinned(arguments.other_cores),
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load", *words], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if "begins" in event:
                before = watched.seconds
                continue
            used, seconds = watched.seconds - before, event["seconds"]
            rows.append(
                {
                    "clients": clients,
                    "loop": event["ends"],
                    "requests": event["requests"],
                    "running": event["busy_seconds"] / seconds,
                    **{f"{one}/s": event[one] / seconds for one in ("requests", "tokens", "passes")},
                    "first token ms": percentiles(event["first_token"]),
                    "per token ms": percentiles(event["per_token"]),
                    "errors": event["errors"],
                    "bridge us/pass": 1e6 * used / max(event["passes"], 1),
                    "bridge cores": used / seconds,
                    "bridge MiB": watched.mebibytes,
                }
            )
    return rows


def _input(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: prompt[key] for key in ("prompt", "messages") if key in prompt}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""

    def cell(value: Any) -> str:
        match value:
            case float():
                return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
            case list():
                return " / ".join(f"{one:.2f}" if one < 10 else f"{one:.0f}" for one in value)
            case dict():
                return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "0"
        return str(value)

    head = f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}"
    return "\n".join([head, *(f"| {' | '.join(map(cell, row.values()))} |" for row in rows)])


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the services, and returns all rows."""
    with ExitStack() as stack:

        def start(name: str, *words: str, module: str = "services.cli") -> tuple[str, "subprocess.Popen[str]"]:
            return stack.enter_context(launched(name, *words, module=module))

        def served(role: str, model: str, forward_ms: float) -> str:
            if model:
                return start(role, "serve", model, "--role", role, *_SERVED, *arguments.service_options.split())[0]
            acceptance = arguments.acceptance if role == "draft" else 1.0
            scripted = ("--role", role, "--forward-ms", str(forward_ms), "--acceptance", str(acceptance))
            return start(role, *scripted, module="benchmarks.scripted_service")[0]

        with pinned(arguments.other_cores):
            targets = [served("target", arguments.target, arguments.forward_ms) for _ in range(arguments.targets)]
            drafts = [served("draft", arguments.draft, arguments.draft_ms)] if arguments.draft != "none" else []
        models = [word for one in targets for word in ("--target", one)] + [
            word for one in drafts for word in ("--draft", one)
        ]
        with pinned(arguments.bridge_cores):
            options = ("--workers", str(arguments.workers), *arguments.bridge_options.split())
            bridge, process = start("bridge", "bridge", *models, *_SERVED, *options)
        return [row for clients in arguments.clients for row in measure(bridge, process.pid, clients, arguments)]


_SERVED = ("--until-stdin-closes", "--listen", "127.0.0.1:0")


def main() -> None:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop")
    parser.add_argument("--load", type=float, default=0.7, help="0 leaves out the open loop")
    parser.add_argument("--open-requests", type=int, default=0, help="of the open loop; 0: for --seconds")
    parser.add_argument("--open-seconds", type=float, default=70.0, help="the most with --open-requests")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--speculation", default="off")
    parser.add_argument("--target", default="", help="a model; scripted without it")
    parser.add_argument("--draft", default="", help="a model; none: without draft; scripted without it")
    parser.add_argument("--targets", type=int, default=1, help="replicas of the target")
    parser.add_argument("--forward-ms", type=float, default=0.0, help="of a forward of the scripted target")
    parser.add_argument("--draft-ms", type=float, default=0.0)
    parser.add_argument("--acceptance", type=float, default=1.0, help="of the scripted draft")
    parser.add_argument("--prompts", type=Path, help="for real models; see docs/measurements")
    parser.add_argument("--service-options", default="", help="further options of `serve`, in quotes")
    parser.add_argument("--bridge-options", default="", help="further options of `bridge`, in quotes")
    parser.add_argument("--workers", type=int, default=1, help="of the bridge")
    parser.add_argument("--bridge-cores", type=int, nargs="+")
    parser.add_argument("--other-cores", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        asyncio.run(generate(arguments))
        return
    rows = run(arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
