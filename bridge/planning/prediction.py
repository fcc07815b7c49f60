"""How fast each way of getting candidates is: expected tokens and nanoseconds, from measured quantities alone.

All functions here are pure. After Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023), for turns; the draft that runs ahead is a small Markov chain over how many candidates a pass finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import mul

from bridge.sources.source import Pace


@dataclass(frozen=True)
class Prediction:
    """Of one pass, or of an average one: the tokens that it yields and the nanoseconds from one pass to the next."""

    tokens: float
    ns: float

    @property
    def speed(self) -> float:
        """Tokens in a nanosecond."""
        return self.tokens / self.ns


@dataclass(frozen=True)
class Plan:
    """How the next pass gets its candidates. `name`: the way, in words, for statistics.

    `pace`: how the draft works for it. `patience_ns`: how long the target may wait. `waiting_gain_ns`: what waiting for
    candidates that are at hand would gain; `declines`: there are some, but verifying them costs more than it gains.
    """

    name: str
    prediction: Prediction
    pace: Pace = Pace()
    patience_ns: float = 0.0
    waiting_gain_ns: float = 0.0
    declines: bool = False

    @property
    def description(self) -> str:
        """The name, with the number of tokens in a turn."""
        return f"{self.name} of {self.pace.lead}" if self.pace.turns else self.name

    @property
    def runs_ahead(self) -> bool:
        """Whether the draft computes while the target does."""
        return self.pace.lead > 0 and not self.pace.turns


@dataclass(frozen=True)
class TargetCosts:
    """Nanoseconds of passes by their number of tokens, from 1, and of the way from a pass to the next candidates."""

    pass_ns: tuple[float, ...]
    hop_ns: float

    def of(self, width: int) -> float:
        """Nanoseconds of a pass of `width` tokens."""
        return self.pass_ns[min(width, len(self.pass_ns)) - 1]

    def slowed(self, factor: float) -> "TargetCosts":
        """The same while something else uses the target's device."""
        return TargetCosts(tuple(factor * one for one in self.pass_ns), self.hop_ns)


@dataclass(frozen=True)
class DraftCosts:
    """Nanoseconds of a draft, whose tokens are `target_tokens` long in tokens of the target.

    `token_ns` while the target rests, `ahead_ns` while it computes; `slowdown`: how many times as long a pass takes
    then. `read_ns`: the draft's first token of a turn, before which it reads what was committed. `survival[i]`: the
    chance that the first `i + 1` candidates are all right.
    """

    token_ns: float
    ahead_ns: float
    read_ns: float
    round_trip_ns: float
    slowdown: float
    target_tokens: float
    survival: tuple[float, ...]

    def candidate_count(self, draft_tokens: int) -> int:
        """Candidates that so many tokens of the draft come to."""
        return min(max(round(draft_tokens * self.target_tokens), 1), len(self.survival))

    def expected(self, candidate_count: int) -> float:
        """Tokens that a pass with so many candidates yields."""
        return 1.0 + sum(self.survival[:candidate_count])


def plain(costs: TargetCosts) -> Prediction:
    """Of a pass without candidates."""
    return Prediction(1.0, costs.of(1))


def best_width(chances: Sequence[float], costs: TargetCosts) -> tuple[int, Prediction]:
    """The number of candidates with the highest speed, given the chance of each if those before it are right."""
    count, best, tokens = 0, plain(costs), 1.0
    for number, survival in enumerate(accumulate(chances, mul), start=1):
        tokens += survival
        found = Prediction(tokens, costs.of(number + 1))
        if found.speed > best.speed:
            count, best = number, found
    return count, best


def turn_ns(costs: TargetCosts, draft: DraftCosts, token_count: int) -> float:
    """Nanoseconds that the target waits for a turn of so many tokens."""
    return costs.hop_ns + draft.round_trip_ns + draft.read_ns + (token_count - 1) * draft.token_ns


def in_turns(costs: TargetCosts, draft: DraftCosts, token_count: int) -> Prediction:
    """Of a pass that waits until the draft has proposed `token_count` tokens."""
    count = draft.candidate_count(token_count)
    return Prediction(draft.expected(count), turn_ns(costs, draft, token_count) + costs.of(count + 1))


def wait_ns(costs: TargetCosts, draft: DraftCosts, batch: int) -> float:
    """Nanoseconds that the target waits for so many tokens of a draft that starts anew and will run ahead."""
    if not batch:
        return 0.0
    return costs.hop_ns + draft.round_trip_ns + draft.read_ns - draft.token_ns + batch * draft.ahead_ns


def ahead(costs: TargetCosts, draft: DraftCosts, lead: int, batch: int) -> Prediction:
    """Of an average pass beside a draft that runs on while the target computes, at most `lead` tokens ahead.

    Three states follow one another for as long as the draft is right; where it is wrong, the first one comes again.
    In the first the draft starts anew. The target makes `blind` passes of one token until candidates are there, or, if
    `batch` is not 0, waits for that many tokens of the draft and verifies them. The second has what the draft proposed
    meanwhile beyond that, the third what it proposes during one pass.
    """
    slow = costs.slowed(draft.slowdown)
    rate = draft.target_tokens / draft.ahead_ns
    most = draft.candidate_count(lead)
    restart_ns = costs.hop_ns + draft.round_trip_ns + draft.read_ns - draft.token_ns
    gained = slow.of(1) * rate - 1.0  # candidates that the draft gains on the target in a pass of one token
    if gained <= 0.0:
        return plain(slow)
    blind = 1 if batch else max(ceil((1.0 + restart_ns * rate) / gained), 1)
    first = draft.candidate_count(batch) if batch else 0
    first_ns = wait_ns(costs, draft, batch) + blind * slow.of(1 + first)
    second = int(min(max((first_ns - restart_ns) * rate - blind - first, 0.0), most))
    third = second
    for _ in range(3):  # what a pass finds was proposed during the pass before, which takes what its own width takes
        third = int(min(max(slow.of(third + 1) * rate - 1.0, 0.0), most))
    # The chances that a state's passes confirm all that the draft has proposed, up to the tokens that they add.
    lasts = [draft.survival[min(count, len(draft.survival)) - 1] for count in (blind + first, second + 1, third + 1)]
    shares = (1.0, lasts[0], lasts[0] * lasts[1] / (1.0 - min(lasts[2], 0.99)))
    tokens = (
        blind - 1 + draft.expected(first),
        draft.expected(second),
        draft.expected(third),
    )
    times_ns = (first_ns, slow.of(second + 1), slow.of(third + 1))
    passes = shares[0] * blind + shares[1] + shares[2]
    return Prediction(sum(map(mul, shares, tokens)) / passes, sum(map(mul, shares, times_ns)) / passes)
