"""Checks that every ordered pair of models is exact: with `--deterministic`, each way gives the target's own text.

    python -m benchmarks.every_pair [--models NAME ...] [--engine ik_llama] [--threads 2] [--prompts FILE] [--count 2]
        [--tokens 32] [--temperatures 0 1] [--ways auto lockstep] [--json FILE]

Each model is served once, in both roles, so only one of a pair's models computes at a time when the other waits for it.
A prompt runs with speculation off and then in each way. The table has, for each pair and way, how many texts are the
same as with speculation off, and the ratio of the times of all tokens after the first. Short texts say little about
speed: the planner of a fresh bridge still learns. The exit status is 1 if a text differs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import prompts
from draftbridge import Client, Generation
from services.cli.processes import launched, serve
from services.engines.cpu import core_count

MODELS = ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct", "gemma-3-270m", "smollm2-135m-instruct")
OFF = "off"


@dataclass(frozen=True)
class Result:
    """A generation by one pair in one way, and the same without speculation. Times exclude the first token."""

    target: str
    draft: str
    way: str
    temperature: float
    same_text: bool
    off_ns: int
    elapsed_ns: int
    accepted_count: int


@dataclass(frozen=True)
class Row:
    """The results of one pair in one way, as the table shows them."""

    target: str
    draft: str
    way: str
    same_count: int
    count: int
    ratio: float
    accepted_count: int


def main() -> None:
    """Runs the benchmark."""
    arguments = _arguments()
    given = prompts.read(arguments.prompts, arguments.count)
    options = ("--engine", arguments.engine, "--threads", str(arguments.threads), "--deterministic", "--slots", "4")
    with ExitStack() as stack:
        names = [Path(model).name for model in arguments.models]
        started = zip(arguments.models, names, strict=True)
        addresses = [stack.enter_context(serve(model, *options, "--name", name))[0] for model, name in started]
        services = [part for address in addresses for part in ("--target", address, "--draft", address)]
        bridge = ("bridge", *services, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        address, _ = stack.enter_context(launched("bridge", *bridge))
        client = stack.enter_context(Client(address))
        chat = {one.name: bool(one.chat_template) for one in client.models()}
        results = []
        for target in names:
            asked = [prompts.options(one if chat[target] else prompts.plain(one)) for one in given]
            results += list(measure(client, target, names, asked, arguments))
    found = rows(results)
    Console(width=150).print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    sys.exit(any(row.same_count < row.count for row in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--engine", default="ik_llama")
    parser.add_argument("--threads", type=int, default=core_count())
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=2, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--ways", nargs="+", default=["auto", "lockstep"])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(
    client: Client,
    target: str,
    models: Sequence[str],
    asked: Sequence[dict[str, object]],
    arguments: argparse.Namespace,
) -> Iterable[Result]:
    """Yields the results of all pairs of a target."""
    for temperature in arguments.temperatures:
        for seed, prompt in enumerate(asked):
            options = {**prompt, "target": target, "temperature": temperature, "seed": seed, "ignore_eos": True}
            client.generate(**options, max_tokens=1, speculation=OFF)  # reads the prompt
            alone = client.generate(**options, max_tokens=arguments.tokens, speculation=OFF)
            for draft in models:
                for way in arguments.ways if draft != target else ():
                    got = client.generate(**options, max_tokens=arguments.tokens, speculation=way, draft=draft)
                    accepted = got.finished.speculation.num_accepted_tokens
                    same, times = got.token_ids == alone.token_ids, (_after_first(alone), _after_first(got))
                    yield Result(target, draft, way, temperature, same, *times, accepted)


def _after_first(result: Generation) -> int:
    did = result.finished.speculation
    return int(did.elapsed_ns - did.first_token_ns)


def rows(results: Sequence[Result]) -> list[Row]:
    """Sums results up by pair and way, in their order."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.target, one.draft, one.way), []).append(one)
    return [
        Row(
            *key,
            same_count=sum(one.same_text for one in group),
            count=len(group),
            ratio=sum(one.off_ns for one in group) / sum(one.elapsed_ns for one in group),
            accepted_count=sum(one.accepted_count for one in group),
        )
        for key, group in groups.items()
    ]


def table(found: Sequence[Row]) -> Table:
    """Returns the table of all pairs."""
    shown = Table("target", "draft", "way", "same text", "accepted", "ratio to off", box=box.SIMPLE)
    for row in found:
        numbers = (f"{row.same_count}/{row.count}", str(row.accepted_count), f"{row.ratio:.2f}")
        shown.add_row(row.target, row.draft, row.way, *numbers)
    return shown


if __name__ == "__main__":
    main()
