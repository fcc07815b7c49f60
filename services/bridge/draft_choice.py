"""Chooses the draft of a request that names none: learns the gain of each draft from requests, and explores a little.

Gains are relative: tokens per time of a plain pass, so that the target alone has about 1, whatever the load. Times
measured under different loads are comparable so, and one factor turns a gain into bytes per second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import NamedTuple

from cachetools import LRUCache

from bridge.measuring.costs import MAX_WIDTH, PRIOR_CANDIDATE_DELAY_NS, PRIOR_ROUND_TRIP_NS, PRIOR_SLOWDOWN, WidthCost
from bridge.planning.prediction import DraftCosts, TargetCosts, ahead, in_turns
from bridge.statistics import DraftChoice

# The factor by which each request reduces the weight of earlier ones of its record.
FADE = 0.98
# The weight of the times that the models report, and the most that other kinds of text can have, in requests.
_PRIOR_REQUESTS, _MAX_OTHER_REQUESTS = 0.5, 3.0
# The assumed standard deviation of a request's gain.
_DEVIATION = 0.3
# Every draft is tried this often, in at most one of `_FIRST_EVERY` requests; then one of
# `_LATER_EVERY` requests goes to the draft whose gain is least certain, if it may still be the best.
_FIRST_TRIES, _FIRST_EVERY, _LATER_EVERY = 2.0, 3, 20
# Pairs and kinds of text that are remembered; those that were used least recently are forgotten.
_MAX_RECORDS = 4096
# The assumed chance that a draft's token is right, until that is measured.
_PRIOR_CHANCE = 0.65
_LEADS = (1, 2, 3, 4, 5, 6, 8)


class RecordKey(NamedTuple):
    """A target, a draft and a kind of text. Models are identified by more than their names: see `Candidate.key`."""

    target: str
    draft: str
    workload: str


@dataclass
class PairRecord:
    """What requests of one kind have shown about a pair. All counts fade: older requests count less.

    `pass_count`, `token_count`, `plain_passes`: see `DraftPasses`.
    """

    request_count: float = 0.0
    token_count: float = 0.0
    plain_passes: float = 0.0
    pass_count: float = 0.0
    candidate_count: float = 0.0
    accepted_count: float = 0.0
    accepted_byte_count: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_count / self.candidate_count if self.candidate_count else 0.0

    @property
    def accepted_bytes_per_pass(self) -> float:
        return self.accepted_byte_count / self.pass_count if self.pass_count else 0.0

    def add(self, other: "PairRecord") -> None:
        """Adds a request."""
        for name, value in asdict(other).items():
            setattr(self, name, FADE * getattr(self, name) + value)


@dataclass(frozen=True)
class Candidate:
    """A draft that a request may use. `key` identifies its model, revision and engine; `prior_gain` is predicted."""

    name: str
    key: str
    prior_gain: float = 1.0


@dataclass(frozen=True)
class Expectation:
    """The expected gain of a pair, and the number of requests of that kind that it rests on."""

    gain: float
    request_count: float

    @property
    def optimistic_gain(self) -> float:
        """Returns a gain that the pair hardly exceeds."""
        return self.gain + 2.0 * _DEVIATION / sqrt(self.request_count + _PRIOR_REQUESTS)


class DraftChooser:
    """Knows the gains of all pairs. `on_update` receives what each request adds to a record."""

    def __init__(self, on_update: Callable[[RecordKey, PairRecord], None] = lambda key, record: None) -> None:
        self._records: LRUCache[RecordKey, PairRecord] = LRUCache(_MAX_RECORDS)
        # The requests that each draft was chosen for.
        self._tried: LRUCache[RecordKey, int] = LRUCache(_MAX_RECORDS)
        self._on_update = on_update

    def restore(self, records: Mapping[RecordKey, PairRecord]) -> None:
        """Takes over what an earlier process has learned."""
        self._records.update(records)

    def record(self, target: str, draft: str, workload: str) -> PairRecord:
        """Returns what is known about a pair and a kind of text."""
        return self._records.get(RecordKey(target, draft, workload)) or PairRecord()

    def expect(self, target: str, draft: Candidate, workload: str) -> Expectation:
        """Returns the expected gain: that of this kind of text, of others as far as it is little known, and the prior.

        Records with an empty workload are of all requests, whatever their kind.
        """
        own, all_ = self.record(target, draft.key, workload), self.record(target, draft.key, "")
        weighted = [(own, own.request_count)]
        if workload:
            weighted.append((all_, min(all_.request_count, _MAX_OTHER_REQUESTS)))
        weight_sum, gains = _PRIOR_REQUESTS, _PRIOR_REQUESTS * draft.prior_gain
        for record, weight in weighted:
            if record.plain_passes:
                weight_sum, gains = weight_sum + weight, gains + weight * record.token_count / record.plain_passes
        return Expectation(gains / weight_sum, own.request_count)

    def choose(
        self, target: str, drafts: Sequence[Candidate], workload: str, plain_bytes_per_second: float, *, explore: bool
    ) -> tuple[Candidate, DraftChoice]:
        """Returns the draft for a request; `drafts` must not be empty. Among equals, the first one wins."""
        expected = {draft: self.expect(target, draft, workload) for draft in drafts}
        ranked = sorted(drafts, key=lambda draft: -expected[draft].gain)
        chosen = ranked[0]
        if explore:
            count = sum(self._tried.get(RecordKey(target, one.key, workload), 0) for one in drafts)
            chosen = self._to_explore(target, ranked, expected, workload, count) or chosen
            key = RecordKey(target, chosen.key, workload)
            self._tried[key] = self._tried.get(key, 0) + 1
        second = next((draft for draft in ranked if draft is not chosen), None)
        second_gain = expected[second].gain if second else 1.0
        if second_gain <= 1.0:
            second, second_gain = None, 1.0
        return chosen, DraftChoice(
            draft=chosen.name,
            bytes_per_second=expected[chosen].gain * plain_bytes_per_second,
            second_best=second.name if second else "",
            second_best_bytes_per_second=second_gain * plain_bytes_per_second,
            explores=chosen is not ranked[0],
            request_count=expected[chosen].request_count,
        )

    def _to_explore(
        self,
        target: str,
        ranked: Sequence[Candidate],
        expected: Mapping[Candidate, Expectation],
        workload: str,
        count: int,
    ) -> Candidate | None:
        """Returns the draft to try with this request, or None."""

        def tries(draft: Candidate) -> float:
            # Requests that are still running count, too.
            tried = self._tried.get(RecordKey(target, draft.key, workload), 0)
            return max(expected[draft].request_count, float(tried))

        best = expected[ranked[0]].gain
        open_ = [draft for draft in ranked[1:] if expected[draft].optimistic_gain > best]
        # Whatever the reported times promise: a draft without times, such as prompt lookup, may be the best one.
        fresh = [draft for draft in ranked[1:] if tries(draft) < _FIRST_TRIES]
        # The first request of all goes to the draft that is expected to be the best.
        if fresh and count % _FIRST_EVERY == 1:
            return min(fresh, key=tries)
        if open_ and count % _LATER_EVERY == _LATER_EVERY - 1:
            return max(open_, key=lambda draft: expected[draft].optimistic_gain)
        return None

    def observe(self, target: str, draft: str, workload: str, request: PairRecord) -> None:
        """Records a request that used a draft, given its `key`."""
        for kind in dict.fromkeys(("", workload)):
            key = RecordKey(target, draft, kind)
            record = self._records.setdefault(key, PairRecord())
            record.add(request)
            self._on_update(key, request)


def predicted_gain(
    target_costs: Sequence[tuple[int, int]], draft_costs: Sequence[tuple[int, int]], *, competes: bool
) -> float:
    """Predicts the speed of a pair over that of the target alone; at least 1, because the bridge may use no draft.

    Costs are pairs of a number of tokens and nanoseconds, as servers report them; without them the result is 1.
    """
    single_ns, draft_ns = dict(target_costs).get(1, 0), dict(draft_costs).get(1, 0)
    if not single_ns or not draft_ns:
        return 1.0
    costs = TargetCosts(single_ns, WidthCost.measured(target_costs).table, PRIOR_CANDIDATE_DELAY_NS)
    slowdown = PRIOR_SLOWDOWN if competes else 1.0
    draft = DraftCosts(
        token_ns=draft_ns,
        ahead_ns=draft_ns * slowdown,
        read_ns=draft_ns * WidthCost.measured(draft_costs).of(3),
        prompt_ns=0.0,
        round_trip_ns=PRIOR_ROUND_TRIP_NS,
        slowdown=slowdown,
        target_tokens=1.0,
        survival=tuple(accumulate([_PRIOR_CHANCE] * (MAX_WIDTH - 1), mul)),
    )
    ways = [*(in_turns(costs, draft, lead) for lead in _LEADS), ahead(costs, draft, max(_LEADS))]
    return max(1.0, *(way.tokens_per_ns * single_ns for way in ways))
