"""Estimates the costs and acceptance of a target and its drafts, from measured times and accepted candidates.

All requests share `TargetEstimates` and `DraftEstimates`; `RequestEstimates` starts from them. Queries change no
estimate, but create the priors of a draft or source at first. A wrong estimate costs time but never changes text.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace

from bridge.planning.chances import Chances, RequestChances
from bridge.planning.costs import Ewma, ForwardTime, WidthCost
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import Proposal
from bridge.sources.source import CandidateSource, Offer, Outcome
from bridge.text.common_prefix import common_prefix_length

# Nanoseconds from a pass until candidates that the bridge already has reach the target, until that is measured.
_PRIOR_HOP_NS = 600_000.0
# Nanoseconds of a message to the draft and its answer, until that is measured.
_PRIOR_ROUND_TRIP_NS = 1_000_000.0
# Average bytes of a target token until some were seen, and the weight of each new token.
_PRIOR_TOKEN_BYTES, _TOKEN_BYTES_FRESH = 4.0, 0.02
# A hop or round trip counts as at most this multiple of the average: networks differ a lot from the priors, and a stall
# of seconds must not keep the draft from being used, because only its use measures it.
_MAX_DELAY_RATIO = 10.0
# The same for slowdowns.
_MAX_SLOWDOWN_RATIO = 3.0
# The hop is measured only in passes that waited at least this long for candidates.
_MIN_WAITED_NS = 20_000
# A draft that reads more tokens than this reads a prompt, which does not measure its turns.
_MAX_READ_TOKENS = 64
# The tokens that a text is assumed to have until some have ended, and the weight of that, in texts. Most texts end long
# before their request's limit.
_PRIOR_TEXT_TOKENS, _PRIOR_TEXTS = 200.0, 2
# The number of contexts that a draft has read lately and is assumed to hold in its cache.
_CACHED_CONTEXTS = 4
# The assumed factor by which a forward is slower while another model computes on the same cores. On two cores it was
# 3 to 9; measuring it takes seconds.
_PRIOR_SLOWDOWN = 4.0
# Groups of a draft candidate's position in a forward, and the assumed chance that it is right. The priors are higher
# than most drafts reach, because a draft that is never tried is never measured.
_POSITIONS = (2, 3, 4, 5, 7, 9, 13)
_POSITION_PRIORS = (0.75, 0.8, 0.8, 0.8, 0.85, 0.85, 0.85, 0.85)
# The right candidates of the draft that each request imagines at its start, for the same reason.
_HOPE = 4.0
# The passes with a draft that runs ahead after which its slowdown of the target counts as known, and the weight of
# each further pass.
_SLOWDOWN_PASSES, _FRESH_SLOWDOWN = 8, 0.02
# The weight of the assumed slowdown in each pass without such a draft.
_FORGOTTEN_SLOWDOWN = 0.002
# The passes for each running request after which an unused draft is tried, because what is never tried is never
# measured. Each trial after which the planner still has no use for the draft doubles the interval.
_MIN_TRIAL_INTERVAL, _MAX_TRIAL_INTERVAL = 500, 8000
# The weight of the prior ratio of 1, in accepted candidates or in passes without candidates, and the factor by which
# each further pass of any plan reduces the weight of earlier ones.
_RATIO_PRIOR, _RATIO_FADE = 6.0, 0.99
# The least measured part of that prior, whatever was measured later.
_MIN_RATIO = 0.1
# A pass counts as at most this multiple of its predicted time: the machine may have stalled.
_MAX_TIME_RATIO = 3.0
# The least prior chance of candidates that are tried, once in a while, though they are not expected to pay.
_PROMISING = 0.5
# The weight of the newest pass in the average gain from waiting for candidates.
_GAIN_FRESH = 0.2


class DraftEstimates:
    """Estimates the costs and acceptance of one draft for one target. Implements `bridge.sources.source.DraftTimes`.

    `slowdown` is the factor by which a target pass is slower while the draft computes, `ahead_slowdown` the factor by
    which a draft token is slower while the target computes. Both are learned when the draft runs ahead.
    """

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False) -> None:
        single_ns = dict(forward_costs).get(1, 0)
        self.forward = ForwardTime(WidthCost.measured(forward_costs), float(single_ns))
        self.round_trip = Ewma(_PRIOR_ROUND_TRIP_NS, count=1)
        self._prior_slowdown = _PRIOR_SLOWDOWN if competes else 1.0
        self.slowdown = Ewma(self._prior_slowdown, count=1)
        self.ahead_slowdown = Ewma(self._prior_slowdown, count=1)
        # The time to read a prompt, relative to that extrapolated from narrow forwards.
        self.reading = Ewma(1.0)
        self.positions = Chances(_POSITIONS, _POSITION_PRIORS)
        # The passes since the draft was last used, and those after which it is tried.
        self.idle_pass_count, self.trial_interval = 0, _MIN_TRIAL_INTERVAL
        self._chances: Chances | None = None
        self._contexts: deque[Sequence[int]] = deque(maxlen=_CACHED_CONTEXTS)

    @property
    def round_trip_ns(self) -> float:
        """Returns the nanoseconds of a message to the draft and its answer, without the draft's forwards."""
        return self.round_trip.value

    @property
    def token_ns(self) -> float:
        """Returns the nanoseconds of a draft token while the target computes."""
        return self.forward.single_ns * self.ahead_slowdown.value

    def chances_of(self, source: CandidateSource) -> Chances:
        """Returns the chances of the draft's candidates, by the draft's own probability of them."""
        self._chances = self._chances or Chances(source.evidence_edges, source.prior_chances)
        return self._chances

    def forget_slowdown(self) -> None:
        """Moves the slowdowns a little towards their priors, so that one bad pass does not rule out running ahead."""
        for one in (self.slowdown, self.ahead_slowdown):
            one.value += _FORGOTTEN_SLOWDOWN * (self._prior_slowdown - one.value)

    def read_tokens(self, token_count: int) -> float:
        """Returns the time to read some tokens in one forward, in times of a 1-token forward."""
        return self.forward.widths.of(token_count) * (self.reading.value if token_count > _MAX_READ_TOKENS else 1.0)

    def reading_ns(self, token_count: int) -> float:
        """Returns the nanoseconds to read some tokens in one forward; 0 if the draft was never measured."""
        return self.forward.single_ns * self.read_tokens(token_count)

    def cached_token_count(self, ids: Sequence[int]) -> int:
        """Returns how many of the first `ids` the draft has probably cached."""
        return max((common_prefix_length(ids, one) for one in self._contexts), default=0)

    def observe_context(self, ids: Sequence[int]) -> None:
        """Records that the draft has read `ids`."""
        if ids not in self._contexts:
            self._contexts.append(ids)

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None:
        """Records the times of a proposal. `round_trip_ns` is None unless it is the first proposal of an epoch."""
        count = len(proposal.token_ids)
        read_ns = proposal.read_ns or proposal.forward_ns // count
        if round_trip_ns is not None:
            self.round_trip.observe(round_trip_ns + proposal.queue_ns, limit=_MAX_DELAY_RATIO)
        if ahead and self.forward.single_ns:
            if proposal.read_token_count <= 1:
                taken_ns = (proposal.forward_ns + proposal.queue_ns) / count
                ratio = max(taken_ns / self.forward.single_ns, 0.5)
                self.ahead_slowdown.observe(ratio, limit=_MAX_SLOWDOWN_RATIO)
            return
        if count > 1:
            self.forward.observe(1, (proposal.forward_ns - read_ns) / (count - 1))
        if proposal.read_token_count > _MAX_READ_TOKENS and self.forward.single_ns:
            self.reading.observe(read_ns / self.forward.of(proposal.read_token_count), limit=_MAX_DELAY_RATIO)
        if 0 < proposal.read_token_count <= _MAX_READ_TOKENS and (self.forward.known or proposal.read_token_count == 1):
            self.forward.observe(proposal.read_token_count, read_ns)


class _Ratio:
    """The ratio of a measured quantity to its prediction, at first 1."""

    def __init__(self) -> None:
        self._measured = self._predicted = 0.0

    @property
    def value(self) -> float:
        return max(_RATIO_PRIOR + self._measured, _MIN_RATIO * _RATIO_PRIOR) / (_RATIO_PRIOR + self._predicted)

    def observe(self, measured: float, predicted: float) -> None:
        self._measured += measured
        self._predicted += predicted

    def fade(self) -> None:
        """Reduces the weight of earlier passes, so that a source that has failed is tried again."""
        self._measured *= _RATIO_FADE
        self._predicted *= _RATIO_FADE


class Correction:
    """Corrects the prediction for candidates that are at hand by what such plans have yielded and cost so far.

    Chances are right on average over all candidates, but a plan is chosen for promising ones, whose chances are
    therefore too high on average. And a pass that begins before its candidates arrive yields one token, but costs
    only that.
    """

    def __init__(self) -> None:
        self._accepted, self._extra = _Ratio(), _Ratio()

    def applied(self, found: Prediction, plain_ns: float) -> Prediction:
        """Returns a prediction with corrected tokens and time; `plain_ns` is that of a pass without candidates."""
        tokens = 1.0 + (found.tokens - 1.0) * self._accepted.value
        return replace(found, tokens=tokens, ns=plain_ns + (found.ns - plain_ns) * self._extra.value)

    def observe(self, accepted: int, elapsed_ns: float, plan: Plan) -> None:
        """Records a pass that was made under a plan with such candidates, whose prediction was corrected.

        Its extra time may be negative, because times vary: only the average counts.
        """
        self._accepted.observe(accepted, (plan.prediction.tokens - 1.0) / self._accepted.value)
        elapsed_ns = min(elapsed_ns, _MAX_TIME_RATIO * plan.prediction.ns)
        predicted = (plan.prediction.ns / plan.plain_ns - 1.0) / self._extra.value
        self._extra.observe(elapsed_ns / plan.plain_ns - 1.0, predicted)

    def fade(self) -> None:
        """Reduces the weight of earlier passes."""
        self._accepted.fade()
        self._extra.fade()


@dataclass
class _Load:
    """Estimates of a target's costs under one level of load."""

    widths: WidthCost
    single_ns: float
    hop: Ewma = field(default_factory=lambda: Ewma(_PRIOR_HOP_NS, count=1))


class TargetEstimates:
    """Estimates of one target for all requests. Costs are kept by load, because requests share its forwards."""

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = ()) -> None:
        single_ns = float(dict(forward_costs).get(1, 0))
        self._loads = [_Load(WidthCost.measured(forward_costs), single_ns)]
        self._running = 0
        self._chances: dict[str, Chances] = {}
        # By source that takes no time.
        self.corrections: dict[str, Correction] = {}
        self.drafts: dict[str, DraftEstimates] = {}
        # The tokens of a text. As lengths vary, this is also how many are still to come at any time.
        self.text_tokens = Ewma(_PRIOR_TEXT_TOKENS, count=_PRIOR_TEXTS)
        # By source, the passes since one with its candidates; under "", those since one without candidates.
        self.idle_pass_counts: Counter[str] = Counter()

    @property
    def load(self) -> int:
        """Returns the number of running requests; at least 1."""
        return max(self._running, 1)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as running. A new level of load starts as a copy of the level below."""
        self._running += 1
        while len(self._loads) < self.load.bit_length():
            self._loads.append(deepcopy(self._loads[-1]))
        try:
            yield
        finally:
            self._running -= 1

    @property
    def costs(self) -> _Load:
        """Returns the estimates for the present level of load: 1, 2 to 3, 4 to 7 requests and so on."""
        return self._loads[self.load.bit_length() - 1]

    def chances_of(self, source: CandidateSource) -> Chances:
        """Returns the chances of candidates of a source without a model."""
        return self._chances.setdefault(source.name, Chances(source.evidence_edges, source.prior_chances))

    def observe_text(self, token_count: int) -> None:
        """Records how many tokens were generated for a text that has ended."""
        if token_count:
            self.text_tokens.observe(token_count)

    def draft(
        self, name: str, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False
    ) -> DraftEstimates:
        """Returns the estimates of the draft `name`. `competes`: draft and target need more cores than they have."""
        return self.drafts.setdefault(name, DraftEstimates(forward_costs, competes=competes))


class RequestEstimates:
    """Estimates for one request, which also updates `shared` and `draft`.

    `draft` holds the estimates of the source that takes time to propose, named `drafting_source`; None without one.
    """

    def __init__(
        self, shared: TargetEstimates, sources: Sequence[CandidateSource] = (), draft: DraftEstimates | None = None
    ) -> None:
        self.shared, self.draft = shared, draft
        self.drafting_source = next((source.name for source in sources if source.takes_time), "")
        self.chances = {
            source.name: RequestChances((draft if source.takes_time and draft else shared).chances_of(source))
            for source in sources
        }
        positions = draft.positions if draft else Chances(_POSITIONS, _POSITION_PRIORS)
        self.positions = RequestChances(positions, _HOPE)
        self.forward = ForwardTime(shared.costs.widths, shared.costs.single_ns)
        self.waiting_gain = Ewma(0.0)
        self.token_bytes = Ewma(_PRIOR_TOKEN_BYTES)
        # The passes so far, and whether the target waits for candidates before the next one.
        self.pass_count, self.target_waits = 0, False
        self._tried_draft = False

    def replace_draft(self, source: CandidateSource, draft: DraftEstimates) -> None:
        """Goes on with another draft, whose source has taken the place of the one before."""
        self.draft, self.drafting_source = draft, source.name
        self.chances[source.name] = RequestChances(draft.chances_of(source))
        self.positions = RequestChances(draft.positions, _HOPE)

    def corrected(self, source: str, found: Prediction, plain_ns: float) -> Prediction:
        """Returns a prediction for candidates of a source that takes no time; see `Correction.applied`."""
        correction = self.shared.corrections.get(source)
        return correction.applied(found, plain_ns) if correction else found

    def chances_of(self, offer: Offer, count: int) -> list[float]:
        """Returns the chance of each of an offer's first `count` candidates, if all before it are right."""
        pairs = zip(offer.sources[:count], offer.evidence[:count], strict=True)
        return [self.chances[source].of(evidence) for source, evidence in pairs]

    def is_promising(self, offer: Offer) -> bool:
        """Returns whether the source itself expects the first candidate to be right: only that is worth a trial."""
        return self.chances[offer.sources[0]].prior_of(offer.evidence[0]) >= _PROMISING

    def begin_trial(self, source: str) -> None:
        """Records that a source, or none (""), is being tried."""
        self.shared.idle_pass_counts[source] = 0

    def observe(self, outcome: Outcome, plan: Plan) -> None:
        """Records a pass that was made under a plan."""
        result, shared = outcome.result, self.shared
        self.pass_count, self.target_waits = self.pass_count + 1, plan.holds_back
        self._observe_candidates(outcome)
        used = set(outcome.tried.sources) or {""}
        for way in ("", *self.chances):
            shared.idle_pass_counts[way] = 0 if way in used else shared.idle_pass_counts[way] + 1
        if self.draft:
            for data in outcome.data:
                self.token_bytes.observe(len(data), _TOKEN_BYTES_FRESH)
            drafted = self.drafting_source in used
            self.draft.idle_pass_count = 0 if drafted else self.draft.idle_pass_count + 1
            if drafted and plan.is_trial and not self._tried_draft:
                self._tried_draft = True
                self.draft.trial_interval = min(2 * self.draft.trial_interval, _MAX_TRIAL_INTERVAL)
            elif drafted and not self._tried_draft:  # chosen for its speed, not because of a trial
                self.draft.trial_interval = _MIN_TRIAL_INTERVAL
            if not plan.runs_ahead:
                self.draft.forget_slowdown()
        if outcome.elapsed_ns is None:
            return
        self._observe_yield(plan, result.accepted_token_count, outcome.elapsed_ns)
        taken_ns = max(outcome.elapsed_ns - result.waited_ns, result.forward_ns)
        costs, width = shared.costs, result.candidate_token_count + 1
        self.forward.widths = costs.widths
        if plan.runs_ahead and self.draft and self.forward.known:
            slowdown = self.draft.slowdown
            slowdown.observe(taken_ns / self.forward.of(width), _FRESH_SLOWDOWN, _MAX_SLOWDOWN_RATIO)
            if slowdown.count > _SLOWDOWN_PASSES:  # the slowdown is known, so a change comes from the growing text
                self.forward.observe(width, taken_ns / slowdown.value)
        else:
            self.forward.observe(width, taken_ns)
        costs.single_ns = self.forward.single_ns
        self.waiting_gain.observe(plan.waiting_gain_ns, _GAIN_FRESH)
        if result.waited_ns >= _MIN_WAITED_NS and not plan.pace.lead:
            waited_ns = 2 * result.waited_ns if outcome.timed_out else result.waited_ns
            costs.hop.observe(waited_ns, limit=_MAX_DELAY_RATIO)

    def _observe_yield(self, plan: Plan, accepted: int, elapsed_ns: int) -> None:
        corrections = self.shared.corrections
        for one in corrections.values():
            one.fade()
        if plan.source and plan.name == plan.source and plan.plain_ns:
            corrections.setdefault(plan.source, Correction()).observe(accepted, elapsed_ns, plan)

    def _observe_candidates(self, outcome: Outcome) -> None:
        accepted, tried = outcome.result.accepted_token_count, outcome.tried
        verified = [
            (source, evidence, float(place < accepted))
            for place, (source, evidence) in enumerate(zip(tried.sources, tried.evidence, strict=True))
            if place <= accepted
        ]
        for name, chances in self.chances.items():
            chances.observe([(evidence, right) for source, evidence, right in verified if source == name])
        if self.draft:
            drafted = self.drafting_source
            self.positions.observe(
                [(place + 1, right) for place, (source, _, right) in enumerate(verified) if source == drafted]
            )
