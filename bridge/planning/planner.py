"""The planner: predicts the speed of every way of getting candidates, and takes the best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from math import log
from operator import mul

from bridge.planning.costs import MAX_WIDTH
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
    with_candidates,
)
from bridge.sources.source import Offer, Outcome, Pace, SourceState

# The most candidates in one forward that are considered, and the lengths of a draft's turn.
MAX_CANDIDATES = MAX_WIDTH - 1
_LEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
# The fewest tokens that a draft that runs ahead may be ahead, and those that it has beside what it needs.
_MIN_LEAD, _SPARE_LEAD = 8, 4
# The numbers of tokens of a draft that starts anew for which a target may wait, before the draft runs ahead.
_BATCHES = (0, 1)
# Candidates that are at hand are offered for this many passes, so that the target need not wait between them.
_OFFERED_PASSES = 6
# The target waits this many times as long as predicted, and at least this long. A draft that runs ahead may be slower
# only at first, so for it the target waits less.
_PATIENCE_FACTOR, _AHEAD_PATIENCE_FACTOR, _MIN_PATIENCE_NS = 3.0, 1.5, 2_000_000
# In lockstep, which a user asked for, it waits longer than any draft needs.
_LOCKSTEP_PATIENCE_NS = 5_000_000_000
# It waits for candidates that are at hand if that has lately gained this many times what it cost, both estimated.
_WAITING_MARGIN = 3.0
# A draft that slows the target down by less than this may run at any time.
_FREE_SLOWDOWN = 1.1
# How much faster than no candidates at all a way has to be, and how much faster than the way in use another one.
_MIN_GAIN, _MIN_CHANGE = 1.05, 1.03
# Passes of each running request without candidates although a source had some, of passes with candidates only, and
# without the draft, after which the way that was not used is tried: what is never tried is never known better.
_IDLE_SOURCE_PASSES, _IDLE_PLAIN_PASSES, _IDLE_DRAFT_PASSES = 100, 100, 500
# A draft is tried in the first passes of a request: the target reads the prompt, is told to wait, and verifies.
# To read a long prompt for it must not cost more than this part of the time since it was last in use.
_TRIAL_PASSES, _TRIAL_SHARE = 3, 0.01
# A text of control tokens alone has no bytes.
_MIN_TOKEN_BYTES = 0.25
# Nanoseconds of a pass, and a draft's time for a token relative to that, until they are measured.
_PRIOR_PASS_NS, _PRIOR_DRAFT_SPEED = 50_000_000.0, 0.15


_TURNS, _AHEAD = "in turns", "ahead"


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

    def plan(self, offers: Sequence[Offer], state: SourceState | None, room: int = _LEADS[-1]) -> Plan:
        """Returns the plan for the next pass, given what can be offered now and where the draft, if any, stands.

        `room`: candidates that are still of use.
        """
        costs = self._target_costs()
        none = Plan("none", plain(costs), patience_ns=self._patience_ns(costs))
        draft = None if state is None or state.overdue else self._draft_costs(state)
        if self.mode is not Mode.AUTO:
            best = self._fixed(draft, costs, room) or replace(none, patience_ns=0.0)
        else:
            best = self._best(none, offers, state, draft, costs, room)
        if best.pace.turns and self._slowdown > _FREE_SLOWDOWN and not self._estimates.target_waits:
            # The target may have begun a pass, which the draft would slow down: first it is told to wait.
            best = replace(none, patience_ns=best.patience_ns, prepares_turn=True)
        return replace(best, pace=replace(best.pace, lead=min(best.pace.lead, room)))

    def choose(self, offers: Sequence[Offer], plan: Plan) -> tuple[Offer, int]:
        """Returns the offer to send, with as many candidates as are of use, and how many one forward is to take."""
        if self.mode is not Mode.AUTO:
            longest = max(offers, key=lambda offer: len(offer.token_ids), default=Offer())
            return longest, len(longest.token_ids)
        if plan.is_trial:
            tried = next((offer for offer in offers if offer.sources[0] == plan.source), Offer())
            # For two passes, because they may come too late for the first.
            return tried.part(0, plan.trial_width * (1 if plan.holds_back else 2)), plan.trial_width
        costs = self._target_costs().slowed(self._slowdown if plan.runs_ahead else 1.0)
        found = [
            (self._prediction(offer, width, costs).tokens_per_ns, offer, width)
            for offer, width in self._widths(offers, costs)
        ]
        if not found:
            return Offer(), 0
        _, best, width = max(found, key=lambda one: one[0])
        if plan.holds_back:
            return best.part(0, width), width
        drafted = best.sources.count(self._estimates.drafting_source)
        # The draft is asked for more in time; what is at hand is offered for several passes.
        return best.part(0, max(width, drafted) if drafted else _OFFERED_PASSES * width), width

    def observe(self, outcome: Outcome, plan: Plan) -> None:
        """Takes note of a pass that was made under a plan."""
        self._estimates.observe(outcome, plan)

    def summary(self, state: SourceState | None) -> str:
        """Describes what the planner predicts of every way now."""
        if self.mode is not Mode.AUTO or not self._estimates.forward.known:
            return ""
        costs = self._target_costs()
        ways = [Plan("none", plain(costs))]
        if state and not state.overdue:
            draft = self._draft_costs(state)
            ways += [self._in_turns(draft, costs, _LEADS[-1]), self._ahead(draft, costs, _BATCHES)]
        speeds = ", ".join(f"{plan.description} {1e9 * plan.prediction.tokens_per_ns:.1f}" for plan in ways)
        text = f"predicted tokens/s: {speeds}; an 8-token pass costs {costs.of(8) / costs.of(1):.1f}x a 1-token pass"
        if state and self._slowdown > _FREE_SLOWDOWN:
            text += f"; a pass takes {self._slowdown:.1f} times as long while the draft computes"
        return text

    def _fixed(self, draft: DraftCosts | None, costs: TargetCosts, room: int) -> Plan | None:
        """Returns the plan of a mode that the user chose."""
        if draft is None:
            return None
        if self.mode is Mode.LOCKSTEP:
            leads = (self._number,) if self._number else _LEADS
            return replace(self._in_turns(draft, costs, room, leads), patience_ns=_LOCKSTEP_PATIENCE_NS)
        return self._ahead(draft, costs, (0,))

    def _best(
        self,
        none: Plan,
        offers: Sequence[Offer],
        state: SourceState | None,
        draft: DraftCosts | None,
        costs: TargetCosts,
        room: int,
    ) -> Plan:
        """Returns the fastest plan, or one that has not been used for so long that it is to be tried."""
        estimates = self._estimates
        load, idle = estimates.shared.load, estimates.shared.idle_pass_counts
        if idle[""] >= _IDLE_PLAIN_PASSES * load:
            return replace(none, is_trial=True)
        at_hand = [offer for offer in offers if offer.sources[0] != estimates.drafting_source]
        for offer in at_hand:
            if idle[offer.sources[0]] >= _IDLE_SOURCE_PASSES * load:
                # As many as are all right half of the time.
                width = min(max(int(log(0.5) / log(self._chances(offer, 1)[0])), 1), MAX_CANDIDATES)
                return replace(self._at_hand(offer, width, costs, 0.0), is_trial=True, trial_width=width)
        ways = [none, *(self._at_hand(*one, costs, none.patience_ns) for one in self._widths(at_hand, costs))]
        drafts = []
        if draft and estimates.draft:
            drafts.append(self._in_turns(draft, costs, room))
            # What a draft costs that runs ahead can only be told if it is known what passes take without it.
            if estimates.forward.known:
                drafts.append(self._ahead(draft, costs, _BATCHES))
            idle_count = estimates.draft.idle_pass_count
            tries = idle_count >= _IDLE_DRAFT_PASSES * load and draft.prompt_ns < _TRIAL_SHARE * idle_count * costs.of(
                1
            )
            if tries and estimates.pass_count < _TRIAL_PASSES:
                return replace(drafts[0], is_trial=True, trial_width=drafts[0].pace.lead)
        kept = f"{estimates.drafting_source} {_AHEAD if state and state.runs_ahead else _TURNS}"
        best = max(
            (*ways, *drafts),
            key=lambda plan: _speed(plan) * (_MIN_GAIN if plan is none else _MIN_CHANGE if plan.name == kept else 1.0),
        )
        turns = next((plan for plan in drafts if plan.pace.turns), none)
        if self._slowdown > _FREE_SLOWDOWN and best is not turns and _speed(turns) > _MIN_GAIN * _speed(none):
            # The next turn will come soon, and then the target must not have begun a pass.
            return replace(best, patience_ns=max(best.patience_ns, turns.patience_ns), prepares_turn=True)
        beside = next((plan for plan in drafts if plan.runs_ahead), None)
        if best.pace.lead == 0 and beside and _speed(beside) > _speed(none) and self._slowdown < _FREE_SLOWDOWN:
            # It costs the target next to nothing to let the draft follow the text meanwhile.
            return replace(best, pace=beside.pace)
        return best

    def _in_turns(self, draft: DraftCosts, costs: TargetCosts, room: int, leads: Sequence[int] = _LEADS) -> Plan:
        """Returns the best plan in which the draft proposes some tokens, and then the target verifies them."""
        leads = [lead for lead in leads if lead <= (self._number or lead)]
        predictions = {lead: in_turns(costs, draft, lead) for lead in leads}
        lead = max(leads, key=lambda lead: predictions[lead].tokens_per_ns)
        best = predictions[lead]
        patience_ns = _PATIENCE_FACTOR * (best.waited_ns + draft.prompt_ns) + _MIN_PATIENCE_NS
        # The draft reads its prompt once for all passes; on hardware of its own, while the target reads the same.
        if self._estimates.pass_count or self._slowdown > _FREE_SLOWDOWN:
            best = replace(best, ns=best.ns + draft.prompt_ns / max(room / best.tokens, 1.0))
        source = self._estimates.drafting_source
        return Plan(f"{source} {_TURNS}", best, Pace(lead, lead, True), patience_ns, source=source)

    def _ahead(self, draft: DraftCosts, costs: TargetCosts, batches: Sequence[int]) -> Plan:
        """Returns the best plan in which the draft runs on while the target computes."""
        reach = (draft.round_trip_ns + draft.slowdown * costs.of(1)) / max(draft.ahead_ns, 1.0)
        lead = self._number or int(min(max(reach + _SPARE_LEAD, _MIN_LEAD), _LEADS[-1]))
        predictions = {batch: ahead(costs, draft, lead, batch) for batch in batches}
        batch = max(batches, key=lambda batch: predictions[batch].tokens_per_ns)
        patience_ns = _AHEAD_PATIENCE_FACTOR * predictions[batch].waited_ns
        source = self._estimates.drafting_source
        return Plan(f"{source} {_AHEAD}", predictions[batch], Pace(lead, max(batch, 1)), patience_ns, source=source)

    def _at_hand(self, offer: Offer, width: int, costs: TargetCosts, patience_ns: float) -> Plan:
        """Returns the plan to send an offer that is there already."""
        chance = self._chances(offer, 1)[0]
        # If the first candidate is right, not waiting costs a 1-token pass; if it is wrong, waiting cost the width.
        gain_ns = chance * costs.of(1) - (1 - chance) * (costs.of(width + 1) - costs.of(1))
        source, found = offer.sources[0], self._prediction(offer, width, costs)
        found = replace(found, tokens=1.0 + (found.tokens - 1.0) * self._estimates.yield_ratio(source))
        return Plan(source, found, Pace(), patience_ns, gain_ns, source=source)

    def _widths(self, offers: Sequence[Offer], costs: TargetCosts) -> list[tuple[Offer, int]]:
        """Returns the offers that are worth sending, and how many of its candidates one forward is to take."""
        widths = ((offer, best_width(self._chances(offer, MAX_CANDIDATES), costs)) for offer in offers)
        return [(offer, width) for offer, width in widths if width]

    def _prediction(self, offer: Offer, width: int, costs: TargetCosts) -> Prediction:
        return with_candidates(self._chances(offer, width), costs)

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
        """Returns what passes cost all running requests: each of them waits for the others' further tokens."""
        forward, shared = self._estimates.forward, self._estimates.shared
        single_ns = forward.single_ns or _PRIOR_PASS_NS
        ratios = forward.widths.table
        return TargetCosts(
            tuple(single_ns * (1 + shared.load * (ratio - 1)) for ratio in ratios), shared.costs.hop.value
        )

    def _draft_costs(self, state: SourceState) -> DraftCosts:
        draft, estimates = self._estimates.draft, self._estimates
        assert draft is not None, "a source that takes time has estimates"
        # Until it is known, a draft is taken to be several times as fast as the target.
        token_ns = draft.forward.single_ns or _PRIOR_DRAFT_SPEED * (estimates.forward.single_ns or _PRIOR_PASS_NS)
        widths = draft.forward.widths
        chances = (estimates.positions.of(position) for position in range(1, MAX_CANDIDATES + 1))
        return DraftCosts(
            token_ns=token_ns,
            ahead_ns=token_ns * draft.ahead_slowdown.value,
            read_ns=token_ns * widths.of(min(state.lag_token_count, MAX_CANDIDATES)),
            prompt_ns=token_ns * max(widths.of(state.lag_token_count) - widths.of(MAX_CANDIDATES), 0.0),
            round_trip_ns=draft.round_trip_ns,
            slowdown=draft.slowdown.value,
            target_tokens=state.token_bytes / max(estimates.token_bytes.value, _MIN_TOKEN_BYTES),
            survival=tuple(accumulate(chances, mul)),
        )


def _speed(plan: Plan) -> float:
    return plan.prediction.tokens_per_ns
