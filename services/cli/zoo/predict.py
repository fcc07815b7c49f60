"""Predicts the gain of every pair from what a few hundred tokens and the models' own times show.

For each pair one or two short texts are generated in turns. They show how often candidates at each position are right,
how many candidates a draft token makes, and what a pass costs beside its forward. The planner's formulas turn these
and the forwards' times by width into the speed of every plan; the best one is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from bridge.measuring.costs import MAX_WIDTH, PRIOR_SLOWDOWN, WidthCost
from bridge.planning.prediction import DraftCosts, TargetCosts, ahead, in_turns
from services.cli.zoo.samples import ALONE, TURN_TOKENS, TURNS, Sample

_LEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# The weight of the prior chance at each position, in candidates.
_PRIOR_COUNT, _PRIOR_CHANCE = 2.0, 0.6
# The committed tokens that a draft reads, with a rejected candidate's correction, before it proposes again.
_READ_TOKENS = 2
# Bounds of the scale between the reported and the observed cost of further tokens.
_MIN_SCALE, _MAX_SCALE = 0.25, 4.0


@dataclass(frozen=True)
class Times:
    """A model's times of forwards as pairs of a number of tokens and nanoseconds, and what it computes on."""

    costs: tuple[tuple[int, int], ...]
    units: frozenset[str] = frozenset()
    unit_count: int = 0

    def competes_with(self, other: "Times") -> bool:
        """Returns whether two models need more cores or accelerators than they have together."""
        shared = not self.units.isdisjoint(other.units)
        return shared and self.unit_count + other.unit_count > len(self.units | other.units)


@dataclass(frozen=True)
class Prediction:
    """The predicted gain of a pair over the target alone at a temperature, and the plan that reaches it."""

    target: str
    draft: str
    temperature: float
    gain: float
    plan: str
    tokens_per_second: float
    token_count: int


def predict(
    target: str, draft: str, temperature: float, samples: Sequence[Sample], target_times: Times, draft_times: Times
) -> Prediction | None:
    """Returns the prediction for a pair at a temperature, from the samples of this temperature.

    Returns None if they show no pass of the target alone or of the pair.
    """
    own = [one for one in samples if (one.target, one.temperature) == (target, temperature) and one.pass_count]
    alone = [one for one in own if one.way == ALONE]
    turns = [one for one in own if (one.draft, one.way) == (draft, TURNS)]
    if not alone or not turns:
        return None
    single_ns = sum(one.elapsed_ns for one in alone) / sum(one.token_count for one in alone)
    drafted = _draft_costs(turns, target_times, draft_times)
    costs = _target_costs(turns, single_ns, target_times, drafted)
    plans = [("the target alone", 1.0), *_gains(costs, drafted, single_ns)]
    plan, gain = max(plans, key=lambda one: one[1])
    count = sum(one.token_count for one in (*alone, *turns))
    return Prediction(target, draft, temperature, gain, plan, gain * 1e9 / single_ns, count)


def _gains(costs: TargetCosts, draft: DraftCosts, single_ns: float) -> Iterator[tuple[str, float]]:
    for lead in _LEADS:
        yield f"the draft in turns of {lead}", in_turns(costs, draft, lead).tokens_per_ns * single_ns
    yield "the draft ahead", ahead(costs, draft, max(_LEADS)).tokens_per_ns * single_ns


def _target_costs(turns: Sequence[Sample], single_ns: float, target: Times, draft: DraftCosts) -> TargetCosts:
    """Returns the costs of passes: as reported, but scaled to what further tokens cost in the texts."""
    passes = sum(one.pass_count for one in turns)
    width = 1 + sum(one.candidate_count for one in turns) / passes
    waited_ns = sum(one.waited_ns for one in turns) / passes
    pass_ns = sum(one.elapsed_ns for one in turns) / passes - waited_ns
    table = WidthCost.measured(target.costs).table
    # A pass with candidates never costs less than one without, so only its further cost is scaled.
    further = table[min(round(width), len(table)) - 1] - 1.0
    scale = min(max((pass_ns / single_ns - 1.0) / max(further, 1e-3), _MIN_SCALE), _MAX_SCALE)
    # What a turn takes beside the draft's forwards.
    candidate_delay_ns = max(waited_ns - draft.read_ns - (TURN_TOKENS - 1) * draft.token_ns, 0.0)
    return TargetCosts(single_ns, [1.0 + scale * (one - 1.0) for one in table], candidate_delay_ns)


def _draft_costs(turns: Sequence[Sample], target: Times, draft: Times) -> DraftCosts:
    proposed = sum(one.proposed_count for one in turns) or 1
    candidates = sum(one.candidate_count for one in turns)
    # A turn's forwards are one that reads what was committed, and narrow ones.
    reading = WidthCost.measured(draft.costs).of(_READ_TOKENS)
    token_ns = sum(one.compute_ns for one in turns) / proposed * TURN_TOKENS / (TURN_TOKENS - 1 + reading)
    token_ns = max(token_ns, 1.0)  # a service of another kind may report no times
    # Prompt lookup fills only some turns.
    filled = min(proposed / (TURN_TOKENS * sum(one.pass_count for one in turns)), 1.0)
    slowdown = PRIOR_SLOWDOWN if draft.competes_with(target) else 1.0
    return DraftCosts(
        token_ns=token_ns,
        ahead_ns=token_ns * slowdown,
        read_ns=token_ns * reading,
        prompt_ns=0.0,
        round_trip_ns=0.0,  # it is a part of the measured time between passes
        slowdown=slowdown,
        target_tokens=max(candidates / proposed, 0.1),
        survival=tuple(filled * one for one in accumulate(chances(turns), mul)),
    )


def chances(turns: Sequence[Sample]) -> list[float]:
    """Returns the chance of each candidate of a pass if all before it are right; the last known one continues."""
    passes = float(sum(one.draft_pass_count for one in turns))
    candidates = sum(one.candidate_count for one in turns)
    longest = max((len(one.accepted_per_position) for one in turns), default=0)
    accepted = [
        sum(one.accepted_per_position[place] for one in turns if place < len(one.accepted_per_position))
        for place in range(longest)
    ]
    found, tried = [], passes
    # Passes have about this many candidates; beyond that, a position was not tried.
    width = round(candidates / passes) if passes else 0
    for right in accepted[:width]:
        found.append((right + _PRIOR_COUNT * _PRIOR_CHANCE) / (tried + _PRIOR_COUNT))
        tried = float(right)
    overall = sum(accepted[:width]) / (sum(accepted[: width - 1]) + passes) if width else _PRIOR_CHANCE
    found += [overall] * (MAX_WIDTH - 1 - len(found))
    return found[: MAX_WIDTH - 1]
