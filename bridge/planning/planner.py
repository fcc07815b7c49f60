"""The planner: predicts the speed of every way of getting candidates, and takes the best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from math import log
from operator import mul

from bridge.planning.estimates import RequestEstimates
from bridge.planning.prediction import (
    DraftCosts,
    Plan,
    Prediction,
    TargetCosts,
    ahead,
    best_width,
    in_turns,
    plain,
    turn_ns,
    wait_ns,
)
from bridge.sources.source import Offer, Outcome, Pace, SourceState

# The most candidates in one forward that are considered, and the lengths of a draft's turn.
MAX_CANDIDATES = 24
_LEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
# The fewest tokens that a draft that runs ahead may be ahead.
_DEFAULT_LEAD = 8
_TURNS, _AHEAD = "in turns", "ahead"
# Candidates that are at hand are offered for this many forwards, so that the target need not wait between them.
_FORWARDS = 6
# How many times its cost waiting for candidates must have gained lately, both being estimates.
_WAITING_MARGIN = 3.0
# The target waits this many times as long as it should have to, and at least this long.
_PATIENCE_FACTOR, _MIN_PATIENCE_NS = 3.0, 2_000_000
# For a draft that runs ahead, which may need time to catch up, it waits this many times as long.
_AHEAD_PATIENCE_FACTOR = 1.5
# The numbers of tokens of a draft that starts anew for which a target may wait, before the draft runs ahead.
_BATCHES = (0, 1)
# In lockstep, which a user asked for, it waits longer than any draft needs.
_LOCKSTEP_PATIENCE_NS = 5_000_000_000
# Passes beside a draft that yield fewer tokens than this are not worth its computing.
_MIN_TOKENS = 1.02
# A draft that slows the target down by less than this does so for nothing.
_FREE = 1.1
# Plans that are about as fast as the one in use, or as no draft at all: changing costs more than it gains.
_STAYING = 1.05
# The part of a draft's wrong candidates that counts as right, and the number of candidates after which it counts half:
# for a request that has tried few, and for a pair that nobody has tried. Less than the last figure is not worth it.
_OPTIMISM, _REQUEST_COUNT, _PAIR_OPTIMISM, _PAIR_COUNT, _MIN_OPTIMISM = 0.15, 4, 0.5, 10, 0.01
# Passes of each running request without candidates, although there were some, after which some are verified all the
# same; without a pass of one token, after which there is one; and without the draft, after which a
# request tries it. What is never tried is never known better.
_RETRY_PASSES, _NARROW_PASSES, _RETRY_DRAFT_PASSES = 100, 100, 500
# A text of control tokens alone has no bytes.
_MIN_TOKEN_BYTES = 0.25
# Nanoseconds of a pass, and a draft's time for a token relative to that, until they are measured.
_PRIOR_PASS_NS, _PRIOR_DRAFT_SPEED = 50_000_000.0, 0.15


class Mode(Enum):
    """How draft and target take turns."""

    AUTO = "auto"
    OFF = "off"
    LOCKSTEP = "lockstep"
    OPPORTUNISTIC = "opportunistic"


@dataclass(frozen=True)
class SpeculationParameters:
    """What the user asked for; names follow Hugging Face's assisted generation.

    `sources`: names of those that may propose; empty for all that the mode uses. `draft_temperature`: at which the
    draft guesses, the request's if None.
    """

    mode: Mode = Mode.AUTO
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    draft_temperature: float | None = None
    sources: tuple[str, ...] = ()

    def allows(self, source: str, *, takes_time: bool) -> bool:
        """Whether a source may propose. By themselves, LOCKSTEP and OPPORTUNISTIC use only sources that take time."""
        if self.mode is Mode.OFF or (self.sources and source not in self.sources):
            return False
        return takes_time or self.mode is Mode.AUTO


class Planner:
    """Plans for one request. All but `observe` are queries that change nothing."""

    def __init__(self, parameters: SpeculationParameters, estimates: RequestEstimates) -> None:
        self.mode = parameters.mode
        self._number = parameters.num_assistant_tokens
        self._estimates = estimates

    @property
    def max_candidates(self) -> int:
        """The most candidates that are worth translating for one offer."""
        return _FORWARDS * MAX_CANDIDATES if self.mode is Mode.AUTO else 4 * _LEADS[-1]

    def plan(self, offers: Sequence[Offer], state: SourceState | None) -> Plan:
        """The plan for the next pass, given what could be offered now and where the draft, if any, stands."""
        costs = self._target_costs()
        drafts = self._drafting(state, costs)
        if self.mode is not Mode.AUTO:
            return max(drafts.values(), key=_speed, default=Plan("none", plain(costs)))
        shared = self._estimates.shared
        patience_ns = self._patience_ns(costs)
        at_hand = [offer for offer in offers if offer.sources[0] != self._estimates.drafting_source]
        none = Plan("none", plain(costs), patience_ns=patience_ns, declines=bool(at_hand))
        if shared.wide_pass_count >= _NARROW_PASSES * shared.load:
            return none
        kept = f"{self._estimates.drafting_source} {_AHEAD if state and state.runs_ahead else _TURNS}"
        hoped = self._drafting(state, costs, self._optimism) if drafts and self._optimism > _MIN_OPTIMISM else drafts
        best = max(
            (none, *self._at_once(at_hand, costs, patience_ns), *hoped.values()),
            key=lambda plan: plan.prediction.speed * (_STAYING if plan is none or plan.name == kept else 1.0),
        )
        best = next((plan for plan in drafts.values() if plan.name == best.name), best)
        draft = self._estimates.draft
        if draft and not self._estimates.begun and draft.unused_pass_count >= _RETRY_DRAFT_PASSES * shared.load:
            best = max(drafts.values(), key=_speed, default=best)
        beside = drafts.get(_AHEAD)
        if (
            best.pace.lead == 0
            and beside
            and beside.prediction.speed > none.prediction.speed
            and self._slowdown < _FREE
        ):
            # It costs the target next to nothing to let the draft follow the text meanwhile.
            return replace(best, pace=beside.pace)
        return best

    def choose(self, offers: Sequence[Offer], plan: Plan) -> tuple[Offer, int]:
        """The offer to send, with as many candidates as are of use, and how many of them one forward is to take."""
        if self.mode is not Mode.AUTO:
            longest = max(offers, key=lambda offer: len(offer.token_ids), default=Offer())
            return longest, len(longest.token_ids)
        costs = self._target_costs().slowed(self._slowdown if plan.runs_ahead else 1.0)
        shared = self._estimates.shared
        if plan.name != "none" or shared.wide_pass_count < _NARROW_PASSES * shared.load:
            best, width, found = Offer(), 0, plain(costs)
            for offer in offers:
                count, prediction = self._width(offer, costs)
                if count and prediction.speed > found.speed:
                    best, width, found = offer, count, prediction
            if width:
                drafted = best.sources.count(self._estimates.drafting_source)
                # The draft is asked for more in time; what is at hand is offered for several forwards.
                return best.part(0, max(width, drafted) if drafted else _FORWARDS * width), width
            if offers and shared.unused_pass_count >= _RETRY_PASSES * shared.load:
                # As many as are all right half of the time; for two forwards, because they may come late for one.
                chance = self._chances(offers[-1], 1)[0]
                width = min(max(int(log(0.5) / log(chance)), 1), MAX_CANDIDATES)
                return offers[-1].part(0, 2 * width), width
        return Offer(), 0

    def observe(self, outcome: Outcome, plan: Plan) -> None:
        """Takes note of a pass that was made under a plan."""
        self._estimates.observe(outcome, plan)

    def summary(self, state: SourceState | None) -> str:
        """What the planner predicts of every way now, in words."""
        if self.mode is not Mode.AUTO or not self._estimates.forward.known:
            return ""
        costs = self._target_costs()
        ways = [Plan("none", plain(costs)), *self._drafting(state, costs).values()]
        speeds = ", ".join(f"{plan.description} {1e9 * plan.prediction.speed:.1f}" for plan in ways)
        text = f"predicted tokens/s: {speeds}; an 8-token pass costs {costs.of(8) / costs.of(1):.1f}x a 1-token pass"
        if state and self._slowdown > _FREE:
            text += f"; the draft slows the target down to 1/{self._slowdown:.1f} where both run"
        return text

    def _drafting(self, state: SourceState | None, costs: TargetCosts, optimism: float = 0.0) -> dict[str, Plan]:
        """The best plan of each way to use the draft, if there is one; with `optimism` its candidates are better."""
        if state is None or state.overdue:
            return {}
        draft, source, mode = self._draft_costs(state, optimism), self._estimates.drafting_source, self.mode
        plans = {}
        if mode is not Mode.OPPORTUNISTIC:
            fixed = mode is Mode.LOCKSTEP and self._number
            leads = (self._number,) if fixed and self._number else [n for n in _LEADS if n <= (self._number or n)]
            lead = max(leads, key=lambda lead: in_turns(costs, draft, lead).speed)
            patience_ns = _PATIENCE_FACTOR * turn_ns(costs, draft, lead) + _MIN_PATIENCE_NS
            if mode is Mode.LOCKSTEP:
                patience_ns = _LOCKSTEP_PATIENCE_NS
            plans[_TURNS] = Plan(
                f"{source} in turns", in_turns(costs, draft, lead), Pace(lead, lead, True), patience_ns
            )
        if mode is not Mode.LOCKSTEP:
            reach = (draft.round_trip_ns + draft.slowdown * costs.of(1)) / max(draft.ahead_ns, 1.0)
            lead = self._number or int(min(max(reach + 4, _DEFAULT_LEAD), _LEADS[-1]))
            batches = _BATCHES if mode is Mode.AUTO else (0,)
            batch = max(batches, key=lambda batch: ahead(costs, draft, lead, batch).speed)
            patience_ns = _AHEAD_PATIENCE_FACTOR * wait_ns(costs, draft, batch)
            # What a draft costs that runs ahead can only be told if it is known what passes take without it.
            if mode is Mode.OPPORTUNISTIC or self._estimates.forward.known:
                plans[_AHEAD] = Plan(
                    f"{source} {_AHEAD}", ahead(costs, draft, lead, batch), Pace(lead, max(batch, 1)), patience_ns
                )
        return {
            way: plan for way, plan in plans.items() if plan.prediction.tokens > _MIN_TOKENS or mode is not Mode.AUTO
        }

    def _at_once(self, offers: Sequence[Offer], costs: TargetCosts, patience_ns: float) -> list[Plan]:
        """Plans that send an offer which is there already."""
        plans = []
        for offer in offers:
            count, prediction = self._width(offer, costs)
            if count:
                chance = self._chances(offer, 1)[0]
                # Late candidates are still of use if the first of them was right: then waiting gains a 1-token pass.
                gain_ns = chance * costs.of(1) - (1 - chance) * (costs.of(count + 1) - costs.of(1))
                plans.append(Plan(offer.sources[0], prediction, Pace(), patience_ns, gain_ns))
        return plans

    def _width(self, offer: Offer, costs: TargetCosts) -> tuple[int, Prediction]:
        return best_width(self._chances(offer, MAX_CANDIDATES), costs)

    def _chances(self, offer: Offer, count: int) -> list[float]:
        chances = self._estimates.chances
        return [
            chances[source].of(evidence)
            for source, evidence in zip(offer.sources[:count], offer.evidence[:count], strict=True)
        ]

    def _patience_ns(self, costs: TargetCosts) -> float:
        """How long the target may wait for candidates that are at hand: not at all where that has gained little."""
        gains = self._estimates.waiting_gain.value > _WAITING_MARGIN * costs.hop_ns
        return max(_PATIENCE_FACTOR * costs.hop_ns, _MIN_PATIENCE_NS) if gains else 0.0

    @property
    def _slowdown(self) -> float:
        return self._estimates.draft.slowdown.value if self._estimates.draft else 1.0

    def _target_costs(self) -> TargetCosts:
        """What a forward takes beyond one token, all requests that run have to wait for."""
        forward, shared = self._estimates.forward, self._estimates.shared
        single_ns = forward.single_ns or _PRIOR_PASS_NS
        table = forward.widths.table(MAX_CANDIDATES + 1)
        return TargetCosts(
            tuple(single_ns * (1 + shared.load * (ratio - 1)) for ratio in table), shared.costs.hop.value
        )

    @property
    def _optimism(self) -> float:
        """The part of the draft's wrong candidates that counts as right as long as little is known of them."""
        request, pair = self._estimates.places, self._estimates.draft
        unknown = _PAIR_OPTIMISM / (1 + pair.places.tried_count / _PAIR_COUNT) if pair else 0.0
        return max(_OPTIMISM / (1 + request.tried_count / _REQUEST_COUNT), unknown)

    def _draft_costs(self, state: SourceState, optimism: float) -> DraftCosts:
        draft, estimates = self._estimates.draft, self._estimates
        assert draft is not None, "a source that takes time has estimates"
        # Until it is known, a draft is taken to be several times as fast as the target.
        token_ns = draft.forward.single_ns or _PRIOR_DRAFT_SPEED * (estimates.forward.single_ns or _PRIOR_PASS_NS)
        chances = [estimates.places.of(place) for place in range(1, MAX_CANDIDATES + 1)]
        survival = tuple(accumulate((chance + optimism * (1 - chance) for chance in chances), mul))
        return DraftCosts(
            token_ns=token_ns,
            ahead_ns=token_ns * draft.ahead_slowdown.value,
            read_ns=token_ns * draft.forward.widths.of(state.lag_token_count),
            round_trip_ns=draft.round_trip_ns,
            slowdown=draft.slowdown.value,
            target_tokens=state.token_bytes / max(estimates.token_bytes.value, _MIN_TOKEN_BYTES),
            survival=survival,
        )


def _speed(plan: Plan) -> float:
    return plan.prediction.speed
