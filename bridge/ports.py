"""How the loop sees a draft and a target: what it tells them, what they tell it.

Both are runners. The loop tells them how far they may go (credit) and they go on by themselves. The
messages are those of the protocol; see `protos/draftbridge/v1/draft.proto` and `target.proto`.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"


@dataclass(frozen=True)
class Sync:
    """Starts an epoch of the draft: keep, append, propose up to `credit` tokens."""

    epoch: int
    keep_token_count: int
    token_ids: tuple[int, ...]
    byte_offset: int
    credit: int


@dataclass(frozen=True)
class Proposal:
    """Tokens that the draft proposes, with its own probability of each."""

    epoch: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    done: bool = False
    cached_token_count: int = 0
    queue_ns: int = 0
    forward_ns: int = 0


class Drafter(Protocol):
    """A draft, holding one sequence."""

    async def sync(self, sync: Sync) -> None: ...

    async def grant(self, epoch: int, credit: int) -> None: ...

    def proposals(self) -> AsyncIterator[Proposal]:
        """Everything proposed, of every epoch, until closed. Raises what makes the draft unusable."""
        ...


@dataclass(frozen=True)
class Run:
    """Sets the target's committed sequence and lets it decode up to `credit` tokens."""

    base_token_count: int
    token_ids: tuple[int, ...]
    byte_offset: int
    empty_token_count: int
    credit: int
    patience_us: int
    width: int
    generated_token_count: int = 0


@dataclass(frozen=True)
class Candidates:
    """Ids that continue the sequence from an index. None at all: do not wait for any now."""

    base_token_count: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Grant:
    """Adds credit; sets patience and width where given."""

    credit: int = 0
    patience_us: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token, and of the best at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Pass:
    """What one forward of the target yielded: accepted candidates, then one token of its own."""

    base_token_count: int
    token_ids: tuple[int, ...]
    accepted_token_count: int
    candidate_token_count: int
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    cached_token_count: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    waited_ns: int = 0
    near_tie_count: int = 0


class Verifier(Protocol):
    """A target, holding one sequence."""

    async def run(self, run: Run) -> None: ...

    async def candidates(self, candidates: Candidates) -> None: ...

    async def grant(self, grant: Grant) -> None: ...

    def passes(self) -> AsyncIterator[Pass]:
        """Every pass, until closed. Raises what makes the target unusable."""
        ...
