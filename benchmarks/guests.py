"""Measures vLLM with candidates of a bridge against vLLM alone and against vLLM's own proposers.

    python -m benchmarks.guests --vllm VENV/bin/python --model DIRECTORY [--draft MODEL] [--json FILE]

One vLLM server holds all proposers (`benchmarks.vllm_ways`), so that they alternate prompt by prompt, in an order that
rotates. "vLLM" is a second server without speculation, which schedules asynchronously as vLLM does by default. Every
prompt is in the prefix cache before it is timed, so times are those of decoding. Bridge and draft are processes of
their own on the same machine.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.delay import DelayProxy
from benchmarks.prompts import OWN, plain, read
from benchmarks.vllm_server import Completion, VllmServer, speculation, vllm_server
from benchmarks.vllm_ways import ALWAYS, OURS, PLAIN, RECORD, WAYS
from services.cli.processes import launched, serve

ALONE = "vLLM"
_CANDIDATES = 24


@dataclass(frozen=True)
class Sample:
    """One prompt in one way, with a number of requests at a time."""

    category: str
    way: str
    parallel: int
    token_count: int
    seconds: float
    same_text: bool


@dataclass(frozen=True)
class StepTime:
    """A proposer's time by rows of a step: the median and the 95th percentile, in milliseconds."""

    way: str
    rows: int
    step_count: int
    median_ms: float
    p95_ms: float
    candidate_count: int


def speeds(samples: Sequence[Sample], base: str = ALONE) -> list[tuple[str, str, int, float, float, float]]:
    """Returns category, way, requests at a time, tokens/s, ratio to `base`, and the share of equal texts."""
    found: dict[tuple[int, str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        for category in (one.category, "all"):
            found[one.parallel, category, one.way].append(one)
    rows = []
    for (parallel, category, way), group in sorted(found.items()):
        reference = found.get((parallel, category, base))
        ratio = _speed(group) / _speed(reference) if reference else float("nan")
        rows.append((category, way, parallel, _speed(group), ratio, sum(one.same_text for one in group) / len(group)))
    return rows


def _speed(samples: Sequence[Sample]) -> float:
    """Tokens per second of one request."""
    return sum(one.token_count for one in samples) / sum(one.seconds for one in samples)


def step_times(data: bytes) -> list[StepTime]:
    """Returns the times of a file that `benchmarks.vllm_ways` wrote."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for way, rows, count, nanoseconds in RECORD.iter_unpack(data):
        found[way, rows].append((nanoseconds, count))
    result = []
    for (way, rows), group in sorted(found.items()):
        ordered = sorted(nanoseconds for nanoseconds, _ in group)
        p95 = ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]
        count = sum(count for _, count in group)
        result.append(StepTime(WAYS[way], rows, len(group), median(ordered) / 1e6, p95 / 1e6, count))
    return result


class Runs:
    """Collects samples, and compares each text with the first one of its prompt."""

    def __init__(self, prompts: Sequence[Mapping[str, Any]], max_tokens: int) -> None:
        self.prompts, self.max_tokens = prompts, max_tokens
        self.samples: list[Sample] = []
        self.times: list[StepTime] = []
        self._texts: dict[int, tuple[int, ...]] = {}

    def one(self, server: VllmServer, place: int, way: str, parallel: int = 1) -> None:
        """Runs a prompt in a way."""
        prompt = self.prompts[place]
        done: Completion = server.complete(prompt, self.max_tokens)
        same = self._texts.setdefault(place, done.ids) == done.ids
        self.samples.append(Sample(prompt["category"], way, parallel, len(done.ids), done.seconds, same))

    def all(self, server: VllmServer, way: str, parallel: int) -> None:
        """Runs all prompts in a way, `parallel` at a time. Prompts repeat if there are fewer than that."""
        places = [place % len(self.prompts) for place in range(max(parallel, len(self.prompts)))]
        with ThreadPoolExecutor(parallel) as pool:
            list(pool.map(lambda place: self.one(server, place, way, parallel), places))

    def warm(self, server: VllmServer) -> None:
        """Brings every prompt into the prefix cache."""
        for prompt in self.prompts:
            server.complete(prompt, 1)


@contextlib.contextmanager
def bridge(arguments: argparse.Namespace) -> Iterator[str]:
    """Runs a bridge for guests, with a draft if one is named, unless there is one. Yields its address."""
    if arguments.bridge:
        yield arguments.bridge
        return
    with contextlib.ExitStack() as stack:
        drafts = []
        if arguments.draft:
            address, _ = stack.enter_context(serve(arguments.draft, "--role", "draft", *arguments.draft_option))
            drafts = ["--draft", address]
        arguments = ("bridge", *drafts, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        yield stack.enter_context(launched("bridge", *arguments))[0]


@contextlib.contextmanager
def far(address: str, used: bool) -> Iterator[tuple[str, DelayProxy | None]]:
    """Runs a proxy, if one is used, that can put the bridge at a distance. Yields the address to connect to."""
    if not used:
        yield address, None
        return
    proxy = DelayProxy(address, 0.0)
    with proxy.running() as found:
        yield found, proxy


def measure(arguments: argparse.Namespace, runs: Runs) -> None:
    """Runs all prompts in all ways."""
    common = ("--dtype", arguments.dtype, "--max-model-len", "2048", "--max-num-seqs", "64", *arguments.vllm_option)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not arguments.without_alone:
            with vllm_server(arguments.vllm, arguments.model, folder / "alone.log", *common) as server:
                runs.warm(server)
                runs.all(server, ALONE, 1)
                for parallel in arguments.parallel:
                    runs.all(server, ALONE, parallel)
        (folder / "way").write_bytes(b"\0")
        with bridge(arguments) as near, far(near, bool(arguments.round_trip_ms)) as (address, proxy):
            own = speculation("benchmarks.vllm_ways.Ways", _CANDIDATES)
            # The environment, because vLLM compiles the model again if its own configuration changes.
            settings = {"BRIDGE": address, "DEADLINE_MS": str(arguments.deadline_ms)}
            environment = {f"DRAFTBRIDGE_GUEST_{name}": value for name, value in settings.items()}
            environment["VLLM_WAYS"] = name
            started = vllm_server(
                arguments.vllm, arguments.model, folder / "ways.log", *common, *own, environment=environment
            )
            with started as server:
                try:
                    _alternate(server, folder / "way", arguments, runs)
                    if proxy:
                        _turn_to(folder / "way", OURS)
                    for milliseconds in arguments.round_trip_ms if proxy else ():
                        proxy.set_delay(milliseconds / 2000)
                        for place in range(len(runs.prompts)):
                            runs.one(server, place, f"{OURS}, {milliseconds:g} ms away")
                finally:
                    runs.times = step_times((folder / "times").read_bytes())
                    if arguments.log:
                        arguments.log.write_bytes((folder / "ways.log").read_bytes())


def _turn_to(control: Path, way: str) -> None:
    with control.open("r+b") as file:
        file.write(bytes([WAYS.index(way)]))


def _alternate(server: VllmServer, control: Path, arguments: argparse.Namespace, runs: Runs) -> None:
    runs.warm(server)
    ways = arguments.way
    for place in range(len(runs.prompts)):
        shift = place % len(ways)
        for way in (*ways[shift:], *ways[:shift]):
            _turn_to(control, way)
            runs.one(server, place, way)
    for turn, parallel in enumerate(arguments.parallel):
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            _turn_to(control, way)
            runs.all(server, way, parallel)


def main() -> None:
    """Measures, prints two tables, and writes the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="Python of an environment with vLLM.")
    parser.add_argument("--model", required=True, help="A directory that vLLM can load.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bridge", help="HOST:PORT of a running bridge; by default one is started.")
    parser.add_argument("--draft", help="The draft's model; none by default.")
    parser.add_argument("--draft-option", action="append", default=[], help="An option of the draft's `serve`.")
    parser.add_argument("--vllm-option", action="append", default=[], help="An option of vLLM, as --vllm-option=--x.")
    parser.add_argument("--prompts", type=Path, default=OWN, help="See benchmarks/prompts.py.")
    parser.add_argument("--count", type=int, default=24, help="Number of prompts, evenly over the categories.")
    parser.add_argument("--raw", action="store_true", help="Send prompts without a chat template, for base models.")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--parallel", type=int, action="append", default=[], help="Also measure with this number of requests at a time."
    )
    parser.add_argument("--way", action="append", choices=WAYS, help=f"Only these ways; all but {ALWAYS!r} by default.")
    parser.add_argument("--without-alone", action="store_true", help=f"Compare with {PLAIN!r} in the same server.")
    parser.add_argument("--deadline-ms", type=float, default=2.0)
    parser.add_argument(
        "--round-trip-ms", type=float, action="append", default=[], help=f"{OURS} also at this distance to the bridge."
    )
    parser.add_argument("--log", type=Path, help="Where to put vLLM's log.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.way = arguments.way or [way for way in WAYS if way != ALWAYS]
    prompts = read(arguments.prompts, arguments.count)
    if arguments.raw:
        prompts = [plain(one) for one in prompts]
    runs = Runs(prompts, arguments.max_tokens)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # ends the servers, too
    try:
        measure(arguments, runs)
    finally:
        _report(runs, PLAIN if arguments.without_alone else ALONE)
        if arguments.json:
            raw = {"samples": [asdict(one) for one in runs.samples], "steps": [asdict(one) for one in runs.times]}
            arguments.json.write_text(json.dumps(raw))


def _report(runs: Runs, base: str) -> None:
    for row in speeds(runs.samples, base):
        print("{:16} {:24} {:3} at a time {:7.1f} tokens/s {:6.2f}x  same text {:4.0%}".format(*row))
    for one in runs.times:
        if one.step_count >= 5:
            print(
                f"{one.way:20} {one.rows:3} rows, {one.step_count:5} steps: {one.median_ms:6.2f} ms, 95% below "
                f"{one.p95_ms:6.2f} ms, {one.candidate_count} candidates"
            )


if __name__ == "__main__":
    main()
