"""Computes the figures of a report from samples: gains with confidence intervals, acceptance, ranking, advice."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

from services.cli.bench import WORTH_IT
from services.cli.zoo.samples import ALONE, AUTO, TURNS, Sample

# 97.5% quantiles of Student's t distribution for 1, 2, ... degrees of freedom, then for many.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
_T_MANY = 1.96 + 0.12


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


@dataclass(frozen=True)
class Gain:
    """The geometric mean of the ratios of a way's speed to that of the target alone, with a 95% interval of the mean.

    `count`: number of prompts; the temperatures of one are averaged first. A single prompt has no interval.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def interval(self) -> str:
        """The interval as text, "unknown" with a single prompt."""
        return "unknown" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Texts:
    """How many texts of a pair are equal to those of the target alone.

    `near_ties`: different ones in which rounding may have decided. `unexplained`: the others, which show a bug.
    """

    count: int
    equal: int
    near_ties: int

    @property
    def unexplained(self) -> int:
        return self.count - self.equal - self.near_ties

    def __str__(self) -> str:
        return f"{self.equal} of {self.count} texts equal, {_number(self.near_ties, 'near tie')}"


@dataclass(frozen=True)
class PairFigures:
    """The figures of one pair. `gain`: with the bridge's own choice of plans; `turns`: always taking turns."""

    target: str
    draft: str
    gain: Gain
    turns: Gain
    acceptance: float
    accepted_bytes_per_pass: float
    tokens_per_pass: float
    tokens_per_second: float
    by_position: list[float]
    by_category: dict[str, float]
    by_temperature: dict[float, float]
    gain_by_category: dict[str, Gain]
    gain_by_temperature: dict[float, Gain]
    texts: Texts


def gain_of(samples: Sequence[Sample], alone: Sequence[Sample]) -> Gain:
    """Returns the gain of samples over those of the target alone, prompt by prompt."""
    plain = {(one.prompt, one.temperature): one.tokens_per_second for one in alone}
    by_prompt: dict[str, list[float]] = {}
    for one in samples:
        base = plain.get((one.prompt, one.temperature), 0.0)
        if base and one.tokens_per_second:
            by_prompt.setdefault(one.prompt, []).append(log(one.tokens_per_second / base))
    logs = [fmean(one) for one in by_prompt.values()]
    if not logs:
        return Gain(0.0, None, None, 0)
    mean = fmean(logs)
    if len(logs) == 1:
        return Gain(exp(mean), None, None, 1)
    quantile = _T[len(logs) - 2] if len(logs) - 2 < len(_T) else _T_MANY
    margin = quantile * stdev(logs) / sqrt(len(logs))
    return Gain(exp(mean), exp(mean - margin), exp(mean + margin), len(logs))


def texts_of(samples: Sequence[Sample], alone: Sequence[Sample]) -> Texts:
    """Compares the texts of samples with those of the target alone."""
    plain = {(one.prompt, one.temperature): one for one in alone}
    pairs = [(one, other) for one in samples if (other := plain.get((one.prompt, one.temperature)))]
    different = [(one, other) for one, other in pairs if one.text != other.text]
    near_ties = sum(bool(one.near_ties or other.near_ties) for one, other in different)
    return Texts(len(pairs), len(pairs) - len(different), near_ties)


def acceptance(samples: Iterable[Sample]) -> float:
    """Returns the share of candidates that were accepted, 0 without candidates."""
    samples = list(samples)
    candidates = sum(one.candidate_count for one in samples)
    return sum(one.accepted_count for one in samples) / candidates if candidates else 0.0


def by_position(samples: Iterable[Sample]) -> list[float]:
    """Returns, for each position in a pass with candidates, how often the candidates up to it were all accepted."""
    samples = list(samples)
    passes = sum(one.draft_pass_count for one in samples)
    longest = max((len(one.accepted_per_position) for one in samples), default=0)
    counts = [0] * longest
    for one in samples:
        for place, count in enumerate(one.accepted_per_position):
            counts[place] += count
    return [count / passes for count in counts] if passes else []


def pair_figures(samples: Sequence[Sample], target: str, draft: str) -> PairFigures:
    """Returns the figures of one pair."""
    alone = [one for one in samples if one.target == target and one.way == ALONE]
    own = [one for one in samples if (one.target, one.draft) == (target, draft)]
    auto, turns = ([one for one in own if one.way == way] for way in (AUTO, TURNS))
    categories = list(dict.fromkeys(one.category for one in own))
    temperatures = sorted({one.temperature for one in own})

    def gains(group: Callable[[Sample], object], value: object) -> Gain:
        return gain_of([one for one in auto if group(one) == value], [one for one in alone if group(one) == value])

    drafted = turns or auto
    passes = sum(one.pass_count for one in turns)
    timed_ns = sum(one.elapsed_ns for one in auto if one.token_count)
    return PairFigures(
        target,
        draft,
        gain_of(auto, alone),
        gain_of(turns, alone),
        acceptance(drafted),
        sum(one.accepted_byte_count for one in turns) / passes if passes else 0.0,
        sum(one.token_count for one in turns) / passes if passes else 0.0,
        1e9 * sum(one.token_count for one in auto) / timed_ns if timed_ns else 0.0,
        by_position(turns),
        {name: acceptance(one for one in drafted if one.category == name) for name in categories},
        {value: acceptance(one for one in drafted if one.temperature == value) for value in temperatures},
        {name: gains(lambda one: one.category, name) for name in categories},
        {value: gains(lambda one: one.temperature, value) for value in temperatures},
        texts_of(own, alone),
    )


def plain_speed(samples: Sequence[Sample], target: str) -> float:
    """Returns the tokens per second of a target alone."""
    alone = [one for one in samples if one.target == target and one.way == ALONE and one.token_count]
    elapsed_ns = sum(one.elapsed_ns for one in alone)
    return 1e9 * sum(one.token_count for one in alone) / elapsed_ns if elapsed_ns else 0.0


def ranking(figures: Sequence[PairFigures]) -> list[PairFigures]:
    """Returns the measured pairs, the highest gain first."""
    return sorted((one for one in figures if one.gain.count), key=lambda one: -one.gain.mean)


def advice(target: str, figures: Sequence[PairFigures]) -> str:
    """Returns one sentence: which draft to put beside the target, and what to expect; one more for each lossy pair."""
    measured = ranking([one for one in figures if one.target == target])
    warnings = [
        f"Do not use {one.draft} beside {target}: {one.texts.unexplained} of {one.texts.count} texts differ from those "
        "of the target alone without a near tie, which is a bug of an engine; serve the target with --deterministic."
        for one in measured
        if one.texts.unexplained
    ]
    exact = [one for one in measured if not one.texts.unexplained]
    return " ".join([*([] if warnings and not exact else [_recommended(target, exact)]), *warnings])


def _recommended(target: str, ranked: Sequence[PairFigures]) -> str:
    if not ranked:
        return f"{target}: no pair was measured."
    best = ranked[0]
    gain, others = best.gain, [one for one in ranked[1:] if one.gain.mean >= WORTH_IT]
    expected = f"{gain.mean:.2f}x (95% interval {gain.interval}, {_number(gain.count, 'prompt')})"
    if gain.mean < WORTH_IT:
        return f"Use {target} alone: the best draft, {best.draft}, reaches {expected}."
    if gain.low is None or gain.low < 1.0:
        return f"Try {best.draft} beside {target}: {expected}; measure more texts before you rely on it."
    second = f", before {others[0].draft} with {others[0].gain.mean:.2f}x" if others else ""
    return f"Put {best.draft} beside {target}: expect {expected}{second}."
