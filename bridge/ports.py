"""Defines the ports to a draft and a target: the messages that the bridge exchanges with them, as values.

The bridge grants a draft or target credit, and it runs on its own until the credit is used up. The messages are those
of the protocol; see `protos/draftbridge/v1/draft.proto` and `target.proto`.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# A peer that reports a time of more than this, one hour, is at fault.
MAX_MEASURED_NS = 3_600_000_000_000


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"


@dataclass(frozen=True)
class Sync:
    """Starts an epoch: the draft keeps some tokens, appends others and proposes up to `credit` tokens.

    It sends the first `batch_token_count` proposed tokens in one message and each later token in its own. It ends the
    epoch when the product of the probabilities in that first message falls below `min_batch_probability`.
    """

    epoch: int
    keep_token_count: int
    token_ids: tuple[int, ...]
    byte_offset: int
    credit: int
    batch_token_count: int = 1
    min_batch_probability: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """Carries tokens that the draft proposes, and the draft's probability of each.

    `runner_up_ids`: what it would have proposed in place of each, with probabilities; for all tokens or none.
    The first of their forwards read `read_token_count` tokens in `read_ns`; all of them together took `forward_ns`.
    """

    epoch: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    done: bool = False
    cached_token_count: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    read_token_count: int = 0
    read_ns: int = 0
    runner_up_ids: tuple[int, ...] = ()
    runner_up_confidence: tuple[float, ...] = ()


class Drafter(Protocol):
    """The port to a draft that holds one sequence."""

    async def sync(self, sync: Sync) -> None: ...

    async def grant(self, epoch: int, credit: int) -> None: ...

    def proposals(self) -> AsyncIterator[Proposal]:
        """Yields the proposals of every epoch until closed. Raises the error that makes the draft unusable."""

    def close(self) -> None:
        """Ends the stream and frees the draft's slot. May be called twice."""


@dataclass(frozen=True)
class Run:
    """Sets the target's committed sequence and lets it decode up to `credit` tokens.

    `token_ids` follow the first `base_token_count` tokens. `byte_offset`: the bytes of generated text before the next
    token, and `empty_token_count`: the generated tokens without bytes at its end; both select the next token's noise.
    `generated_token_count`: how many of the tokens are not of the prompt. `patience_us`: how long the target may wait
    for candidates.
    """

    base_token_count: int
    token_ids: tuple[int, ...]
    byte_offset: int
    empty_token_count: int
    credit: int
    patience_us: int
    generated_token_count: int = 0


@dataclass(frozen=True)
class Candidates:
    """Offers ids that continue the sequence from index `base_token_count`, at most `width` of them for one forward.

    `branches`: pairs of the index of a candidate and an id that may come in its place. Without ids, the target starts
    its next forward at once.
    """

    offer_id: int
    base_token_count: int
    token_ids: tuple[int, ...]
    width: int
    branches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Grant:
    """Adds credit, and sets how long the target may wait for candidates if `patience_us` is given."""

    credit: int = 0
    patience_us: int | None = None


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token, and the ids and log probabilities of the best tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Pass:
    """Reports one forward of the target: accepted candidates of one offer, then one token of the target's own.

    If a branch was accepted, its token is between them. `branch_count` of them were verified.
    """

    base_token_count: int
    token_ids: tuple[int, ...]
    accepted_token_count: int
    candidate_token_count: int
    offer_id: int = 0
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    cached_token_count: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    waited_ns: int = 0
    near_tie_count: int = 0
    branch_count: int = 0
    branch_accepted: bool = False

    @property
    def width(self) -> int:
        """Returns the tokens that the forward ran: the last one before it, candidates and branches.

        A forward after an accepted branch ran one more, that branch's.
        """
        return 1 + self.candidate_token_count + self.branch_count


class TextGrammar(Protocol):
    """The port to a grammar that follows the bytes of one generated text. A failure never raises: it forces nothing."""

    def commit(self, data: bytes) -> None:
        """Appends generated bytes."""

    def accepted(self, before: bytes, data: bytes) -> tuple[int, bool]:
        """Returns how many bytes of `data` may follow the text and `before`, and whether the text may end after all."""

    def forced(self, after: bytes, limit: int) -> tuple[bytes, bool]:
        """Returns the bytes that must follow the text and `after`, up to a limit, and whether it must end there."""


class Verifier(Protocol):
    """The port to a target that holds one sequence."""

    async def run(self, run: Run) -> None: ...

    async def candidates(self, candidates: Candidates) -> None: ...

    async def grant(self, grant: Grant) -> None: ...

    def passes(self) -> AsyncIterator[Pass]:
        """Yields every pass until closed. Raises the error that makes the target unusable."""
