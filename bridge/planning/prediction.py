"""Predicts the speed of each way to get candidates, as expected tokens and nanoseconds, from measured quantities alone.

All functions here are pure. Turns are predicted as in Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (2023), a draft that runs ahead by a small Markov chain over the candidates that a pass finds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import ceil
from operator import mul

from bridge.sources.source import DraftPace

# The number of turns, each slower than the best of the shorter ones, after which no faster one is expected.
_SLOWER_TURNS = 3
# The least speedup of a longer turn over a shorter one if the draft may end both early. Few turns are long then, so
# little is known about them, and the target would wait longer for a draft that hangs.
_MIN_LONGER_TURN_GAIN = 1.01


@dataclass(frozen=True)
class Prediction:
    """Predicts an average pass: the tokens that it yields, and the nanoseconds since the pass before it.

    `waited_ns` is the time that the target waits when a draft starts a turn, if that is not ended early, or an epoch.
    """

    tokens: float
    ns: float
    waited_ns: float = 0.0

    @property
    def tokens_per_ns(self) -> float:
        return self.tokens / self.ns


@dataclass(frozen=True)
class Plan:
    """Determines how the next pass gets its candidates. `name` is the name in statistics; `source` proposes them.

    `pace`: how the draft works meanwhile. `patience_ns`: how long the target may wait. `waiting_gain_ns`: the expected
    gain of waiting for candidates that the bridge already has. `is_trial`: the plan is not expected to be the fastest,
    but is tried to measure it, with `trial_width` candidates in a pass. `prepares_turn`: after the next pass, the
    target waits for the draft. `plain_ns`: the predicted time of a pass without candidates, for comparison.
    """

    name: str
    prediction: Prediction
    pace: DraftPace = DraftPace()
    patience_ns: float = 0.0
    waiting_gain_ns: float = 0.0
    is_trial: bool = False
    trial_width: int = 0
    prepares_turn: bool = False
    source: str = ""
    plain_ns: float = 0.0

    @property
    def description(self) -> str:
        """Returns the name, with the number of tokens in a turn, or the largest one if the draft may end it early."""
        if not (self.pace.turns and self.pace.lead):  # at the end of a text there is room for no candidate
            return self.name
        return f"{self.name} of {'up to ' if self.pace.min_probability else ''}{self.pace.lead}"

    @property
    def rests(self) -> bool:
        """Returns whether the next passes need nothing: no candidates, no draft, no trial."""
        return not (self.source or self.pace.lead or self.is_trial or self.prepares_turn)

    @property
    def holds_back(self) -> bool:
        """Returns whether the target gets candidates for one pass only, and waits after it."""
        return self.prepares_turn or self.pace.turns

    @property
    def runs_ahead(self) -> bool:
        """Returns whether the draft computes while the target does."""
        return self.pace.lead > 0 and not self.pace.turns


@dataclass(frozen=True)
class TargetCosts:
    """The cost of passes: `single_ns` with one token, `ratios[i]` times that with `i + 1` tokens.

    `load`: the number of sequences that share a pass, each of which waits for the candidates of all.
    `candidate_delay_ns`: from a pass to the next candidates.
    """

    single_ns: float
    ratios: Sequence[float]
    candidate_delay_ns: float
    load: int = 1

    def of(self, width: int) -> float:
        """Returns the nanoseconds of a pass of `width` tokens."""
        return self.single_ns * (1.0 + self.load * (self.ratios[min(width, len(self.ratios)) - 1] - 1.0))

    @property
    def max_candidate_count(self) -> int:
        return len(self.ratios) - 1

    def slowed(self, factor: float) -> "TargetCosts":
        """Returns the costs while a pass takes `factor` times as long."""
        return replace(self, single_ns=factor * self.single_ns)


@dataclass(frozen=True)
class DraftCosts:
    """The costs and chances of a draft, one of whose tokens makes `target_tokens` tokens of the target.

    A draft token takes `token_ns` while the target rests, `ahead_ns` while it computes; then a pass takes `slowdown`
    times as long. `read_ns`: the first token of a turn, for which the draft reads what was committed; `prompt_ns`: the
    extra time, once, to read a prompt, or all that came while the draft was not used. `survival[i]`: the chance that
    the first `i + 1` candidates are all right.

    If the draft may end a turn early, `turn_survival[i]` is the chance that a turn has `i + 1` candidates and all are
    right, and `turn_lengths[i]` the average number of tokens in a turn of at most `i + 1`; otherwise both are empty.
    """

    token_ns: float
    ahead_ns: float
    read_ns: float
    prompt_ns: float
    round_trip_ns: float
    slowdown: float
    target_tokens: float
    survival: tuple[float, ...]
    turn_survival: tuple[float, ...] = ()
    turn_lengths: tuple[float, ...] = ()

    def candidate_count(self, draft_tokens: float) -> int:
        """Returns the number of candidates that `draft_tokens` tokens of the draft make."""
        return min(max(round(draft_tokens * self.target_tokens), 1), len(self.survival))

    def expected(self, candidate_count: int) -> float:
        """Returns the expected tokens of a pass with `candidate_count` candidates."""
        return 1.0 + sum(self.survival[:candidate_count])

    def expected_in_turn(self, candidate_count: int) -> float:
        """Returns the expected tokens of a pass after a turn of at most `candidate_count` candidates."""
        return 1.0 + sum((self.turn_survival or self.survival)[:candidate_count])

    def turn_length(self, token_count: int) -> float:
        """Returns the average number of draft tokens in a turn of at most `token_count`."""
        if not self.turn_lengths:
            return float(token_count)
        return self.turn_lengths[min(token_count, len(self.turn_lengths)) - 1]


def plain(costs: TargetCosts) -> Prediction:
    """Predicts a pass without candidates."""
    return Prediction(1.0, costs.of(1))


def expected_count(chances: Sequence[float]) -> float:
    """Returns how many candidates are right on average, given the chance of each if all before it are right."""
    return float(sum(accumulate(chances, mul)))


def with_candidates(chances: Sequence[float], costs: TargetCosts) -> Prediction:
    """Predicts a pass with available candidates, given the chance of each if all before it are right."""
    return Prediction(1.0 + expected_count(chances), costs.of(len(chances) + 1))


def best_width(chances: Iterable[float], costs: TargetCosts) -> int:
    """Returns the number of candidates with the highest speed; 0 if plain decoding is at least as fast.

    Asks for no more chances than may matter, because each takes processor time.
    """
    most = costs.max_candidate_count
    best, found, tokens = plain(costs).tokens_per_ns, 0, 1.0
    for count, survival in enumerate(accumulate(islice(chances, most), mul), start=1):
        tokens, ns = tokens + survival, costs.of(count + 1)
        if tokens / ns > best:
            best, found = tokens / ns, count
        elif tokens + survival * (most - count) <= best * ns:  # too slow even if all others were right as well
            break
    return found


def _restart_ns(costs: TargetCosts, draft: DraftCosts) -> float:
    """Returns the nanoseconds from a pass to the first token of a draft that starts an epoch after it."""
    return costs.candidate_delay_ns + draft.round_trip_ns + draft.read_ns


def in_turns(costs: TargetCosts, draft: DraftCosts, token_count: int) -> Prediction:
    """Predicts a pass that waits until the draft has proposed `token_count` tokens, or has ended its turn early."""
    restart_ns, length = _restart_ns(costs, draft), draft.turn_length(token_count)
    tokens = draft.expected_in_turn(min(draft.candidate_count(token_count), costs.max_candidate_count))
    ns = restart_ns + (length - 1) * draft.token_ns + costs.of(draft.candidate_count(length) + 1)
    return Prediction(tokens, ns, restart_ns + (token_count - 1) * draft.token_ns)


def min_turn_probability(costs: TargetCosts, draft: DraftCosts, token_count: int, found: Prediction) -> float:
    """Returns the chance of being right below which another token of a turn takes longer than it saves.

    It saves its chance times the average time of the tokens that it makes, which is that of `found`, the prediction for
    such turns. The draft compares this with the product of its tokens' own probabilities.
    """
    count = draft.candidate_count(draft.turn_length(token_count))
    verify_ns = (costs.of(count + 1) - costs.of(1)) / count
    return min((draft.token_ns / draft.target_tokens + verify_ns) * found.tokens_per_ns, 1.0)


def best_turn(
    costs: TargetCosts, draft: DraftCosts, leads: Sequence[int], max_wait_ns: float
) -> tuple[int, Prediction]:
    """Returns the fastest of some turns, given their lengths in ascending order, and its prediction.

    Only the first may wait longer than `max_wait_ns`. A prediction takes processor time, so the search ends after
    `_SLOWER_TURNS` turns in a row that are slower than the best so far.
    """
    least = _MIN_LONGER_TURN_GAIN if draft.turn_lengths else 1.0
    best_lead, best, slower_count = leads[0], in_turns(costs, draft, leads[0]), 0
    for lead in leads[1:]:
        found = in_turns(costs, draft, lead)
        if found.waited_ns > max_wait_ns:
            break
        if found.tokens_per_ns > least * best.tokens_per_ns:
            best_lead, best, slower_count = lead, found, 0
        elif (slower_count := slower_count + 1) == _SLOWER_TURNS:
            break
    return best_lead, best


def ahead(costs: TargetCosts, draft: DraftCosts, lead: int, *, waits: bool = False) -> Prediction:
    """Predicts an average pass while the draft computes, too, and is at most `lead` tokens ahead.

    The model is a Markov chain of three states; a wrong candidate leads back to the first. `restart`: the draft starts
    an epoch, and the target makes `blind` passes of one token until candidates arrive or, if it `waits`, one pass with
    the draft's first token. `catch_up`: one pass verifies what the draft has proposed meanwhile beyond that. `steady`:
    each pass verifies what the draft has proposed during the pass before.
    """
    slow = costs.slowed(draft.slowdown)
    rate = draft.target_tokens / draft.ahead_ns
    most = min(draft.candidate_count(lead), costs.max_candidate_count)
    gained = slow.of(1) * rate - 1.0  # candidates that the draft gains on the target in a pass of one token
    if gained <= 0.0:
        return plain(slow)
    until_first_ns = _restart_ns(costs, draft) - draft.token_ns
    waited_ns = until_first_ns + draft.ahead_ns if waits else 0.0
    blind = 1 if waits else max(ceil((1.0 + until_first_ns * rate) / gained), 1)
    restart = min(draft.candidate_count(1), most) if waits else 0
    restart_ns = waited_ns + blind * slow.of(1 + restart)
    catch_up = int(min(max((restart_ns - until_first_ns) * rate - blind - restart, 0.0), most))
    steady = catch_up
    for _ in range(3):  # a fixed point: a wider pass takes longer, and so finds more candidates
        steady = int(min(max(slow.of(steady + 1) * rate - 1.0, 0.0), most))
    # The chance in each state that everything the draft has proposed is right, up to the tokens that its passes add.
    goes_on = [
        draft.survival[min(count, len(draft.survival)) - 1] for count in (blind + restart, catch_up + 1, steady + 1)
    ]
    visits = (1.0, goes_on[0], goes_on[0] * goes_on[1] / (1.0 - min(goes_on[2], 0.99)))  # per state, between restarts
    tokens = (blind - 1 + draft.expected(restart), draft.expected(catch_up), draft.expected(steady))
    times_ns = (restart_ns, slow.of(catch_up + 1), slow.of(steady + 1))
    passes = visits[0] * blind + visits[1] + visits[2]
    return Prediction(sum(map(mul, visits, tokens)) / passes, sum(map(mul, visits, times_ns)) / passes, waited_ns)
