"""How far ahead the draft may run and how long the target waits for it."""

from dataclasses import dataclass
from enum import Enum

# Longer than any draft needs for a proposal: a target that waits this long waits for a dead draft.
_LOCKSTEP_PATIENCE_US = 5_000_000


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
    """

    def __init__(self, parameters: SpeculationParameters) -> None:
        automatic = Mode.OPPORTUNISTIC if parameters.mode is Mode.AUTO else parameters.mode
        self.mode = automatic
        self.confidence_threshold = parameters.assistant_confidence_threshold
        self._adapt = parameters.num_assistant_tokens is None
        default = 5 if automatic is Mode.LOCKSTEP else 8
        self.num_assistant_tokens = parameters.num_assistant_tokens or default

    @property
    def lockstep(self) -> bool:
        return self.mode is Mode.LOCKSTEP

    @property
    def patience_us(self) -> int:
        """Microseconds that the target may wait for candidates."""
        return _LOCKSTEP_PATIENCE_US if self.lockstep else 0

    @property
    def width(self) -> int:
        """The most candidates in one forward. A token of the draft may be several of the target's."""
        return 4 * self.num_assistant_tokens

    def learn(self, candidate_token_count: int, accepted_token_count: int, waited_us: int) -> None:
        """Takes note of a pass."""
        if self.lockstep and waited_us >= _LOCKSTEP_PATIENCE_US:
            # The draft hangs. Waiting so long again and again would be worse than having none.
            self.mode = Mode.OPPORTUNISTIC
        if self._adapt and self.lockstep and candidate_token_count:
            if accepted_token_count == candidate_token_count:
                self.num_assistant_tokens = min(self.num_assistant_tokens + 2, 16)
            else:
                self.num_assistant_tokens = max(self.num_assistant_tokens - 1, 1)
