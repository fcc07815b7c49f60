"""Estimates the costs and acceptance of a draft, from measured times and accepted candidates."""

from array import array
from collections import deque
from collections.abc import Sequence

from bridge.measuring.chances import Chances
from bridge.measuring.costs import MAX_DELAY_RATIO, PRIOR_ROUND_TRIP_NS, PRIOR_SLOWDOWN, Ewma, ForwardTime, WidthCost
from bridge.ports import Proposal
from bridge.text.common_prefix import common_prefix_length

# A slowdown counts as at most this multiple of the average.
_MAX_SLOWDOWN_RATIO = 3.0
# A draft that reads more tokens than this reads a prompt, which does not measure its turns.
_MAX_READ_TOKENS = 64
# The number of contexts that a draft has read lately and is assumed to hold in its cache.
_CACHED_CONTEXTS = 4
# Groups of a draft candidate's position in a forward, and the assumed chance that it is right. The priors are higher
# than most drafts reach, because a draft that is never tried is never measured.
_POSITIONS = (2, 3, 4, 5, 7, 9, 13)
_POSITION_PRIORS = (0.75, 0.8, 0.8, 0.8, 0.85, 0.85, 0.85, 0.85)
# The assumed chance, for each of these groups, that a turn goes on; and if all its candidates so far were right.
_GOES_ON_PRIORS = (0.85, 0.8, 0.8, 0.75, 0.7, 0.7, 0.7, 0.7)
_GOES_ON_IF_RIGHT_PRIORS = (0.98, 0.96, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Groups of the probability that the draft reports for a candidate, and the assumed chance that it is right.
_CONFIDENCES = (0.3, 0.5, 0.7, 0.9, 0.97)
_CONFIDENCE_PRIORS = (0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
# The same for branches, of which most are wrong because the candidate is right.
_BRANCH_CONFIDENCES = (0.03, 0.07, 0.15, 0.25, 0.35)
_BRANCH_PRIORS = (0.02, 0.06, 0.1, 0.15, 0.2, 0.25)
# The passes with a draft that runs ahead after which its slowdown of the target counts as known, and the weight of
# each further pass.
_SLOWDOWN_PASSES, _FRESH_SLOWDOWN = 8, 0.02
# The weight of the assumed slowdown in each pass without such a draft.
_FORGOTTEN_SLOWDOWN = 0.002
# The passes for each running request after which an unused draft is tried, because what is never tried is never
# measured. Each trial after which the planner still has no use for the draft doubles the interval.
_MIN_TRIAL_INTERVAL, _MAX_TRIAL_INTERVAL = 500, 8000


class DraftEstimates:
    """Estimates the costs and acceptance of one draft for one target.

    `slowdown` is the factor by which a target pass is slower while the draft computes, `ahead_slowdown` the factor by
    which a draft token is slower while the target computes. Both are learned when the draft runs ahead. `competes`:
    draft and target need more cores than they have.
    """

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = (), *, competes: bool = False) -> None:
        single_ns = dict(forward_costs).get(1, 0)
        self.forward = ForwardTime(WidthCost.measured(forward_costs), float(single_ns))
        # The nanoseconds of a message to the draft and its answer, without the draft's forwards.
        self.round_trip = Ewma(PRIOR_ROUND_TRIP_NS, count=1)
        self.competes, self._prior_slowdown = competes, PRIOR_SLOWDOWN if competes else 1.0
        self.slowdown = Ewma(self._prior_slowdown, count=1)
        self.ahead_slowdown = Ewma(self._prior_slowdown, count=1)
        # The time to read a prompt, relative to that extrapolated from narrow forwards.
        self.reading = Ewma(1.0)
        self.positions = Chances(_POSITIONS, _POSITION_PRIORS)
        self.chances = Chances(_CONFIDENCES, _CONFIDENCE_PRIORS)
        self.branches = Chances(_BRANCH_CONFIDENCES, _BRANCH_PRIORS)
        # The chance that a turn that the draft may end early goes on: by the position of a draft token, and by the
        # position of a candidate if it and all before it were right.
        self.goes_on = Chances(_POSITIONS, _GOES_ON_PRIORS)
        self.goes_on_if_right = Chances(_POSITIONS, _GOES_ON_IF_RIGHT_PRIORS)
        # The passes since the draft was last used, and those after which it is tried.
        self.idle_pass_count, self.trial_interval = 0, _MIN_TRIAL_INTERVAL
        # A ninth of the memory that a list needs.
        self._contexts: deque[array[int]] = deque(maxlen=_CACHED_CONTEXTS)

    @property
    def token_ns(self) -> float:
        """Returns the nanoseconds of a draft token while the target computes."""
        return self.forward.single_ns * self.ahead_slowdown.value

    @property
    def slowdown_is_known(self) -> bool:
        """Returns whether enough passes were seen while the draft ran ahead."""
        return self.slowdown.count > _SLOWDOWN_PASSES

    def observe_slowdown(self, ratio: float) -> None:
        """Records a pass of the target while the draft computes: its time relative to that of such a pass alone."""
        self.slowdown.observe(ratio, _FRESH_SLOWDOWN, _MAX_SLOWDOWN_RATIO)

    def forget_slowdown(self) -> None:
        """Moves the slowdowns a little towards their priors, so that one bad pass does not rule out running ahead."""
        for one in (self.slowdown, self.ahead_slowdown):
            one.value += _FORGOTTEN_SLOWDOWN * (self._prior_slowdown - one.value)

    def observe_choice(self, *, is_trial: bool) -> None:
        """Records that the draft was used: for its speed, or as a trial, after which the next trial comes later."""
        self.trial_interval = min(2 * self.trial_interval, _MAX_TRIAL_INTERVAL) if is_trial else _MIN_TRIAL_INTERVAL

    def read_tokens(self, token_count: int) -> float:
        """Returns the time to read some tokens in one forward, in times of a 1-token forward."""
        return self.forward.widths.of(token_count) * (self.reading.value if token_count > _MAX_READ_TOKENS else 1.0)

    def reading_ns(self, token_count: int) -> float:
        """Returns the nanoseconds to read some tokens in one forward; 0 if the draft was never measured."""
        return self.forward.single_ns * self.read_tokens(token_count)

    def cached_token_count(self, ids: Sequence[int]) -> int:
        """Returns how many of the first `ids` the draft has probably cached. A thread may ask."""
        contexts, found = tuple(self._contexts), array("I", ids)  # the event loop may add one meanwhile
        return max((common_prefix_length(found, one) for one in contexts), default=0)

    def observe_context(self, ids: Sequence[int]) -> None:
        """Records that the draft has read `ids`."""
        if (read := array("I", ids)) not in self._contexts:
            self._contexts.append(read)

    def observe_turn(self, token_count: int, *, ended_early: bool) -> None:
        """Records the length of a turn that the draft might end early, and whether it has."""
        for position in range(1, token_count):
            self.goes_on.observe(position, 1.0)
        if ended_early and token_count:
            self.goes_on.observe(token_count, 0.0)

    def observe_verified_turn(self, count: int, right_count: int, *, ended_early: bool) -> None:
        """Records whether a turn of `count` candidates went on after each of its first `right_count` candidates.

        Those candidates were accepted. `ended_early`: the draft ended the turn before its limit.
        """
        for position in range(1, right_count + 1):
            if position < count or ended_early:
                self.goes_on_if_right.observe(position, float(position < count))

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None:
        """Records the times of a proposal. `round_trip_ns` is None unless it is the first proposal of an epoch."""
        count = len(proposal.token_ids)
        read_ns = proposal.read_ns or proposal.forward_ns // count
        # An answer of a draft that competes with the target waits for a core, too.
        if round_trip_ns is not None and not (ahead and self.competes):
            self.round_trip.observe(round_trip_ns, limit=MAX_DELAY_RATIO)
        if ahead and self.forward.single_ns:
            if proposal.read_token_count <= 1:
                taken_ns = (proposal.forward_ns + proposal.queue_ns) / count
                ratio = max(taken_ns / self.forward.single_ns, 0.5)
                self.ahead_slowdown.observe(ratio, limit=_MAX_SLOWDOWN_RATIO)
            return
        if count > 1:
            self.forward.observe(1, (proposal.forward_ns - read_ns) / (count - 1))
        if proposal.read_token_count > _MAX_READ_TOKENS and self.forward.single_ns:
            self.reading.observe(read_ns / self.forward.of(proposal.read_token_count), limit=MAX_DELAY_RATIO)
        if 0 < proposal.read_token_count <= _MAX_READ_TOKENS and (self.forward.known or proposal.read_token_count == 1):
            self.forward.observe(proposal.read_token_count, read_ns)
