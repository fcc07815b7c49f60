"""Measures how many candidates are accepted from drafts of several temperatures, with shared and independent noise.

    python -m benchmarks.acceptance [--target MODEL] [--draft MODEL] [--temperatures 0.7 1]
        [--drafts 0 independent 0.7 0.85 1] [--prompts FILE] [--count 60] [--tokens 32] [--json FILE]

Runs in lockstep at several temperatures. The drafts differ only in temperature or seed: a number is a draft's
temperature as a share of the target's, and `independent` has the target's temperature, but noise of its own. Both
models run in this process, with several prompts at once, in bfloat16 where the machine supports it; so speeds here mean
nothing. FILE of prompts: see `benchmarks.prompts`; the default is its own 12.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import prompts
from bridge.generation import Finished, generate
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.source import Draft
from bridge.text.chat import Chat
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET
from services.engines.torch.engine import TorchEngine
from services.model.draft.session import DraftSession
from services.model.host import LoadedModel, load
from services.model.target.session import TargetSession
from services.store.resolve import resolve

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
INDEPENDENT = "independent"
DRAFTS = ("0", INDEPENDENT, "0.7", "0.85", "1")
SEED = 1
TOGETHER = 12


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="shares of the temperature, or independent")
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=60, help="maximum number of prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated for each prompt")
    parser.add_argument("--draft-tokens", type=int, default=5, help="tokens that the draft proposes per round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, draft = _load(arguments.target), _load(arguments.draft)
    inputs = [prompts.as_input(one) for one in prompts.read(arguments.prompts, arguments.count)]
    kinds = {temperature: arguments.drafts if temperature else ["0"] for temperature in arguments.temperatures}
    rows = asyncio.run(_measure(target, draft, inputs, kinds, arguments.tokens, arguments.draft_tokens))
    title = (
        f"{arguments.target} <- {arguments.draft}, {len(inputs)} prompts, {arguments.tokens} tokens, "
        f"{arguments.draft_tokens} a round"
    )
    Console(width=120).print(_table(rows, title))
    if arguments.json:
        arguments.json.write_text(json.dumps({"title": title, "rows": rows}, indent=1))
    for model in (target, draft):
        model.scheduler.close()


def _load(name: str) -> LoadedModel:
    directory = resolve(name)
    # One thread each, because both run at the same time.
    return load(directory, name, lambda: TorchEngine(directory, threads=1, slot_count=TOGETHER))


async def _measure(
    target: LoadedModel,
    draft: LoadedModel,
    inputs: Sequence[str | Chat],
    kinds: Mapping[float, Sequence[str]],
    tokens: int,
    draft_tokens: int,
) -> list[dict[str, object]]:
    found: dict[tuple[float, str], list[Finished]] = {}
    for start in range(0, len(inputs), TOGETHER):
        batch = inputs[start : start + TOGETHER]
        # Reading this many prompts takes longer than the target's patience, so they are read into the caches first.
        await asyncio.gather(*(_run(target, draft, one, 0.0, "0", 2, draft_tokens) for one in batch))
        for temperature, drafts in kinds.items():
            for kind in drafts:
                runs = [_run(target, draft, one, temperature, kind, tokens, draft_tokens) for one in batch]
                found.setdefault((temperature, kind), []).extend(await asyncio.gather(*runs))
        Console(stderr=True).print(f"[dim]{min(start + TOGETHER, len(inputs))} of {len(inputs)} prompts[/]")
    return [_row(temperature, kind, finished) for (temperature, kind), finished in found.items()]


async def _run(
    target: LoadedModel,
    draft: LoadedModel,
    input_: str | Chat,
    temperature: float,
    kind: str,
    tokens: int,
    draft_tokens: int,
) -> Finished:
    sampling = SamplingParameters(temperature=temperature)
    drafting = sampling.for_draft(temperature * (1.0 if kind == INDEPENDENT else float(kind)))
    # Far from the target's seed, so that the two draw independent noise.
    seed = SEED + 1_000_003 if kind == INDEPENDENT else SEED
    request = Request(
        input_,
        sampling=sampling,
        seed=SEED,
        max_tokens=tokens,
        speculation=SpeculationParameters(Mode.LOCKSTEP, num_assistant_tokens=draft_tokens),
    )
    with (
        closing(TargetSession(target.model, target.scheduler, target.sampler(sampling, SEED))) as verifier,
        closing(DraftSession(draft.model, draft.scheduler, draft.sampler(drafting, seed))) as drafter,
    ):
        drafts = [Draft(draft.model, drafter, DraftEstimates(draft.model.forward_costs))]
        find = lambda _: drafts.pop() if drafts else None  # noqa: E731
        events = [event async for event in generate(request, target.model, verifier, find)]
    assert isinstance(events[-1], Finished)
    return events[-1]


def _row(temperature: float, kind: str, finished: Sequence[Finished]) -> dict[str, object]:
    did = [one.statistics for one in finished]
    candidates = sum(one.num_draft_tokens for one in did)
    accepted = sum(one.num_accepted_tokens for one in did)
    accepted_bytes = sum(one.accepted_byte_count for one in did)
    passes = sum(one.target_pass_count for one in did)
    return {
        "temperature": temperature,
        "draft": kind,
        "passes": passes,
        "candidates": candidates,
        "accepted_tokens_per_candidate": accepted / candidates,
        "accepted_bytes_per_candidate": accepted_bytes / candidates,
        "accepted_tokens_per_pass": accepted / passes,
        "accepted_bytes_per_pass": accepted_bytes / passes,
        # Requests in which the draft failed or was overdue would spoil the comparison.
        "left_alone": sum(bool(one.note) for one in did),
    }


def _table(rows: Sequence[dict[str, object]], title: str) -> Table:
    table = Table(
        "T", "draft", "passes", "candidates", "tokens\na candidate", "bytes\na candidate", "tokens\na pass",
        "bytes\na pass", "left\nalone", title=title, box=box.SIMPLE,
    )  # fmt: skip
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


if __name__ == "__main__":
    main()
