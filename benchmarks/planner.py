"""Compares the planner's choices on real models with every fixed way of speculating, in one run.

    python -m benchmarks.planner --setting a [--temperature 0] [--prompts FILE] [--count 12] [--tokens 96]
        [--ways off auto ...] [--fresh N] [--json FILE]

Starts a target, a draft and a bridge as processes on this machine, in one of these settings:

    a   Qwen2.5-Coder-1.5B in torch bfloat16 <- SmolLM2-135M in llamacpp, each with all cores
    a32 the same in float32, for processors that do not compute in bfloat16
    b   Qwen2.5-Coder-1.5B in OpenVINO int8 on core 0 <- SmolLM2-135M in llamacpp on core 1, one thread each
    c   Gemma-3-270M <- SmolLM2-135M, both in llamacpp with all cores
    d   Gemma-3-270M in llamacpp, no draft

Every prompt runs in every way, one after the other, in an order that rotates from prompt to prompt. `turns k`: the
draft proposes k tokens, then the target verifies them. `ahead n`: both run, the draft at most n tokens ahead. `suffix`:
prompt lookup only. Times exclude the target's first pass and its tokens; a request before the first
way makes both models read the prompt.

Four figures are compared with the bars that the planner must reach: the speed of `auto` over that of the best fixed
way, from all tokens and times; the lowest ratio of `auto` to `off` of any category; the speed that `auto` predicted
over its measured speed; and, with --fresh, the speed of `auto` in the first request of a new bridge over that of the
best fixed way on the same prompt. --fresh N measures `auto` in N such requests only; the models stay loaded.
FILE of prompts: see `benchmarks.prompts`; the default is its own 12. The JSON file is updated after each prompt.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import prompts
from draftbridge.client import generate_request
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.cli.bench import processor
from services.cli.processes import launched, pinned, serve
from services.store.resolve import default_name

OFF = "off"
AUTO = "auto"
# What the planner must reach; see the module docstring.
BEST_FIXED_BAR = 0.97
CATEGORY_BAR = 0.97
PREDICTION_BAR = 0.15
FRESH_BAR = 0.90

_QWEN, _GEMMA, _SMOLLM = "qwen2.5-coder-1.5b-instruct", "gemma-3-270m", "smollm2-135m-instruct"
_LIBRARIES = ("torch", "transformers", "llama-cpp-python", "openvino", "grpcio", "numpy", "draftbridge")


@dataclass(frozen=True)
class Server:
    """A model and how it is served. `core`: the core that its process is pinned to; None for all cores."""

    model: str
    options: tuple[str, ...]
    core: int | None = None


@dataclass(frozen=True)
class Setting:
    """A target and its draft, if any."""

    target: Server
    draft: Server | None


def _settings() -> dict[str, Setting]:
    everything = ("--threads", str(os.cpu_count()))
    llamacpp = ("--engine", "llamacpp")
    torch, openvino = ("--engine", "torch", "--dtype"), ("--engine", "openvino", "--weights", "int8")
    smollm = Server(_SMOLLM, (*llamacpp, *everything))
    gemma = Server(_GEMMA, (*llamacpp, *everything))
    return {
        "a": Setting(Server(_QWEN, (*torch, "bfloat16", *everything)), smollm),
        "a32": Setting(Server(_QWEN, (*torch, "float32", *everything)), smollm),
        "b": Setting(
            Server(_QWEN, (*openvino, "--threads", "1"), core=0),
            Server(_SMOLLM, (*llamacpp, "--threads", "1"), core=1),
        ),
        "c": Setting(gemma, smollm),
        "d": Setting(gemma, None),
    }


@dataclass(frozen=True)
class Way:
    """A way of speculating. `count`: `num_assistant_tokens`. `sources`: the sources allowed; empty for all."""

    name: str
    mode: str
    count: int | None = None
    sources: tuple[str, ...] = ()

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return self.mode in ("lockstep", "opportunistic")


WAYS = (
    Way(OFF, "off"),
    Way("suffix", "auto", sources=("suffix",)),
    *(Way(f"turns {count}", "lockstep", count) for count in (1, 2, 3, 4, 6)),
    *(Way(f"ahead {count}", "opportunistic", count) for count in (3, 8)),
    Way(AUTO, "auto"),
)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one request that are compared here. Tokens per second are 0 if not reported."""

    pass_count: int
    candidate_count: int
    accepted_count: int
    near_ties: int
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    summary: str
    everything: dict[str, Any]

    @classmethod
    def of(cls, did: bridge_pb2.SpeculationStatistics) -> "Statistics":
        """Converts the contract's statistics. Fields that an older contract lacks stay empty."""
        return cls(
            pass_count=did.target_pass_count,
            candidate_count=did.num_draft_tokens,
            accepted_count=did.num_accepted_tokens,
            near_ties=did.near_ties,
            predicted_tokens_per_second=getattr(did, "predicted_tokens_per_second", 0.0),
            measured_tokens_per_second=getattr(did, "measured_tokens_per_second", 0.0),
            summary=getattr(did, "plan_summary", "") or getattr(did, "choice", ""),
            everything=MessageToDict(did, preserving_proto_field_name=True),
        )


@dataclass(frozen=True)
class Run:
    """One prompt in one way. `token_count` and `elapsed_ns` exclude the target's first pass."""

    prompt: int
    category: str
    way: str
    token_count: int
    elapsed_ns: int
    token_ids: tuple[int, ...]
    statistics: Statistics

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if the first pass was the only one."""
        return 1e9 * self.token_count / self.elapsed_ns if self.token_count else 0.0


class Bridge:
    """A connection to a bridge."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = bridge_pb2_grpc.BridgeServiceStub(self._channel)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def has_template(self, target: str) -> bool:
        """Returns whether the target has a chat template."""
        models = self._stub.ListModels(bridge_pb2.ListModelsRequest()).models
        return any(model.chat_template for model in models if model.name == default_name(target))

    def run(self, index: int, prompt: dict[str, Any], way: Way, tokens: int, temperature: float) -> Run:
        """Runs a prompt in one way. Each prompt has its own seed, the same in all ways."""
        request = generate_request(
            prompt.get("prompt"),
            messages=prompt.get("messages"),
            max_tokens=tokens,
            temperature=temperature,
            seed=1000 + index,
            speculation=way.mode,
            num_assistant_tokens=way.count,
        )
        _allow(request, way.sources)
        ids: list[int] = []
        first_count = 0
        for response in self._stub.Generate(request):
            if response.HasField("delta"):
                ids += response.delta.token_ids
                first_count = first_count or len(ids)
            elif response.HasField("finished"):
                did = response.finished.speculation
        return Run(
            index, prompt["category"], way.name, len(ids) - first_count, did.elapsed_ns - did.first_token_ns,
            tuple(ids), Statistics.of(did),
        )  # fmt: skip


def _allow(request: bridge_pb2.GenerateRequest, sources: Sequence[str]) -> None:
    if sources:
        request.speculation.sources.extend(sources)


def ways(setting: Setting, names: Sequence[str] | None = None) -> list[Way]:
    """Returns the ways that a setting supports, of those named, or of all. `off` is always among them."""
    selects_sources = "sources" in bridge_pb2.Speculation.DESCRIPTOR.fields_by_name
    return [
        way
        for way in WAYS
        if (names is None or way.name in names or way.name == OFF)
        and (setting.draft is not None or not way.drafts)
        and (selects_sources or not way.sources)
    ]


@contextmanager
def _server(server: Server, role: str) -> Iterator[str]:
    with pinned(None if server.core is None else [server.core]):
        context = serve(server.model, "--role", role, *server.options)
        address, _ = context.__enter__()
    try:
        yield address
    finally:
        context.__exit__(None, None, None)


@contextmanager
def _bridge(target: str, draft: str | None) -> Iterator[Bridge]:
    options = ["--target", target, *(("--draft", draft) if draft else ())]
    with launched("bridge", "bridge", *options, "--listen", "127.0.0.1:0", "--until-stdin-closes") as (address, _):
        bridge = Bridge(address)
        try:
            yield bridge
        finally:
            bridge.close()


@contextmanager
def models(setting: Setting) -> Iterator[tuple[str, str | None]]:
    """Starts a setting's target and draft and yields their addresses."""
    with _server(setting.target, "target") as target:
        if setting.draft is None:
            yield target, None
        else:
            with _server(setting.draft, "draft") as draft:
                yield target, draft


def measure(
    setting: Setting,
    given: Sequence[dict[str, Any]],
    chosen: Sequence[Way],
    tokens: int,
    temperature: float,
    *,
    fresh: bool = False,
) -> Iterator[list[Run]]:
    """Yields the runs of each prompt. `fresh`: `auto` runs last, as the first request of a new bridge."""
    with models(setting) as (target, draft), _bridge(target, draft) as bridge:
        given = given if bridge.has_template(setting.target.model) else [_plain(one) for one in given]
        reading = Way("reading", "lockstep", 1) if draft else WAYS[0]
        for index, one in enumerate(given):
            bridge.run(index, one, reading, 2, 0.0)
            turn = index % len(chosen)
            order = [way for way in (*chosen[turn:], *chosen[:turn]) if not (fresh and way.name == AUTO)]
            runs = [bridge.run(index, one, way, tokens, temperature) for way in order]
            if fresh:
                with _bridge(target, draft) as newborn:
                    auto = next(way for way in chosen if way.name == AUTO)
                    runs.append(newborn.run(index, one, auto, tokens, temperature))
            yield runs


def _plain(prompt: dict[str, Any]) -> dict[str, Any]:
    """Returns the last message of a chat as plain text, for a model without a chat template."""
    if not prompt.get("messages"):
        return prompt
    return {"category": prompt["category"], "prompt": prompt["messages"][-1]["content"]}


def speed(runs: Sequence[Run]) -> float:
    """Returns the tokens per second over all runs: the sum of tokens over the sum of times."""
    elapsed_ns = sum(run.elapsed_ns for run in runs if run.token_count)
    return 1e9 * sum(run.token_count for run in runs) / elapsed_ns if elapsed_ns else 0.0


def by_way(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns runs by way, in the order of `WAYS`."""
    found = {way.name: [run for run in runs if run.way == way.name] for way in WAYS}
    return {name: some for name, some in found.items() if some}


def by_prompt(runs: Sequence[Run]) -> dict[int, dict[str, Run]]:
    """Returns runs by prompt and way, without prompts that some way finished in the first pass."""
    found: dict[int, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        found[run.prompt][run.way] = run
    return {prompt: some for prompt, some in found.items() if all(run.token_count for run in some.values())}


def table(runs: Sequence[Run], title: str) -> Table:
    """Returns a table with a row per way."""
    found = Table(
        "", "tokens/s", "ratio to off", "range", "tokens/pass", "accepted", "same text", "parted at a near tie",
        title=title, box=box.SIMPLE,
    )  # fmt: skip
    alone = speed(by_way(runs)[OFF])
    prompts_ = by_prompt(runs)
    for name, some in by_way(runs).items():
        ratios = [of[name].speed / of[OFF].speed for of in prompts_.values()]
        did = [run.statistics for run in some]
        candidates, passes = sum(one.candidate_count for one in did), sum(one.pass_count - 1 for one in did)
        same, tied, _ = texts(runs, name)
        found.add_row(
            name,
            f"{speed(some):.2f}",
            f"{speed(some) / alone:.2f}" if alone else "-",
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
            f"{sum(run.token_count for run in some) / max(passes, 1):.2f}",
            f"{sum(one.accepted_count for one in did) / candidates:.0%}" if candidates else "-",
            f"{same}/{len(some)}",
            f"{tied}",
        )
    return found


def texts(runs: Sequence[Run], way: str) -> tuple[int, int, int]:
    """Counts the prompts whose text equals that of `off`, differs with near ties, and differs without any."""
    same = tied = other = 0
    alone = {run.prompt: run for run in runs if run.way == OFF}
    for run in runs:
        if run.way != way:
            continue
        if run.token_ids == alone[run.prompt].token_ids:
            same += 1
        elif run.statistics.near_ties or alone[run.prompt].statistics.near_ties:
            tied += 1
        else:
            other += 1
    return same, tied, other


def _verdict(what: str, value: float, bar: float, more: str = "") -> str:
    return f"{'reached' if value >= bar else 'MISSED '}  {what}: {value:.2f} (bar {bar:.2f}){more}"


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Returns a line for each bar, for runs without --fresh."""
    of_way = by_way(runs)
    lines = []
    fixed = {name: speed(some) for name, some in of_way.items() if name != AUTO}
    if AUTO in of_way:
        auto, best = speed(of_way[AUTO]), max(fixed, key=lambda name: fixed[name])
        lines.append(_verdict(f"auto / best fixed way over all prompts ({best})", auto / fixed[best], BEST_FIXED_BAR))
        categories: dict[str, float] = {}
        for category in dict.fromkeys(run.category for run in runs):
            of = by_way([run for run in runs if run.category == category])
            if speed(of[OFF]):
                categories[category] = speed(of[AUTO]) / speed(of[OFF])
        least = min(categories, key=lambda category: categories[category])
        every = ", ".join(f"{category} {value:.2f}" for category, value in categories.items())
        lines.append(_verdict(f"least auto / off of a category ({least})", categories[least], CATEGORY_BAR))
        lines.append(f"         auto / off by category: {every}")
        lines.append(_prediction(of_way[AUTO]))
    parted = {name: texts(runs, name)[2] for name in of_way}
    lines.append(
        f"{'MISSED ' if any(parted.values()) else 'reached'}  texts that differ from those of off without a near tie: "
        + (", ".join(f"{name} {count}" for name, count in parted.items() if count) or "none")
    )
    return lines


def _prediction(runs: Sequence[Run]) -> str:
    """Compares the predicted and the measured time of all tokens."""
    reported = [
        run for run in runs
        if run.statistics.predicted_tokens_per_second and run.statistics.measured_tokens_per_second and run.token_count
    ]  # fmt: skip
    if not reported:
        return "         prediction / measurement of auto: not reported"
    did = [run.statistics for run in reported]
    predicted = sum(run.token_count / run.statistics.predicted_tokens_per_second for run in reported)
    measured = sum(run.token_count / run.statistics.measured_tokens_per_second for run in reported)
    value = measured / predicted
    errors = [abs(one.predicted_tokens_per_second / one.measured_tokens_per_second - 1) for one in did]
    near = sum(error <= PREDICTION_BAR for error in errors)
    return (
        f"{'reached' if abs(value - 1) <= PREDICTION_BAR else 'MISSED '}  prediction / measurement of auto: "
        f"{value:.2f} (bar {1 - PREDICTION_BAR:.2f}-{1 + PREDICTION_BAR:.2f}); by request the median error is "
        f"{median(errors):.0%}, {near} of {len(errors)} within {PREDICTION_BAR:.0%}"
    )


def fresh_verdicts(runs: Sequence[Run]) -> list[str]:
    """Returns a line for the bar of first requests, and one with each request."""
    lines, auto_ns, best_ns, token_count = [], 0.0, 0.0, 0
    for of in by_prompt(runs).values():
        fixed = max((run for name, run in of.items() if name != AUTO), key=lambda run: run.speed)
        auto = of[AUTO]
        lines.append(f"{auto.speed / fixed.speed:.2f} ({auto.category}, {fixed.way})")
        auto_ns += auto.elapsed_ns / auto.token_count
        best_ns += fixed.elapsed_ns / fixed.token_count
        token_count += auto.token_count
    if not lines:
        return ["         no text was longer than its first pass"]
    what = "first request of a fresh bridge, auto / best fixed way on the same prompt, by the mean time of a token"
    return [_verdict(what, best_ns / auto_ns, FRESH_BAR), f"         by prompt: {', '.join(lines)}"]


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the command and environment of the measurement."""
    return {
        "command": shlex.join(sys.orig_argv),
        "arguments": vars(arguments),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Runs the benchmark."""
    settings = _settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", required=True, choices=list(settings))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=12, help="maximum number of prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="off is always added")
    parser.add_argument("--fresh", type=int, metavar="N", help="measure auto in the first requests of N new bridges")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting = settings[arguments.setting]
    chosen = ways(setting, arguments.ways)
    fresh = arguments.fresh is not None
    if fresh and AUTO not in [way.name for way in chosen]:
        parser.error("--fresh measures auto: add auto to --ways")
    given = prompts.read(arguments.prompts, arguments.fresh if fresh else arguments.count)
    runs: list[Run] = []
    for some in measure(setting, given, chosen, arguments.tokens, arguments.temperature, fresh=fresh):
        runs += some
        speeds = ", ".join(f"{way.name} {speed([run for run in some if run.way == way.name]):.1f}" for way in chosen)
        Console(stderr=True, width=200).print(f"[dim]{some[0].prompt} {some[0].category}: {speeds}[/]", highlight=False)
        if arguments.json:
            found = about(arguments) | {"setting": asdict(setting), "runs": [asdict(run) for run in runs]}
            arguments.json.write_text(json.dumps(found, indent=1, default=str))
    title = f"{setting.target.model} <- {setting.draft.model if setting.draft else 'no draft'} ({arguments.setting})"
    title += f", T={arguments.temperature:g}, {len(given)} prompts of {arguments.tokens} tokens"
    console = Console(width=130, soft_wrap=True)
    console.print(table(runs, title))
    for line in fresh_verdicts(runs) if fresh else verdicts(runs):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    main()
