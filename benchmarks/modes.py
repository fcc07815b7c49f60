"""How fast each mode of speculation is on the default pair, against the target alone, in one run.

    python -m benchmarks.modes [--swap] [--engine torch] [--dtype bfloat16] [--threads 1] [--tokens 64] [--prompts FILE]

Every prompt is run in every mode, one after the other, so that the machine's moods fall on all modes alike.
Prints a table: median tokens a second, median ratio to the target alone and its range, acceptance, bytes per
target pass. The prompts are those of the tests; FILE may hold others, see `benchmarks.prompts`.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import prompts
from draftbridge import Client, Generation
from services.cli import DEFAULT_DRAFT, DEFAULT_TARGET
from services.processes import fleet

MODES = ("off", "lockstep", "opportunistic")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swap", action="store_true", help="let the two models change places")
    parser.add_argument("--engine", default="torch", help="of both models")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    arguments = parser.parse_args()
    target, draft = (DEFAULT_DRAFT, DEFAULT_TARGET) if arguments.swap else (DEFAULT_TARGET, DEFAULT_DRAFT)
    options = ("--engine", arguments.engine, "--threads", str(arguments.threads), "--dtype", arguments.dtype)
    results: dict[str, list[Generation]] = defaultdict(list)
    with (
        fleet(target, draft, target_options=options, draft_options=options) as running,
        Client(running.bridge) as client,
    ):
        for prompt in prompts.read(arguments.prompts):
            given = {"prompt": prompt.get("prompt"), "messages": prompt.get("messages")}
            client.generate(**given, max_tokens=2)  # the prompt is in everyone's cache from here on
            for mode in MODES:
                results[mode].append(client.generate(**given, max_tokens=arguments.tokens, speculation=mode))
    Console(width=100).print(
        _table(results, f"{target} <- {draft}, {arguments.engine}, {arguments.threads} thread(s) each")
    )


def _seconds_per_token(result: Generation) -> float:
    return result.finished.speculation.elapsed_ns / 1e9 / result.finished.usage.generated_token_count


def _table(results: dict[str, list[Generation]], title: str) -> Table:
    table = Table(
        "mode", "tokens/s", "ratio", "range", "accepted", "tokens/pass", "bytes/pass", title=title, box=box.SIMPLE
    )
    for mode, generations in results.items():
        ratios = [
            _seconds_per_token(alone) / _seconds_per_token(result)
            for alone, result in zip(results["off"], generations, strict=True)
        ]
        did = [result.finished.speculation for result in generations]
        passes = sum(one.target_pass_count for one in did)
        candidates = sum(one.num_draft_tokens for one in did)
        table.add_row(
            mode,
            f"{median(1 / _seconds_per_token(result) for result in generations):.1f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            f"{sum(one.num_accepted_tokens for one in did) / candidates:.0%}" if candidates else "-",
            f"{sum(result.finished.usage.generated_token_count for result in generations) / passes:.2f}",
            f"{sum(one.generated_byte_count for one in did) / passes:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
