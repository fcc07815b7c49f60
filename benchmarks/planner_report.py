"""What `benchmarks.planner` measured, as a table and as verdicts over the bars."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich import box
from rich.table import Table

from draftbridge.v1 import bridge_pb2

OFF = "off"
AUTO = "auto"
# What the planner must reach; see the module docstring.
BEST_FIXED_BAR = 0.97
CATEGORY_BAR = 0.97
PREDICTION_BAR = 0.15
FRESH_BAR = 0.90


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
        lines.append(_same_texts(runs, best))
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


def _same_texts(runs: Sequence[Run], way: str) -> str:
    """Compares `auto` with a way over the prompts whose texts are equal: others may repeat themselves more or less."""
    pairs = [(of[AUTO], of[way]) for of in by_prompt(runs).values() if of[AUTO].token_ids == of[way].token_ids]
    if not pairs:
        return f"         auto / {way} over prompts with the same text: there are none"
    ours, theirs = (speed(some) for some in zip(*pairs, strict=True))
    return f"         auto / {way} over the {len(pairs)} prompts with the same text: {ours / theirs:.2f}"


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
    lines, auto_ns, best_ns = [], 0.0, 0.0
    for of in by_prompt(runs).values():
        fixed = max((run for name, run in of.items() if name != AUTO), key=lambda run: run.speed)
        auto = of[AUTO]
        lines.append(f"{auto.speed / fixed.speed:.2f} ({auto.category}, {fixed.way})")
        auto_ns += auto.elapsed_ns / auto.token_count
        best_ns += fixed.elapsed_ns / fixed.token_count
    if not lines:
        return ["         no text was longer than its first pass"]
    what = "first request of a fresh bridge, auto / best fixed way on the same prompt, by the mean time of a token"
    return [_verdict(what, best_ns / auto_ns, FRESH_BAR), f"         by prompt: {', '.join(lines)}"]
