"""How far ahead the draft may run and how long the target waits for it."""

from dataclasses import dataclass
from enum import Enum

from bridge.estimates import Acceptance, Average, Estimates, PassCost, Trial
from bridge.ports import Pass

# Longer than any draft needs for a proposal: a target that waits this long waits for a dead draft.
_LOCKSTEP_PATIENCE_US = 5_000_000
# For candidates from the text itself, which the bridge has at once: a multiple of the time there and back, and at least
# so long. A target that had them at hand waits for nothing that counts.
_LEAST_PATIENCE_NS = 2_000_000
_WAITED_NS = 20_000
_MOST_CANDIDATES = 24
# How many times what waiting takes it has to gain, both being guesses.
_MARGIN = 3
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


class Policy:
    """Credit, patience and width for one request.

    Lockstep: the draft proposes so many tokens, then the target verifies them. Opportunistic: the draft
    stays at most so many tokens ahead, the target never waits. The number is fixed if the user fixed it,
    and otherwise follows acceptance as Hugging Face's heuristic schedule does: two more after a pass that
    accepted all, one less after one that did not.

    Automatic: candidates are what the text said before (`suffix`), as many as pay by what is known of the target
    (`estimates`), and what a draft model says, where `trial` found that it pays. The target waits for candidates as
    long as waiting has been worth more than it took.
    """

    def __init__(
        self, parameters: SpeculationParameters, estimates: Estimates | None = None, trial: Trial | None = None
    ) -> None:
        self.mode = parameters.mode
        self.confidence_threshold = parameters.assistant_confidence_threshold
        self._adapt = parameters.num_assistant_tokens is None
        default = 5 if self.lockstep else 8
        self.num_assistant_tokens = parameters.num_assistant_tokens or default
        self._estimates, self._trial = estimates or Estimates(), trial
        self._cost = PassCost(self._estimates.steps)
        self._acceptance = Acceptance(self._estimates.acceptance)
        # What waiting for candidates from the text would gain on average, in nanoseconds.
        self._gain = Average(0.0)
        self._newest_gain = 0.0
        self._patience_ns = float(_LEAST_PATIENCE_NS)
        self._count = self._widest = 0

    @property
    def lockstep(self) -> bool:
        return self.mode is Mode.LOCKSTEP

    @property
    def automatic(self) -> bool:
        return self.mode is Mode.AUTO

    @property
    def drafting(self) -> bool:
        """Whether a draft model, if there is one, is to draft now."""
        return not self.automatic or self._trial is None or self._trial.drafting

    @property
    def patience_us(self) -> int:
        """Microseconds that the target may wait for candidates."""
        if self.lockstep:
            return _LOCKSTEP_PATIENCE_US
        hop = self._estimates.hop.value
        return int(self._patience_ns // 1000) if self.automatic and self._gain.value > _MARGIN * hop else 0

    @property
    def width(self) -> int:
        """The most candidates in one forward. A token of the draft may be several of the target's."""
        return self._count or 4 * self.num_assistant_tokens

    def suffix_count(self, length: int) -> int:
        """How many tokens of a match of so many bytes to verify in one forward; 0 if there is none, or none pays.

        The count with the most tokens expected in a nanosecond: each is accepted if all before it are.
        """
        cost, rate = self._cost, self._acceptance.of(length) if length else 0.0
        best, speed, gain = 0, 1.0 / cost.of(1), 0.0
        expected = chance = 1.0
        for count in range(1, _MOST_CANDIDATES + 1):
            chance *= rate
            expected += chance
            taken = cost.of(count + 1)
            if expected / taken > speed:
                best, speed = count, expected / taken
                # Candidates that come a pass late are still of use if the first of them was right: then waiting gains
                # a pass of one, else it costs a pass its width.
                gain = rate * cost.of(1) - (1 - rate) * (taken - cost.of(1))
        self._count, self._newest_gain = best, gain
        self._widest = max(self._widest, best)
        return best

    @property
    def choice(self) -> str:
        """What it chose and why, in words; nothing where the user chose."""
        if not self.automatic:
            return ""
        cost = self._cost
        text = (
            f"up to {self._widest} candidates from the text: {self._acceptance.total:.0%} of them are accepted, and a "
            f"forward of 8 takes {cost.of(8) / cost.of(1):.1f} times as long as one of 1"
        )
        return f"{text}; {self._trial.choice}" if self._trial and self._trial.choice else text

    def learn(self, event: Pass, length: int, elapsed_ns: int) -> None:
        """Takes note of a pass. `length`: of the match that its candidates are from; 0 if they are a draft model's.

        `elapsed_ns`: since the pass before; 0 if this is the first, which reads the prompt.
        """
        candidate_count, accepted_count = event.candidate_token_count, event.accepted_token_count
        if self.lockstep:
            self._learn_lockstep(candidate_count, accepted_count, event.waited_ns // 1000)
        if elapsed_ns == 0:
            return
        self._cost.learn(candidate_count + 1, max(elapsed_ns - event.waited_ns, event.forward_ns))
        if self.automatic:
            if candidate_count and length:
                self._acceptance.learn(length, candidate_count, accepted_count)
            self._gain.learn(self._newest_gain, _GAIN_FRESH)
            if self._trial:
                self._trial.learn(len(event.token_ids), elapsed_ns)
            self._learn_patience(event)

    def _learn_patience(self, event: Pass) -> None:
        if event.waited_ns < _WAITED_NS:
            return
        self._estimates.hop.learn(event.waited_ns)
        late = event.candidate_token_count == 0 and event.waited_ns >= self._patience_ns
        self._patience_ns = 2 * self._patience_ns if late else max(3 * self._estimates.hop.value, _LEAST_PATIENCE_NS)

    def _learn_lockstep(self, candidate_count: int, accepted_count: int, waited_us: int) -> None:
        if waited_us >= _LOCKSTEP_PATIENCE_US:
            # The draft hangs. Waiting so long again and again would be worse than having none.
            self.mode = Mode.OPPORTUNISTIC
        if self._adapt and candidate_count:
            if accepted_count == candidate_count:
                self.num_assistant_tokens = min(self.num_assistant_tokens + 2, 16)
            else:
                self.num_assistant_tokens = max(self.num_assistant_tokens - 1, 1)
