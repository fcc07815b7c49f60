"""Plans each pass: predicts the speed of every way to get candidates, and chooses the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from math import inf, log
from operator import mul

from bridge.measuring.costs import MAX_WIDTH, PRIOR_SLOWDOWN
from bridge.planning.estimates import RequestEstimates
from bridge.planning.prediction import (
    DraftCosts,
    Plan,
    TargetCosts,
    ahead,
    best_turn,
    best_width,
    min_turn_probability,
    plain,
    with_candidates,
)
from bridge.sources.source import DRAFT, Branch, DraftPace, DraftState, Offer

# The most candidates that are planned for one forward, their positions, and the lengths of a draft's turn in tokens.
MAX_CANDIDATES = MAX_WIDTH - 1
_CANDIDATE_POSITIONS = tuple(range(1, MAX_WIDTH))
_LEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
# The smallest lead of a draft that runs ahead, and the tokens that are added to the lead that it needs.
_MIN_LEAD, _SPARE_LEAD = 8, 4
# Candidates of sources that propose at once are offered for this many passes, so that the target need not wait.
_OFFERED_PASSES = 6
# The factor of the patience over the predicted wait, the same for a draft that runs ahead, and the minimum. The target
# waits less for a draft that runs ahead, because only its first candidates may be late.
_PATIENCE_FACTOR, _AHEAD_PATIENCE_FACTOR, _MIN_PATIENCE_NS = 3.0, 1.5, 2_000_000
# In lockstep, which a user chose, the target waits longer than any draft needs.
_LOCKSTEP_PATIENCE_NS = 5_000_000_000
# The target waits for candidates that the bridge already has if the average gain is this many times their delay.
_WAITING_MARGIN = 3.0
# A draft that makes passes slower by less than this factor may run at any time.
_FREE_SLOWDOWN = 1.1
# The minimum speedup over plain decoding, and over the draft's present way of working, for another way to be chosen.
_MIN_GAIN, _MIN_CHANGE = 1.05, 1.03
# After this many passes for each running request that do not use an available source, or plain decoding, it is tried,
# because what is never tried is never measured.
_IDLE_SOURCE_PASSES, _IDLE_PLAIN_PASSES = 100, 100
# The least chance of a first candidate that is tried: only then does the trial cost next to nothing.
_PROMISING = 0.5
# A draft is tried only in its first passes with a request: the target reads the prompt, is asked to wait, and verifies.
# Reading the prompt must not cost the draft more than this share of the time since it was last used.
_TRIAL_PASSES, _TRIAL_SHARE = 3, 0.01
# A draft that takes turns reads at most about this many tokens at the start of each; it reads more only once.
_TURN_LAG = 3
# The lower bound of the average bytes per token: control tokens have no bytes.
_MIN_TOKEN_BYTES = 0.25
# Nanoseconds of a pass, and a draft token's time as a share of it, until they are measured.
_PRIOR_PASS_NS, _PRIOR_DRAFT_SPEED = 50_000_000.0, 0.15
_TURNS, _AHEAD = "in turns", "ahead"


class Mode(Enum):
    """Whether and how draft and target work together. AUTO lets the planner choose before each pass."""

    AUTO = "auto"
    OFF = "off"
    LOCKSTEP = "lockstep"
    OPPORTUNISTIC = "opportunistic"


@dataclass(frozen=True)
class SpeculationParameters:
    """Holds the user's settings for speculation; names follow Hugging Face's assisted generation.

    `sources` names the sources that may propose; if empty, all that the mode uses may. `draft_temperature` is the
    temperature of the draft; if None, see `SamplingParameters.for_draft`.
    """

    mode: Mode = Mode.AUTO
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    draft_temperature: float | None = None
    sources: tuple[str, ...] = ()

    def allows(self, source: str) -> bool:
        """Returns whether a source may propose. LOCKSTEP and OPPORTUNISTIC use only a draft."""
        if self.mode is Mode.OFF or (self.sources and source not in self.sources):
            return False
        return source == DRAFT or self.mode is Mode.AUTO


class Planner:
    """Plans the passes of one request, from its `estimates`, which it does not change.

    `max_wait_ns`: set for a target that asks for candidates after each pass, and waits no longer than this for them.
    `max_candidate_count`: the most that one of its passes can verify, at least 1.
    `is_shared`: set while its passes run other sequences, too; then only the draft is planned for, and
    `planning.batch` chooses the candidates.
    """

    def __init__(self, parameters: SpeculationParameters, estimates: RequestEstimates) -> None:
        self.mode = parameters.mode
        self.max_wait_ns, self.max_candidate_count, self.is_shared = inf, MAX_CANDIDATES, False
        self._number = parameters.num_assistant_tokens
        self.estimates = estimates

    @property
    def _fixed_number(self) -> int | None:
        """The number of draft tokens in every turn, if the user chose it."""
        return self._number if self.mode is Mode.LOCKSTEP else None

    def plan(self, offers: Sequence[Offer], state: DraftState | None, room: int = _LEADS[-1]) -> Plan:
        """Returns the plan for the next pass, given the present offers and the state of the draft, if there is one.

        `room` is the number of candidates that are still useful.
        """
        costs = self._target_costs()
        alone = Plan("plain", plain(costs), patience_ns=self._patience_ns(costs))
        draft = None if state is None or state.overdue else self._draft_costs(state)
        if self.is_shared:
            best = self._beside(alone, draft, costs)
        elif self.mode is Mode.AUTO:
            best = self._best(alone, offers, state, draft, costs, room)
        elif draft is None:
            best = alone
        elif self.mode is Mode.LOCKSTEP:
            best = replace(self._in_turns(draft, costs, room), patience_ns=_LOCKSTEP_PATIENCE_NS)
        else:
            best = self._ahead(draft, costs)
        target_waits = self.max_wait_ns < inf or self.estimates.target_waits
        if best.pace.turns and self._slowdown > _FREE_SLOWDOWN and not target_waits:
            # The target may have begun a pass, which the draft would slow down. So the target is asked to wait first.
            best = replace(alone, patience_ns=best.patience_ns, prepares_turn=True)
        pace = best.pace if best.pace.lead <= room else replace(best.pace, lead=room)
        return replace(best, pace=pace, plain_ns=costs.of(1))

    def choose(self, offers: Sequence[Offer], plan: Plan) -> tuple[Offer, int]:
        """Returns the offer to send, cut to the useful candidates, and the number that one forward takes."""
        if not offers:
            return Offer(), 0
        if self.mode is not Mode.AUTO:
            width = len(offers[0].token_ids)  # only the draft proposes in these modes
            return self._branched(offers[0], width, plan), width
        if plan.is_trial:
            tried = next((offer for offer in offers if offer.sources[0] == plan.source), Offer())
            tried = self._branched(tried, plan.trial_width, plan)
            # Enough for two passes, because the candidates may be too late for the first.
            return tried.part(0, plan.trial_width * (1 if plan.holds_back else 2)), plan.trial_width
        costs = self._target_costs()
        if plan.runs_ahead:
            costs = costs.slowed(self._slowdown)
        found = self._widths(offers, costs)
        if not found:
            return Offer(), 0
        best, width = max(found, key=lambda one: with_candidates(self.estimates.chances_of(*one), costs).tokens_per_ns)
        best = self._branched(best, width, plan)
        if plan.holds_back:
            return best.part(0, width), width
        drafted = best.sources.count(DRAFT)
        # The draft proposes more in time. Candidates of other sources are offered for several passes.
        return best.part(0, max(width, drafted) if drafted else _OFFERED_PASSES * width), width

    def is_worth_sending(self, offers: Sequence[Offer]) -> bool:
        """Returns whether a pass with candidates of one of the offers would be faster than one without."""
        if self.mode is not Mode.AUTO:
            return bool(offers)
        return bool(offers and self._widths(offers, self._target_costs()))

    def summary(self, state: DraftState | None) -> str:
        """Describes the speed that the planner now predicts for each way to get candidates."""
        if self.mode is not Mode.AUTO or not self.estimates.forward.known:
            return ""
        costs = self._target_costs()
        ways = [Plan("plain", plain(costs))]
        if state and not state.overdue:
            draft = self._draft_costs(state)
            ways += [self._in_turns(draft, costs, _LEADS[-1]), self._ahead(draft, costs)]
        speeds = ", ".join(f"{plan.description} {1e9 * plan.prediction.tokens_per_ns:.1f}" for plan in ways)
        text = f"predicted tokens/s: {speeds}; an 8-token pass costs {costs.of(8) / costs.of(1):.1f}x a 1-token pass"
        if state and self._slowdown > _FREE_SLOWDOWN:
            text += f"; a pass takes {self._slowdown:.1f} times as long while the draft computes"
        return text

    def _best(
        self,
        alone: Plan,
        offers: Sequence[Offer],
        state: DraftState | None,
        draft: DraftCosts | None,
        costs: TargetCosts,
        room: int,
    ) -> Plan:
        """Returns the fastest plan, or one that is to be tried because it was not used for long."""
        estimates = self.estimates
        load, idle = estimates.shared.load, estimates.shared.idle_pass_counts
        if idle[""] >= _IDLE_PLAIN_PASSES * load:
            return replace(alone, is_trial=True)
        at_hand = [offer for offer in offers if offer.sources[0] != DRAFT]
        for offer in at_hand:
            (chance,) = estimates.chances_of(offer, 1)
            if idle[offer.sources[0]] >= _IDLE_SOURCE_PASSES * load and chance >= _PROMISING:
                # The number of candidates that are all right with a chance of one half.
                width = min(max(int(log(0.5) / log(chance)), 1), self.max_candidate_count)
                return replace(self._at_hand(offer, width, costs, 0.0), is_trial=True, trial_width=width)
        ways = [alone, *(self._at_hand(*one, costs, alone.patience_ns) for one in self._widths(at_hand, costs))]
        drafts = []
        if draft and estimates.draft:
            turns = self._in_turns(draft, costs, room)
            if turns.prediction.waited_ns <= self.max_wait_ns:
                drafts.append(turns)
            # The slowdown by a draft that runs ahead can be measured only if the time of a pass without it is known. On
            # shared cores it gains nothing, and to predict that takes time which the target may need.
            slow = self._slowdown >= PRIOR_SLOWDOWN and self.max_wait_ns == inf
            if estimates.forward.known and not slow:
                drafts.append(self._ahead(draft, costs))
            if drafts and self._is_due(draft, costs):
                return replace(drafts[0], is_trial=True, trial_width=drafts[0].pace.lead)
        kept = f"{DRAFT} {_AHEAD if state and state.runs_ahead else _TURNS}"
        best = max(
            (*ways, *drafts),
            key=lambda plan: _speed(plan) * (_MIN_GAIN if plan is alone else _MIN_CHANGE if plan.name == kept else 1.0),
        )
        turns = next((plan for plan in drafts if plan.pace.turns), alone)
        contends = self._slowdown > _FREE_SLOWDOWN and self.max_wait_ns == inf
        if contends and best is not turns and _speed(turns) > _MIN_GAIN * _speed(alone):
            # The draft's next turn will come soon, and the target must not begin a pass before it.
            return replace(best, patience_ns=max(best.patience_ns, turns.patience_ns), prepares_turn=True)
        beside = next((plan for plan in drafts if plan.runs_ahead), None)
        if best.pace.lead == 0 and beside and _speed(beside) > _speed(alone) and self._slowdown < _FREE_SLOWDOWN:
            # The target loses next to nothing if the draft keeps up with the text meanwhile.
            return replace(best, pace=beside.pace)
        return best

    def _beside(self, alone: Plan, draft: DraftCosts | None, costs: TargetCosts) -> Plan:
        """Returns the plan for a shared pass: a draft that would slow it down, for all its sequences, rests."""
        if draft is None or self._slowdown > _FREE_SLOWDOWN:
            return alone
        found = self._ahead(draft, costs)
        if self._is_due(draft, costs):
            return replace(found, is_trial=True)
        return found if _speed(found) > _speed(alone) else alone

    def _is_due(self, draft: DraftCosts, costs: TargetCosts) -> bool:
        """Returns whether the draft is to be tried, because it was not used for long."""
        estimates, load = self.estimates.draft, self.estimates.shared.load
        assert estimates is not None, "a draft has estimates"
        idle = estimates.idle_pass_count
        is_cheap = draft.prompt_ns < _TRIAL_SHARE * idle * costs.of(1)
        is_new = self.estimates.draft_pass_count < _TRIAL_PASSES
        return is_cheap and is_new and idle >= estimates.trial_interval * load

    def _in_turns(self, draft: DraftCosts, costs: TargetCosts, room: int) -> Plan:
        """Returns the best plan in which the target waits for the draft to propose some tokens, then verifies them."""
        fixed = self._fixed_number
        leads = [fixed] if fixed else [lead for lead in _LEADS if lead <= (self._number or lead)]
        lead, best = best_turn(costs, draft, leads, self.max_wait_ns)
        least = 0.0 if fixed else min_turn_probability(costs, draft, lead, best)
        patience_ns = _PATIENCE_FACTOR * (best.waited_ns + draft.prompt_ns) + _MIN_PATIENCE_NS
        # The draft reads its prompt once for all passes; on other hardware, it does so while the target reads its own.
        if self.estimates.pass_count or self._slowdown > _FREE_SLOWDOWN:
            left = min(self.estimates.shared.text_tokens.value, room)
            best = replace(best, ns=best.ns + draft.prompt_ns / max(left / best.tokens, 1.0))
        pace = DraftPace(lead, turns=True, min_probability=least)
        return Plan(f"{DRAFT} {_TURNS}", best, pace, patience_ns, source=DRAFT)

    def _ahead(self, draft: DraftCosts, costs: TargetCosts) -> Plan:
        """Returns the best plan in which the draft computes while the target does.

        In AUTO, the target may wait for the first token of each epoch.
        """
        reach = (draft.round_trip_ns + draft.slowdown * costs.of(1)) / max(draft.ahead_ns, 1.0)
        lead = self._number or int(min(max(reach + _SPARE_LEAD, _MIN_LEAD), _LEADS[-1]))
        ways = (False, True) if self.mode is Mode.AUTO else (False,)
        found = [ahead(costs, draft, lead, waits=waits) for waits in ways]
        best = max((one for one in found if one.waited_ns <= self.max_wait_ns), key=lambda one: one.tokens_per_ns)
        patience_ns = _AHEAD_PATIENCE_FACTOR * best.waited_ns
        return Plan(f"{DRAFT} {_AHEAD}", best, DraftPace(lead), patience_ns, source=DRAFT)

    def _at_hand(self, offer: Offer, width: int, costs: TargetCosts, patience_ns: float) -> Plan:
        """Returns the plan to send an offer of a source that proposes at once."""
        chance = self.estimates.chances_of(offer, 1)[0]
        # If the first candidate is right, waiting for it saves a 1-token pass; if not, it costs the wider pass's extra.
        gain_ns = chance * costs.of(1) - (1 - chance) * (costs.of(width + 1) - costs.of(1))
        source, found = offer.sources[0], with_candidates(self.estimates.chances_of(offer, width), costs)
        found = self.estimates.corrected(source, found, costs.of(1))
        return Plan(source, found, DraftPace(), patience_ns, gain_ns, source=source)

    def _widths(self, offers: Sequence[Offer], costs: TargetCosts) -> list[tuple[Offer, int]]:
        """Returns each offer that is worth sending, with the number of its candidates that one forward takes."""
        widths = ((offer, best_width(self.estimates.each_chance(offer), costs)) for offer in offers)
        return [(offer, width) for offer, width in widths if width]

    def _branched(self, offer: Offer, width: int, plan: Plan) -> Offer:
        """Returns an offer with those of its branches that are worth verifying with its first `width` candidates."""
        estimates, kept = self.estimates, list[Branch]()
        if not (offer.branches and estimates.draft):
            return offer
        costs = self._target_costs()
        chances = estimates.chances_of(offer, width)
        before = list(accumulate(chances, mul, initial=1.0))
        tokens, ns = 1.0 + sum(before[1:]), costs.of(width + 1) + plan.prediction.waited_ns * plan.pace.turns
        ranked = [
            (before[one.index] * estimates.draft.branches.of(one.evidence), one)
            for one in offer.branches
            if one.index < width
        ]
        for chance, one in sorted(ranked, key=lambda pair: pair[0], reverse=True):
            more_ns = costs.of(width + len(kept) + 2) - costs.of(width + len(kept) + 1)
            if chance * ns <= tokens * more_ns:
                break
            kept.append(one)
            tokens, ns = tokens + chance, ns + more_ns
        return replace(offer, branches=tuple(kept))

    def _patience_ns(self, costs: TargetCosts) -> float:
        """Returns how long the target may wait for candidates that the bridge already has; 0 if that gained little."""
        gains = self.estimates.waiting_gain.value > _WAITING_MARGIN * costs.candidate_delay_ns
        return max(_PATIENCE_FACTOR * costs.candidate_delay_ns, _MIN_PATIENCE_NS) if gains else 0.0

    @property
    def _slowdown(self) -> float:
        return self.estimates.draft.slowdown.value if self.estimates.draft else 1.0

    def _target_costs(self) -> TargetCosts:
        """Returns the cost of passes for all running requests, each of which waits for this request's candidates."""
        forward, shared = self.estimates.forward, self.estimates.shared
        single_ns = forward.single_ns or _PRIOR_PASS_NS
        ratios = forward.widths.table[: self.max_candidate_count + 1]
        return TargetCosts(single_ns, ratios, shared.costs.candidate_delay.value, shared.load)

    def _draft_costs(self, state: DraftState) -> DraftCosts:
        draft, estimates = self.estimates.draft, self.estimates
        assert draft is not None, "a draft has estimates"
        # Until it is measured, a draft is assumed to be several times as fast as the target.
        token_ns = draft.forward.single_ns or _PRIOR_DRAFT_SPEED * (estimates.forward.single_ns or _PRIOR_PASS_NS)
        lag = state.lag_token_count
        read_tokens = draft.read_tokens(min(lag, _TURN_LAG))
        chances = estimates.positions.of_all(_CANDIDATE_POSITIONS)
        turn_survival: tuple[float, ...] = ()
        turn_lengths: tuple[float, ...] = ()
        if not self._fixed_number:
            goes_on_if_right = [1.0, *draft.goes_on_if_right.of_all(_CANDIDATE_POSITIONS[:-1])]
            goes_on = [1.0, *draft.goes_on.of_all(_CANDIDATE_POSITIONS[:-1])]
            turn_survival = tuple(accumulate(map(mul, chances, goes_on_if_right), mul))
            turn_lengths = tuple(accumulate(accumulate(goes_on, mul)))
        return DraftCosts(
            token_ns=token_ns,
            ahead_ns=token_ns * draft.ahead_slowdown.value,
            read_ns=token_ns * read_tokens,
            prompt_ns=token_ns * max(draft.read_tokens(lag) - read_tokens, 0.0),
            round_trip_ns=draft.round_trip.value,
            slowdown=draft.slowdown.value,
            target_tokens=state.token_bytes / max(estimates.token_bytes.value, _MIN_TOKEN_BYTES),
            survival=tuple(accumulate(chances, mul)),
            turn_survival=turn_survival,
            turn_lengths=turn_lengths,
        )


def _speed(plan: Plan) -> float:
    return plan.prediction.tokens_per_ns
