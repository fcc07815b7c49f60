"""How fast a target is with drafts of each kind, against the target alone through the same bridge, in one run.

    python -m benchmarks.pairs [--prompts FILE] [--count 24] [--tokens 128] [--temperature 0]
        [--target NAME] [--engine llamacpp] [--threads 2] [--draft NAME|none] [--draft-engine ...] [--draft-threads 1]
        [--modes off auto lockstep opportunistic] [--json FILE]

Every prompt is run in every mode, one after the other, so that the machine's moods fall on all modes alike. A first
request reads the prompt, so that no mode pays for it. A category's ratio is that of the times of all its tokens; the
range is over prompts. FILE: as in `benchmarks.prompts`, without it the prompts of the tests. A chat is continued as
plain text by a model that has no template for it.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import prompts
from draftbridge import Client, Generation
from services.cli import DEFAULT_DRAFT, DEFAULT_TARGET
from services.processes import fleet

MODES = ("off", "lockstep", "opportunistic", "auto")


@dataclass(frozen=True)
class Sample:
    """One prompt in one mode. Counts in the target's tokens."""

    category: str
    mode: str
    token_count: int
    elapsed_ns: int
    first_token_ns: int
    pass_count: int
    candidate_count: int
    accepted_count: int
    suffix_accepted_count: int
    byte_count: int
    near_ties: int
    same_text: bool
    note: str
    choice: str

    @property
    def token_ns(self) -> float:
        """Time of a token, of those behind the first."""
        return (self.elapsed_ns - self.first_token_ns) / max(self.token_count - 1, 1)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, help="the most prompts, evenly over the file's categories")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--draft", default=DEFAULT_DRAFT, help="none for the target's own text only")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--draft-engine", default="torch")
    parser.add_argument("--draft-threads", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    modes = ["off", *[mode for mode in arguments.modes if mode != "off"]]
    with (
        fleet(
            arguments.target,
            None if arguments.draft == "none" else arguments.draft,
            target_options=("--engine", arguments.engine, "--threads", str(arguments.threads)),
            draft_options=("--engine", arguments.draft_engine, "--threads", str(arguments.draft_threads)),
        ) as running,
        Client(running.bridge) as client,
    ):
        template = next(model.chat_template for model in client.models() if model.name == arguments.target)
        samples: list[Sample] = []
        for prompt in prompts.read(arguments.prompts, arguments.count):
            samples += _run(client, prompt, bool(template), modes, arguments.tokens, arguments.temperature)
    title = f"{arguments.target} ({arguments.engine}, {arguments.threads} threads) <- {arguments.draft}"
    Console(width=120).print(_table(samples, modes, f"{title}, T={arguments.temperature}, {arguments.tokens} tokens"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"title": title, "samples": [asdict(one) for one in samples]}, indent=1))


def _run(
    client: Client, prompt: dict[str, Any], chat: bool, modes: Sequence[str], tokens: int, temperature: float
) -> list[Sample]:
    given: dict[str, Any] = {"prompt": prompt.get("prompt"), "messages": prompt.get("messages")}
    if given["messages"] and not chat:
        given = {"prompt": given["messages"][-1]["content"]}
    client.generate(**given, max_tokens=2)
    results = {
        mode: client.generate(**given, max_tokens=tokens, temperature=temperature, seed=1, speculation=mode)
        for mode in modes
    }
    return [_sample(prompt.get("category", ""), mode, one, results["off"]) for mode, one in results.items()]


def _sample(category: str, mode: str, result: Generation, alone: Generation) -> Sample:
    did = result.finished.speculation
    return Sample(
        category=category,
        mode=mode,
        token_count=result.finished.usage.generated_token_count,
        elapsed_ns=did.elapsed_ns,
        first_token_ns=did.first_token_ns,
        pass_count=did.target_pass_count,
        candidate_count=did.num_draft_tokens,
        accepted_count=did.num_accepted_tokens,
        suffix_accepted_count=did.num_suffix_accepted_tokens,
        byte_count=did.generated_byte_count,
        near_ties=did.near_ties,
        same_text=result.token_ids == alone.token_ids,
        note=did.note,
        choice=did.choice,
    )


def _table(samples: Sequence[Sample], modes: Sequence[str], title: str) -> Table:
    by_category: dict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        by_category[one.category].append(one)
    table = Table(
        "", "mode", "tokens/s", "ratio", "range", "accepted", "of the text", "tokens/pass", "first, ms", "same text",
        title=title, box=box.SIMPLE,
    )  # fmt: skip
    everything = [("all", list(samples))] if len(by_category) > 1 else []
    for category, found in [*by_category.items(), *everything]:
        alone = [one for one in found if one.mode == "off"]
        for mode in modes:
            table.add_row(category, mode, *_cells([one for one in found if one.mode == mode], alone))
            category = ""
    return table


def _cells(found: Sequence[Sample], alone: Sequence[Sample]) -> list[str]:
    ratios = [other.token_ns / one.token_ns for one, other in zip(found, alone, strict=True)]
    candidates, accepted = sum(one.candidate_count for one in found), sum(one.accepted_count for one in found)
    return [
        f"{1e9 / _mean_token_ns(found):.1f}",
        f"{_mean_token_ns(alone) / _mean_token_ns(found):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{accepted / candidates:.0%}" if candidates else "-",
        f"{sum(one.suffix_accepted_count for one in found) / accepted:.0%}" if accepted else "-",
        f"{sum(one.token_count for one in found) / sum(one.pass_count for one in found):.2f}",
        f"{median(one.first_token_ns for one in found) / 1e6:.0f}",
        f"{sum(one.same_text for one in found)}/{len(found)}",
    ]


def _mean_token_ns(found: Sequence[Sample]) -> float:
    times = sum(one.elapsed_ns - one.first_token_ns for one in found)
    return times / max(sum(one.token_count - 1 for one in found), 1)


if __name__ == "__main__":
    main()
