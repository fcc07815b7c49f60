"""What the bridge has learned about a target and its drafts, from what passes took and what they accepted.

`TargetEstimates` and `DraftEstimates` are shared by all requests, `RequestEstimates` starts from them. Asking changes
nothing; only the `observe` methods do. A wrong estimate costs time, never text.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

from bridge.planning.chances import Chances, RequestChances
from bridge.planning.costs import Ewma, ForwardTime, WidthCost
from bridge.planning.prediction import Plan
from bridge.ports import Proposal
from bridge.sources.source import CandidateSource, Outcome

# Nanoseconds from a pass to the candidates for the next one, where the bridge has them at hand, until that is measured.
_PRIOR_HOP_NS = 600_000.0
# Nanoseconds of a message to the draft and its answer, until that is measured.
_PRIOR_ROUND_TRIP_NS = 1_000_000.0
# Bytes of a target's token, until some were seen, and how much a new one counts.
_PRIOR_TOKEN_BYTES, _TOKEN_BYTES_FRESH = 4.0, 0.02
# Passes of a target that waits at least this long for candidates say how long they take to come.
_MIN_WAITED_NS = 20_000
# A draft that reads more tokens than this reads a prompt, which says nothing about its turns.
_MAX_READ_TOKENS = 64
# How many times as long a forward takes while another model computes on the same cores, until that is measured. On two
# cores it was 3 to 9 times; trying it costs seconds.
_PRIOR_SLOWDOWN = 4.0
# How often the draft's candidates are right by their position in a forward: groups of positions, and what is assumed
# until that is known. It is more than most drafts reach, because a draft that is never tried is never known better.
_POSITIONS = (2, 3, 4, 5, 7, 9, 13)
_POSITION_PRIORS = (0.75, 0.8, 0.8, 0.8, 0.85, 0.85, 0.85, 0.85)
# Right candidates of the draft that each request imagines at its beginning, for the same reason.
_HOPE = 4.0
# Passes beside a draft that runs ahead after which it is known how much it slows the target down, and how much each
# further pass counts.
_SLOWDOWN_PASSES, _FRESH_SLOWDOWN = 8, 0.02
# How much of it is forgotten in each pass without such a draft.
_FORGOTTEN_SLOWDOWN = 0.002
# Accepted candidates that are assumed to have been predicted rightly, and what is left of a pass's weight after the
# next pass of whatever plan.
_YIELD_PRIOR_TOKENS, _YIELD_FADE = 6.0, 0.99
# How much the newest pass counts in what waiting for candidates has gained lately.
_GAIN_FRESH = 0.2


class DraftEstimates:
    """What is known of one draft beside one target. Implements `bridge.sources.draft.DraftTimes`.

    `slowdown`: how many times as long a pass takes while the draft computes; `ahead_ns`: nanoseconds of a draft's
    token while the target computes. Both are what one device costs the other, and are learned when it is tried.
    """

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False) -> None:
        single_ns = dict(forward_costs).get(1, 0)
        self.forward = ForwardTime(WidthCost.measured(forward_costs), float(single_ns))
        self.round_trip = Ewma(_PRIOR_ROUND_TRIP_NS)
        self._prior_slowdown = _PRIOR_SLOWDOWN if competes else 1.0
        self.slowdown = Ewma(self._prior_slowdown, count=1)
        self.ahead_slowdown = Ewma(self._prior_slowdown, count=1)
        self.positions = Chances(_POSITIONS, _POSITION_PRIORS)
        self.idle_pass_count = 0
        self._chances: Chances | None = None

    @property
    def round_trip_ns(self) -> float:
        """Of a message to the draft and its answer."""
        return self.round_trip.value

    @property
    def token_ns(self) -> float:
        """Of one of its tokens while it has run for a while beside the target."""
        return self.forward.single_ns * self.ahead_slowdown.value

    def chances_of(self, source: CandidateSource) -> Chances:
        """How often its candidates are right, by its own probability of them."""
        self._chances = self._chances or Chances(source.evidence_edges, source.prior_chances)
        return self._chances

    def forget_slowdown(self) -> None:
        """Returns a little to what was assumed, so that one bad pass does not rule out a draft that runs ahead."""
        for one in (self.slowdown, self.ahead_slowdown):
            one.value += _FORGOTTEN_SLOWDOWN * (self._prior_slowdown - one.value)

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None:
        """Takes note of the times of a proposal; `round_trip_ns` is known of the first one of an epoch."""
        count = len(proposal.token_ids)
        read_ns = proposal.read_ns or proposal.forward_ns // count
        if round_trip_ns is not None:
            self.round_trip.observe(round_trip_ns + proposal.queue_ns)
        if ahead and self.forward.single_ns:
            if proposal.read_token_count <= 1:
                taken_ns = (proposal.forward_ns + proposal.queue_ns) / count
                self.ahead_slowdown.observe(max(taken_ns / self.forward.single_ns, 0.5))
            return
        if count > 1:
            self.forward.observe(1, (proposal.forward_ns - read_ns) / (count - 1))
        if 0 < proposal.read_token_count <= _MAX_READ_TOKENS and (self.forward.known or proposal.read_token_count == 1):
            self.forward.observe(proposal.read_token_count, read_ns)


class Yield:
    """How many candidates at hand of one source are accepted, relative to what was predicted.

    Chances are right on average over all candidates; those that a plan was chosen for are the promising ones, and some
    come too late for their pass.
    """

    def __init__(self) -> None:
        self._accepted = self._predicted = 0.0

    @property
    def ratio(self) -> float:
        """The factor by which a prediction is to be multiplied."""
        return (_YIELD_PRIOR_TOKENS + self._accepted) / (_YIELD_PRIOR_TOKENS + self._predicted)

    def observe(self, accepted: int, predicted: float) -> None:
        """Takes note of a pass; `predicted`: the accepted candidates that were predicted before multiplying."""
        self._accepted += accepted
        self._predicted += predicted

    def fade(self) -> None:
        """Makes what was observed before this pass count less, so that a way that has failed is tried again."""
        self._accepted *= _YIELD_FADE
        self._predicted *= _YIELD_FADE


@dataclass
class _Load:
    """What is known of a target while so many requests run."""

    widths: WidthCost
    single_ns: float
    hop: Ewma = field(default_factory=lambda: Ewma(_PRIOR_HOP_NS))


class TargetEstimates:
    """What is known of one target, for all requests; costs are kept by load, because requests share its forwards."""

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = ()) -> None:
        single_ns = float(dict(forward_costs).get(1, 0))
        self._loads = [_Load(WidthCost.measured(forward_costs), single_ns)]
        self._running = 0
        self._chances: dict[str, Chances] = {}
        self.yields: dict[str, Yield] = {}
        self.drafts: dict[str, DraftEstimates] = {}
        # Passes since one without candidates, by the key "", and since one with a source's candidates, by its name.
        self.idle_pass_counts: dict[str, int] = defaultdict(int)

    @property
    def load(self) -> int:
        """Requests that run now; at least 1."""
        return max(self._running, 1)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as running. A new level of load starts with what the one below knows."""
        self._running += 1
        while len(self._loads) < self.load.bit_length():
            self._loads.append(deepcopy(self._loads[-1]))
        try:
            yield
        finally:
            self._running -= 1

    @property
    def costs(self) -> _Load:
        """What is known under the load of 1, 2 to 3, 4 to 7 requests and so on."""
        return self._loads[self.load.bit_length() - 1]

    def chances_of(self, source: CandidateSource) -> Chances:
        """How often candidates of a source without a model are right."""
        return self._chances.setdefault(source.name, Chances(source.evidence_edges, source.prior_chances))

    def draft(
        self, name: str, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False
    ) -> DraftEstimates:
        """What is known of a draft, by name. `competes`: it computes on the same cores as the target."""
        if name not in self.drafts:
            self.drafts[name] = DraftEstimates(forward_costs, competes=competes)
        return self.drafts[name]


class RequestEstimates:
    """What is known for one request; it passes on to `shared` and `draft` what it learns.

    `draft`: estimates of the source that takes time to propose, whose name is `drafting_source`; None without one.
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
        # Passes seen, and whether the target waits for candidates before the next one.
        self.pass_count, self.target_waits = 0, False

    def yield_ratio(self, source: str) -> float:
        """Returns how many candidates at hand of a source are accepted, relative to what was predicted."""
        return self.shared.yields[source].ratio if source in self.shared.yields else 1.0

    def observe(self, outcome: Outcome, plan: Plan) -> None:
        """Takes note of a pass that was made under a plan."""
        result, shared = outcome.result, self.shared
        self.pass_count, self.target_waits = self.pass_count + 1, plan.holds_back
        for data in outcome.data:
            self.token_bytes.observe(len(data), _TOKEN_BYTES_FRESH)
        self._observe_candidates(outcome)
        used = set(outcome.tried.sources) or {""}
        for way in ("", *self.chances):
            shared.idle_pass_counts[way] = 0 if way in used else shared.idle_pass_counts[way] + 1
        if self.draft:
            drafted = self.drafting_source in used
            self.draft.idle_pass_count = 0 if drafted else self.draft.idle_pass_count + 1
            if not plan.runs_ahead:
                self.draft.forget_slowdown()
        if outcome.elapsed_ns is None:
            return
        self._observe_yield(plan, result.accepted_token_count)
        taken_ns = max(outcome.elapsed_ns - result.waited_ns, result.forward_ns)
        costs, width = shared.costs, result.candidate_token_count + 1
        self.forward.widths = costs.widths
        if plan.runs_ahead and self.draft and self.forward.known:
            slowdown = self.draft.slowdown
            slowdown.observe(taken_ns / self.forward.of(width), _FRESH_SLOWDOWN)
            if slowdown.count > _SLOWDOWN_PASSES:  # it is known: what changes now is the text, which grows
                self.forward.observe(width, taken_ns / slowdown.value)
        else:
            self.forward.observe(width, taken_ns)
        costs.single_ns = self.forward.single_ns
        self.waiting_gain.observe(plan.waiting_gain_ns, _GAIN_FRESH)
        if result.waited_ns >= _MIN_WAITED_NS and not plan.pace.lead:
            costs.hop.observe(2 * result.waited_ns if outcome.timed_out else result.waited_ns)

    def _observe_yield(self, plan: Plan, accepted: int) -> None:
        ratio, yields = self.yield_ratio(plan.source), self.shared.yields
        for one in yields.values():
            one.fade()
        if plan.source and plan.name == plan.source:
            yields.setdefault(plan.source, Yield()).observe(accepted, (plan.prediction.tokens - 1.0) / ratio)

    def _observe_candidates(self, outcome: Outcome) -> None:
        for chances in (*self.chances.values(), self.positions):
            chances.fade()
        accepted, tried = outcome.result.accepted_token_count, outcome.tried
        for place, (source, evidence) in enumerate(zip(tried.sources, tried.evidence, strict=True)):
            if place > accepted:
                break
            right = float(place < accepted)
            self.chances[source].observe(evidence, right)
            if source == self.drafting_source:
                self.positions.observe(place + 1, right)
