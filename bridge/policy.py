"""How far ahead the draft may run, how long the target waits for it, and what is worth verifying."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bridge.average import Average
from bridge.estimates import Estimates, PassCost
from bridge.ports import Pass, Proposal
from bridge.trial import Drafting, Trial

# Longer than any draft needs for a proposal: a target that waits this long waits for a dead draft.
_LOCKSTEP_PATIENCE_US = 5_000_000
# For candidates from the text itself, which the bridge has at once: a multiple of the time there and back, and at least
# so long. A target that had them at hand waits for nothing that counts.
_LEAST_PATIENCE_NS = 2_000_000
_WAITED_NS = 20_000
_MOST_CANDIDATES = 24
# Tokens of a draft that a target waits for, where that pays; and the most that a draft may be ahead.
_AWAITED, _MOST_AHEAD = 1.5, 64
# How many times what waiting takes it has to gain, both being guesses.
_MARGIN = 3
# Passes of each request that runs, all with a match that does not pay, until it is tried all the same: what is never
# tried is never known better.
_PROBE = 100
# Passes of each request that runs, none of them of one token, until one is: from wide ones alone it cannot be told
# whether it is their width that takes so long.
_NARROW = 100
# How much the newest pass counts in what candidates from the text have gained of late.
_GAIN_FRESH = 0.2


class Mode(Enum):
    """How draft and target take turns."""

    AUTO = "auto"
    OFF = "off"
    LOCKSTEP = "lockstep"
    OPPORTUNISTIC = "opportunistic"


@dataclass(frozen=True)
class SpeculationParameters:
    """What the user asked for; names follow Hugging Face's assisted generation.

    `draft_temperature`: at which the draft guesses, the request's if None.
    """

    mode: Mode = Mode.AUTO
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    draft_temperature: float | None = None


@dataclass(frozen=True)
class Worth:
    """How many candidates to verify in one forward, the tokens expected in a nanosecond then, and for how many forwards
    to send some, as far as they are known.
    """

    count: int
    speed: float
    forwards: int = 6


class Policy:
    """Credit, patience and width for one request.

    Lockstep: the draft proposes so many tokens, then the target verifies them. Opportunistic: the draft
    stays at most so many tokens ahead, the target never waits. The number is fixed if the user fixed it,
    and otherwise follows acceptance as Hugging Face's heuristic schedule does: two more after a pass that
    accepted all, one less after one that did not.

    Automatic: candidates are what the text said before (`suffix`), or what a draft model says where `trial` found that
    it pays; the better of the two, as many as pay by what is known of the target (`estimates`). The target waits for
    candidates as long as waiting has been worth more than it took.
    """

    def __init__(
        self, parameters: SpeculationParameters, estimates: Estimates | None = None, trial: Trial | None = None
    ) -> None:
        self.mode = parameters.mode
        self._adapt = parameters.num_assistant_tokens is None
        default = 5 if self.lockstep else 8
        self._assistant_tokens = parameters.num_assistant_tokens or default
        self._estimates, self._trial = estimates or Estimates(), trial or Trial()
        self._cost = PassCost(Average(self._estimates.costs.single))
        self._lengths, self._confidences = (
            self._estimates.lengths.of_request(),
            self._estimates.confidences.of_request(),
        )
        # What waiting for candidates from the text would gain on average, in nanoseconds.
        self._gain = Average(0.0)
        self._newest_gain = 0.0
        self._patience_ns = float(_LEAST_PATIENCE_NS)
        self._widest = 0
        # Whether there was a match that does not pay.
        self._untried = False

    @property
    def lockstep(self) -> bool:
        return self.mode is Mode.LOCKSTEP

    @property
    def automatic(self) -> bool:
        return self.mode is Mode.AUTO

    @property
    def drafting(self) -> bool:
        """Whether a draft model, if there is one, is to draft now."""
        return not self.automatic or self._trial.drafting is not Drafting.NONE

    @property
    def num_assistant_tokens(self) -> int:
        """Tokens that the draft may be ahead, or of its turn in lockstep."""
        if not (self._adapt and self.automatic and self._trial.token.count):
            return self._assistant_tokens
        # What it can say until it hears of a pass that began when its last word came, and a few more.
        ahead = (self._trial.round_trip.value + self._takes(1)) / max(self._trial.token.value, 1.0)
        return min(max(math.ceil(ahead) + 4, self._assistant_tokens), _MOST_AHEAD)

    @property
    def patience_us(self) -> int:
        """Microseconds that the target may wait for candidates."""
        if self.lockstep:
            return _LOCKSTEP_PATIENCE_US
        if not self.automatic:
            return 0
        patience = self._patience_ns if self._gain.value > _MARGIN * self._estimates.costs.hop.value else 0.0
        if self._trial.drafting is Drafting.AWAITED:
            # Nothing that a draft says is worth more than the pass that it saves, whatever it says of itself.
            patience = max(patience, min(_AWAITED * self._trial.token.value, self._takes(1)))
        return int(patience // 1000)

    @property
    def round_trip_ns(self) -> int:
        """Of a message to the draft and its answer."""
        return int(self._trial.round_trip.value)

    def catches_up(self, token_count: float, silent_ns: int) -> bool:
        """Whether a draft that is so many tokens behind says the next sooner by going on than by beginning anew.

        `silent_ns`: how long it has had for its next token.
        """
        token, round_trip = self._trial.token.value, self._trial.round_trip.value
        return (token_count + 1) * token - silent_ns <= round_trip + token

    def learn_draft(self, proposal: Proposal, round_trip_ns: int | None) -> None:
        """Takes note of what the draft said. `round_trip_ns`: of the message that it answers, without its forwards."""
        if proposal.token_ids:
            self._trial.hear()
            busy_ns = min(proposal.queue_ns + proposal.forward_ns, 1000 * _LOCKSTEP_PATIENCE_US)
            self._trial.token.learn(busy_ns / len(proposal.token_ids))
            if round_trip_ns is not None:
                self._trial.round_trip.learn(max(round_trip_ns, 0))

    @property
    def width(self) -> int:
        """The most candidates of a draft model in one forward. A token of it may be several of the target's."""
        return 4 * self.num_assistant_tokens

    def draft_worth(self, confidences: Sequence[float], length: int = 0, count: int = 0) -> Worth:
        """Of candidates that the draft gives these probabilities, each where those before it are right.

        Behind them `count` more, from a match of `length` bytes.
        """
        chances = [self._confidences.of(confidence) for confidence in confidences[:_MOST_CANDIDATES]]
        worth = self._worth([*chances, *[self._lengths.of(length)] * count][:_MOST_CANDIDATES])
        self._widest = max(self._widest, worth.count - len(confidences))
        return worth

    def suffix_worth(self, length: int) -> Worth:
        """Of a match of so many bytes; 0 if there is none."""
        rate = self._lengths.of(length) if length else 0.0
        # From wide passes alone nobody could tell how much faster those of one token would have been.
        known = self._cost.known(self._estimates.costs.steps)
        worth = self._worth([rate] * _MOST_CANDIDATES if length and known else ())
        # Candidates that come a pass late are still of use if the first of them was right: then waiting gains a pass of
        # one, else it costs a pass its width.
        wide = self._takes(worth.count + 1) - self._takes(1)
        self._newest_gain = rate * self._takes(1) - (1 - rate) * wide if worth.count else 0.0
        self._widest = max(self._widest, worth.count)
        self._untried = length > 0 and known and worth.count == 0
        if self._untried and self._estimates.untried >= _PROBE * self._estimates.load:
            self._estimates.untried = 0
            # As many as are all right half of the time; for two forwards, because one of them may come too late.
            count = min(max(int(math.log(0.5) / math.log(rate)), 1), _MOST_CANDIDATES)
            self._widest = max(self._widest, count)
            return Worth(count, math.inf, forwards=2)
        return worth

    def _worth(self, chances: Sequence[float]) -> Worth:
        """The count with the most tokens expected in a nanosecond: each is accepted if all before it are."""
        best = Worth(0, 1.0 / self._takes(1))
        if self._estimates.wide >= _NARROW * self._estimates.load:
            return best
        expected = chance = 1.0
        for count, rate in enumerate(chances, start=1):
            chance *= rate
            expected += chance
            if (speed := expected / self._takes(count + 1)) > best.speed:
                best = Worth(count, speed)
        return best

    def _takes(self, width: int) -> float:
        """Nanoseconds of a forward; what it takes beyond one token, all requests that run have to wait for."""
        costs = self._estimates.costs
        return self._cost.of(1, costs.steps) + self._estimates.load * self._cost.beyond(width, costs.steps)

    @property
    def choice(self) -> str:
        """What it chose and why, in words; nothing where the user chose."""
        if not self.automatic:
            return ""
        if not self._widest:
            return self._trial.choice
        text = (
            f"up to {self._widest} candidates from the text, of which {self._lengths.total:.0%} are right behind right "
            f"ones; a forward of 8 takes {self._takes(8) / self._takes(1):.1f} times as long as one of 1"
        )
        return f"{text}; {self._trial.choice}" if self._trial.choice else text

    def alone(self) -> None:
        """There is no draft model any more; what follows says nothing of it."""
        self._trial.close()
        self._trial = Trial()

    def close(self) -> None:
        """The request ends."""
        self._trial.close()

    def learn(self, event: Pass, length: int, elapsed_ns: int, confidences: Sequence[float] = ()) -> None:
        """Takes note of a pass. `confidences`: a draft model's of its candidates; `length`: of the match that those
        behind them are from, 0 if there are none.

        `elapsed_ns`: since the pass before; 0 if this is the first, which reads the prompt.
        """
        candidate_count, accepted_count = event.candidate_token_count, event.accepted_token_count
        if self.lockstep:
            self._learn_lockstep(candidate_count, accepted_count, event.waited_ns // 1000)
        if elapsed_ns == 0:
            return
        taken_ns = max(elapsed_ns - event.waited_ns, event.forward_ns)
        costs = self._estimates.costs
        self._cost.learn(candidate_count + 1, taken_ns, costs.steps)
        costs.single = self._cost.of(1, costs.steps)
        self._estimates.wide = self._estimates.wide + 1 if candidate_count else 0
        if self.automatic:
            self._estimates.untried = 0 if length and candidate_count else self._estimates.untried + self._untried
            for place, confidence in enumerate(confidences[: accepted_count + 1]):
                self._confidences.learn(confidence, 1, int(place < accepted_count))
            drafted_count = len(confidences)
            if length and drafted_count <= accepted_count and drafted_count < candidate_count:
                self._lengths.learn(length, candidate_count - drafted_count, accepted_count - drafted_count)
            self._gain.learn(self._newest_gain, _GAIN_FRESH)
            self._trial.learn(len(event.token_ids), elapsed_ns)
            self._learn_patience(event)

    def _learn_patience(self, event: Pass) -> None:
        # What it waits for a draft model says nothing of what the bridge takes.
        if event.waited_ns < _WAITED_NS or self._trial.drafting is Drafting.AWAITED:
            return
        self._estimates.costs.hop.learn(event.waited_ns)
        late = event.candidate_token_count == 0 and event.waited_ns >= self._patience_ns
        self._patience_ns = (
            2 * self._patience_ns if late else max(3 * self._estimates.costs.hop.value, _LEAST_PATIENCE_NS)
        )

    def _learn_lockstep(self, candidate_count: int, accepted_count: int, waited_us: int) -> None:
        if waited_us >= _LOCKSTEP_PATIENCE_US:
            # The draft hangs. Waiting so long again and again would be worse than having none.
            self.mode = Mode.OPPORTUNISTIC
        if self._adapt and candidate_count:
            if accepted_count == candidate_count:
                self._assistant_tokens = min(self._assistant_tokens + 2, 16)
            else:
                self._assistant_tokens = max(self._assistant_tokens - 1, 1)
