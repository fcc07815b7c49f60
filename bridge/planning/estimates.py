"""Estimates the costs and acceptance of a target, and of one request, from measured times and accepted candidates.

All requests share `TargetEstimates` and `DraftEstimates`; `RequestEstimates` starts from them. To read an estimate
changes none. A wrong estimate costs time but never changes text.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice

from cachetools import LRUCache

from bridge.measuring.chances import Chances, RequestChances
from bridge.measuring.costs import MAX_DELAY_RATIO, PRIOR_CANDIDATE_DELAY_NS, Ewma, ForwardTime, WidthCost
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.prediction import Plan, Prediction
from bridge.sources.source import DRAFT, CandidateSource, Offer, Outcome
from bridge.text.common_prefix import common_prefix_length

# Average bytes of a target token until some were seen, and the weight of each new token.
_PRIOR_TOKEN_BYTES, _TOKEN_BYTES_FRESH = 4.0, 0.02
# The delay of candidates is measured only in passes that waited at least this long for candidates.
_MIN_WAITED_NS = 20_000
# The tokens that a text is assumed to have until some have ended, and the weight of that, in texts. Most texts end long
# before their request's limit.
_PRIOR_TEXT_TOKENS, _PRIOR_TEXTS = 200.0, 2
# The right candidates of the draft that each request imagines at its start, because a draft that is never tried is
# never measured.
_IMAGINED_RIGHT = 4.0
# The weight of the prior ratio of 1, in accepted candidates or in passes without candidates, and the factor by which
# each further pass of any plan reduces the weight of earlier ones.
_RATIO_PRIOR, _RATIO_FADE = 6.0, 0.99
# The least measured part of that prior, whatever was measured later.
_MIN_RATIO = 0.1
# A pass counts as at most this multiple of its predicted time: the machine may have stalled.
_MAX_TIME_RATIO = 3.0
# The drafts that are remembered: one may come back under ever new names.
_MAX_DRAFTS = 256
# The weight of the newest pass in the average gain from waiting for candidates.
_GAIN_FRESH = 0.2


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

    Chances are right on average over all candidates, but a plan is chosen for likely ones, whose chances are
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
    candidate_delay: Ewma = field(default_factory=lambda: Ewma(PRIOR_CANDIDATE_DELAY_NS, count=1))


class TargetEstimates:
    """Estimates of one target for all requests. Costs are kept by load, because requests share its forwards."""

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = ()) -> None:
        single_ns = float(dict(forward_costs).get(1, 0))
        self._loads = [_Load(WidthCost.measured(forward_costs), single_ns)]
        self._running = 0
        # By source that proposes at once.
        self.chances: dict[str, Chances] = {}
        self.corrections: dict[str, Correction] = {}
        self.drafts: LRUCache[tuple[str, bool], DraftEstimates] = LRUCache(_MAX_DRAFTS)
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

    def observe_text(self, token_count: int) -> None:
        """Records how many tokens were generated for a text that has ended."""
        if token_count:
            self.text_tokens.observe(token_count)

    def draft(
        self, key: str, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False
    ) -> DraftEstimates:
        """Returns the estimates of a draft, whose `key` stands for its model, engine and data type.

        `competes`: draft and target need more cores than they have. Replicas may differ in this, so each case has its
        own estimates.
        """
        if (key, competes) not in self.drafts:
            self.drafts[key, competes] = DraftEstimates(forward_costs, competes=competes)
        return self.drafts[key, competes]

    def forget_draft(self, key: str) -> None:
        """Forgets a draft, which has another speed than before."""
        for competes in (False, True):
            self.drafts.pop((key, competes), None)


class RequestEstimates:
    """Estimates for one request, which also updates `shared` and those of its `draft`.

    `sources`: those that propose at once.
    """

    draft: DraftEstimates | None = None
    positions: RequestChances

    def __init__(self, shared: TargetEstimates, sources: Sequence[CandidateSource] = ()) -> None:
        self.shared = shared
        self.chances: dict[str, RequestChances] = {}
        for one in sources:
            known = shared.chances.setdefault(one.name, Chances(one.evidence_edges, one.prior_chances))
            self.chances[one.name] = RequestChances(known)
        self.forward = ForwardTime(shared.costs.widths, shared.costs.single_ns)
        self.waiting_gain = Ewma(0.0)
        self.token_bytes = Ewma(_PRIOR_TOKEN_BYTES)
        # The passes so far, and whether the target waits for candidates before the next one.
        self.pass_count, self.target_waits = 0, False
        # The time that the intervals between passes were shorter than their forwards.
        self._lacking_ns = 0.0
        # Whether the pass before accepted a branch: its token is not in the target's cache, so the next one runs it.
        self._runs_branch_again = False
        # The passes since the present draft joined, and whether one of them was a trial of it.
        self.draft_pass_count, self._tried_draft = 0, False

    def use_target(self, shared: TargetEstimates) -> None:
        """Goes on with the estimates of another replica, if it is one. Chances are those of the model: they stay."""
        if shared is not self.shared:
            self.shared = shared
            self.forward = ForwardTime(shared.costs.widths, shared.costs.single_ns)

    def use_draft(self, draft: DraftEstimates) -> None:
        """Goes on with a draft, perhaps in place of another one."""
        self.draft, self.draft_pass_count, self._tried_draft = draft, 0, False
        self.chances[DRAFT] = RequestChances(draft.chances)
        self.positions = RequestChances(draft.positions, _IMAGINED_RIGHT)

    def corrected(self, source: str, found: Prediction, plain_ns: float) -> Prediction:
        """Returns a prediction for candidates of a source that proposes at once; see `Correction.applied`."""
        correction = self.shared.corrections.get(source)
        return correction.applied(found, plain_ns) if correction else found

    def chances_of(self, offer: Offer, count: int) -> list[float]:
        """Returns the chance of each of an offer's first `count` candidates, if all before it are right."""
        return list(islice(self.each_chance(offer), count))

    def each_chance(self, offer: Offer) -> Iterator[float]:
        """Yields the chance of each of an offer's candidates, if all before it are right."""
        for source, evidence in zip(offer.sources, offer.evidence, strict=True):
            yield self.chances[source].of(evidence)

    def observe_trial(self, source: str) -> None:
        """Records that a trial of a source was planned, if its pass will be reported only later."""
        self.shared.idle_pass_counts[source] = 0

    def observe(self, outcome: Outcome, plan: Plan, offers: Sequence[Offer] = ()) -> None:
        """Records a pass that was made under a plan, and all that the sources offered for it."""
        result, shared = outcome.result, self.shared
        width = result.width + self._runs_branch_again
        self._runs_branch_again = result.branch_accepted
        self.pass_count, self.target_waits = self.pass_count + 1, plan.holds_back
        self._observe_candidates(outcome, plan, offers)
        used = set(outcome.tried.sources) or {""}
        if self.chances:  # plain passes of requests without sources do not show what candidates cost
            for way in ("", *self.chances):
                shared.idle_pass_counts[way] = 0 if way in used else shared.idle_pass_counts[way] + 1
        if self.draft:
            self.draft_pass_count += 1
            for data in outcome.data:
                self.token_bytes.observe(len(data), _TOKEN_BYTES_FRESH)
            drafted = DRAFT in used
            self.draft.idle_pass_count = 0 if drafted else self.draft.idle_pass_count + 1
            if drafted and not self._tried_draft:
                self._tried_draft = plan.is_trial
                self.draft.observe_choice(is_trial=plan.is_trial)
            if not plan.runs_ahead:
                self.draft.forget_slowdown()
        if outcome.elapsed_ns is not None:
            self._observe_yield(plan, outcome, outcome.elapsed_ns)
            self._observe_costs(plan, outcome, outcome.elapsed_ns, width)

    def _observe_costs(self, plan: Plan, outcome: Outcome, elapsed_ns: int, width: int) -> None:
        result, costs = outcome.result, self.shared.costs
        # Passes may arrive in bunches: what a short interval lacks, the long one before it had too much.
        interval_ns = elapsed_ns - result.waited_ns - self._lacking_ns
        taken_ns = max(interval_ns, result.forward_ns)
        self._lacking_ns = min(taken_ns - interval_ns, taken_ns)
        self.forward.widths = costs.widths
        if self.chances:  # only where candidates are chosen does a cost that is too high keep anything from being tried
            costs.widths.forget(width)
        draft = self.draft if plan.runs_ahead else None
        # Beside a draft on the same cores, a pass measures the slowdown only, if the time of one alone is known. Beside
        # a draft elsewhere, the first passes do; a later change comes from the growing text.
        if draft and (draft.competes or (self.forward.known and not draft.slowdown_is_known)):
            if self.forward.single_ns:
                draft.observe_slowdown(taken_ns / self.forward.of(width))
        else:
            self.forward.observe(width, taken_ns / draft.slowdown.value if draft else taken_ns)
        if self.forward.known:
            costs.single_ns = self.forward.single_ns
        self.waiting_gain.observe(plan.waiting_gain_ns, _GAIN_FRESH)
        if result.waited_ns >= _MIN_WAITED_NS and not plan.pace.lead:
            waited_ns = 2 * result.waited_ns if outcome.timed_out else result.waited_ns
            costs.candidate_delay.observe(waited_ns, limit=MAX_DELAY_RATIO)

    def _observe_yield(self, plan: Plan, outcome: Outcome, elapsed_ns: int) -> None:
        corrections = self.shared.corrections
        for one in corrections.values():
            one.fade()
        # A plan is named after the first source of its offer. A pass under it may have another source's offer instead.
        own = outcome.tried.sources[:1] in ((), (plan.source,))
        if own and plan.source and plan.name == plan.source and plan.plain_ns:
            correction = corrections.setdefault(plan.source, Correction())
            correction.observe(outcome.result.accepted_token_count, elapsed_ns, plan)

    def _observe_candidates(self, outcome: Outcome, plan: Plan, offers: Sequence[Offer]) -> None:
        result, tried = outcome.result, outcome.tried
        verified = _verified(tried, result.accepted_token_count, len(tried.token_ids))
        drafted = _drafted(verified)
        for offer in offers:
            # What a source proposes at once, or a draft in its turn, shows its chances even if it was not worth
            # verifying. Otherwise a draft that is right only where it is sure would seem to be right always.
            known = plan.pace.turns or DRAFT not in offer.sources
            if known and not set(tried.sources).intersection(offer.sources):
                agreed = common_prefix_length(offer.token_ids, result.token_ids)
                judged = _verified(offer, agreed, len(result.token_ids))
                drafted += _drafted(judged)
                verified += judged
        for name, chances in self.chances.items():
            chances.observe([(evidence, right) for source, evidence, right in verified if source == name])
        if self.draft:
            self.positions.observe(drafted)
            for branch in tried.branches:
                if branch.index <= min(result.accepted_token_count, len(result.token_ids) - 1):
                    right = result.token_ids[branch.index] == branch.token_id
                    self.draft.branches.observe(branch.evidence, float(right))
            answered = result.waited_ns >= _MIN_WAITED_NS and not outcome.timed_out
            if plan.pace.turns and not tried.token_ids and not drafted and answered:
                # The draft had nothing to propose, which is worth no more than a wrong token.
                self.positions.observe([(1, 0.0)])


def _verified(offer: Offer, right_count: int, known_count: int) -> list[tuple[str, float, float]]:
    """Returns the source and evidence of each candidate up to the first wrong one, and 1 if it was right, else 0.

    Whether the candidates after the first `known_count` were right is not known.
    """
    end = min(right_count + 1, known_count)
    pairs = zip(offer.sources[:end], offer.evidence[:end], strict=True)
    return [(source, evidence, float(place < right_count)) for place, (source, evidence) in enumerate(pairs)]


def _drafted(verified: Sequence[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Returns the positions of a draft's candidates among verified ones, from 1 on, and whether each was right."""
    return [(place, right) for place, (source, _, right) in enumerate(verified, start=1) if source == DRAFT]
