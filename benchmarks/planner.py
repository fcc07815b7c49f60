"""Compares the planner's choices on real models with every fixed way of speculating, in one run.

    python -m benchmarks.planner --setting a [--temperature 0] [--prompts FILE] [--count 12] [--tokens 96]
        [--ways off auto ...] [--draft-engine llamacpp] [--fresh N] [--json FILE]

Starts a target, a draft and a bridge as processes on this machine, in one of these settings:

    a   Qwen2.5-Coder-1.5B in torch bfloat16 <- SmolLM2-135M in llamacpp, each with all cores
    a32 the same in float32, for processors that do not compute in bfloat16
    b   Qwen2.5-Coder-1.5B in OpenVINO int8 on core 0 <- SmolLM2-135M in llamacpp on core 1, one thread each
    b2  the same, each with all cores
    c   Gemma-3-270M <- SmolLM2-135M, both in llamacpp with all cores
    d   Gemma-3-270M in llamacpp, no draft
    e   Qwen2.5-Coder-1.5B <- SmolLM2-135M, both in ik_llama with all cores, 4-bit weights: what `draftbridge up` starts

--draft-engine names another engine for the draft, such as the one that `draftbridge serve --engine auto` chooses.

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
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from benchmarks import prompts
from benchmarks.planner_report import AUTO, OFF, WAYS, Run, Statistics, Way, fresh_verdicts, speed, table, verdicts
from draftbridge.messages import generate_request
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.cli.processes import launched, pinned, serve
from services.engines.cpu import core_count, cpu_name
from services.store.resolve import default_name

_QWEN, _GEMMA, _SMOLLM = "qwen2.5-coder-1.5b-instruct", "gemma-3-270m", "smollm2-135m-instruct"
_LIBRARIES = ("torch", "transformers", "llama-cpp-python", "openvino", "grpcio", "numpy", "draftbridge")


@dataclass(frozen=True)
class Server:
    """A model and how it is served. `core`: the core that its process is pinned to; None for all cores."""

    model: str
    engine: str
    options: tuple[str, ...]
    core: int | None = None


@dataclass(frozen=True)
class Setting:
    """A target and its draft, if any."""

    target: Server
    draft: Server | None


def _settings(draft_engine: str = "llamacpp") -> dict[str, Setting]:
    everything = ("--threads", str(core_count()))
    smollm = Server(_SMOLLM, draft_engine, everything)
    gemma = Server(_GEMMA, "llamacpp", everything)
    int8 = ("--weights", "int8")
    return {
        "a": Setting(Server(_QWEN, "torch", ("--dtype", "bfloat16", *everything)), smollm),
        "a32": Setting(Server(_QWEN, "torch", ("--dtype", "float32", *everything)), smollm),
        "b": Setting(
            Server(_QWEN, "openvino", (*int8, "--threads", "1"), core=0),
            Server(_SMOLLM, draft_engine, ("--threads", "1"), core=1),
        ),
        "b2": Setting(Server(_QWEN, "openvino", (*int8, *everything)), smollm),
        "c": Setting(gemma, smollm),
        "d": Setting(gemma, None),
        "e": Setting(Server(_QWEN, "ik_llama", everything), Server(_SMOLLM, "ik_llama", everything)),
    }


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
        context = serve(server.model, "--role", role, "--engine", server.engine, *server.options)
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
        given = given if bridge.has_template(setting.target.model) else [prompts.plain(one) for one in given]
        reading = Way("reading", "lockstep", 1) if draft else WAYS[0]
        for index, one in enumerate(given):
            bridge.run(index, one, reading, 4, 0.0)  # of two tokens, a draft can propose none
            turn = index % len(chosen)
            order = [way for way in (*chosen[turn:], *chosen[:turn]) if not (fresh and way.name == AUTO)]
            runs = [bridge.run(index, one, way, tokens, temperature) for way in order]
            if fresh:
                with _bridge(target, draft) as newborn:
                    auto = next(way for way in chosen if way.name == AUTO)
                    runs.append(newborn.run(index, one, auto, tokens, temperature))
            yield runs


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the command and environment of the measurement."""
    return {
        "command": shlex.join(sys.orig_argv),
        "arguments": vars(arguments),
        "processor": cpu_name(),
        "cores": core_count(),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", required=True, choices=list(_settings()))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=12, help="maximum number of prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="off is always added")
    parser.add_argument("--draft-engine", default="llamacpp", choices=["llamacpp", "ik_llama", "torch", "openvino"])
    parser.add_argument("--fresh", type=int, metavar="N", help="measure auto in the first requests of N new bridges")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting = _settings(arguments.draft_engine)[arguments.setting]
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
    title += f", draft in {setting.draft.engine}" if setting.draft else ""
    title += f", T={arguments.temperature:g}, {len(given)} prompts of {arguments.tokens} tokens"
    console = Console(width=130, soft_wrap=True)
    console.print(table(runs, title))
    for line in fresh_verdicts(runs) if fresh else verdicts(runs):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    main()
