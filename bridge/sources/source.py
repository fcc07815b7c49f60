"""The port behind which everything is that can guess how a text goes on.

A source proposes bytes, so that it needs to know no tokenizer but its own, and so that one source can continue
another's bytes in the middle of a word. `offer_of` translates what one or several sources propose into candidates.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter_ns
from typing import ClassVar, Protocol

from bridge.ports import Drafter, Pass, Proposal
from bridge.sources.suffix_memory import SuffixMemory
from bridge.tape import Tape
from bridge.text.models import Model
from bridge.text.translation import candidates
from bridge.text.vocabulary import Rendering, Vocabulary

# The most bytes of a proposal that are translated at a time: several forwards' worth of candidates.
MAX_OFFERED_BYTES = 512


@dataclass(frozen=True)
class Continuation:
    """Bytes that a source proposes after the tape's end.

    `evidence` is the source's own measure of how sure it is of the first byte, such as the length of a match, and
    `gain` what each byte adds for those after it if it is right. A source with tokens of its own also gives the offset
    in `data` where each of them starts, and its probability: `starts`, `confidences`.
    `closes`: the source proposes that the text ends after `data`. `cut`: the source knows more than `data`, which may
    stop in the middle of a word.
    """

    source: str
    data: bytes
    evidence: float = 1.0
    gain: float = 0.0
    starts: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    closes: bool = False
    cut: bool = False

    def evidence_of(self, begin: int, end: int) -> float:
        """Returns the evidence for `data[begin:end]`, times the probabilities of the tokens that start there."""
        tokens = slice(bisect_left(self.starts, begin), bisect_left(self.starts, end))
        return (self.evidence + self.gain * begin) * prod(self.confidences[tokens])


@dataclass(frozen=True)
class Offer:
    """Candidates in the target's ids, each with the source that proposed it and that source's evidence."""

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    evidence: tuple[float, ...] = ()

    def part(self, begin: int, end: int | None = None) -> "Offer":
        """The candidates `begin` to `end`."""
        return Offer(self.token_ids[begin:end], self.sources[begin:end], self.evidence[begin:end])


@dataclass(frozen=True)
class Outcome:
    """A committed pass. `tried`: the candidates that it took along; `data`: the bytes of each of its tokens.

    `elapsed_ns`: time since the pass before; None for the first, which reads the prompt. `timed_out`: the target
    waited for candidates as long as it was told to, and none came.
    """

    result: Pass
    tried: Offer
    data: tuple[bytes, ...]
    elapsed_ns: int | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class SourceState:
    """Where a source stands that takes time to propose, such as a model.

    `lag_token_count`: tokens of its own that it reads before it can propose. `token_bytes`: bytes of its tokens on
    average. `awaited`: it is about to propose. `overdue`: the target has waited for it in vain. `stale`: what it works
    on has become useless. `runs_ahead`: it works while the target does.
    """

    lag_token_count: int = 1
    token_bytes: float = 4.0
    awaited: bool = False
    overdue: bool = False
    stale: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True)
class Pace:
    """How a source that takes time is to work.

    `lead`: tokens that it may be ahead of the tape; 0 pauses it. `batch`: tokens in its first message, after which
    every other token comes in a message of its own. `turns`: it stops after the first message.
    """

    lead: int = 0
    batch: int = 1
    turns: bool = False


class DraftTimes(Protocol):
    """Where a draft's speed is recorded, for all requests that use it. Times are in nanoseconds."""

    @property
    def round_trip_ns(self) -> float: ...

    @property
    def token_ns(self) -> float: ...

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None: ...


@dataclass(frozen=True)
class Draft:
    """A draft model, the stream to its server, and the record of its speed."""

    model: Model
    drafter: Drafter
    times: DraftTimes


@dataclass(frozen=True)
class Opening:
    """What a source may need at the start of a request.

    `prompt`: the bytes of the prompt in the target's tokens. `render` returns the prompt in another model's tokens, or
    raises a `DraftBridgeError`. `memory`: outputs that the `tenant` may see.
    """

    prompt: bytes
    render: Callable[[Model], Rendering]
    draft: Draft | None = None
    confidence_threshold: float = 0.0
    memory: SuffixMemory | None = None
    tenant: str = ""
    clock: Callable[[], int] = perf_counter_ns


class CandidateSource(ABC):
    """Something that proposes how a text goes on. Asking it changes nothing; `observe` and `advance` do.

    A source that takes time, such as a model, works in `advance` and reports where it stands in `state`. `propose` or
    `observe` raises what made it unusable. `evidence_edges` divide its evidence into groups; for each group the bridge
    learns how often candidates are right, and assumes one of `prior_chances` until then.
    """

    name: ClassVar[str]
    takes_time: ClassVar[bool] = False
    evidence_edges: ClassVar[tuple[float, ...]]
    prior_chances: ClassVar[tuple[float, ...]]
    proposed_token_count: int = 0
    compute_ns: int = 0

    @classmethod
    @abstractmethod
    def open(cls, opening: Opening) -> "CandidateSource | None":
        """Returns the source for a request, or None if the request has no use for it."""

    @abstractmethod
    def propose(self, tape: Tape, after: bytes = b"") -> Continuation | None:
        """Returns its best continuation of the tape's text followed by the bytes `after`."""

    @abstractmethod
    def observe(self, outcome: Outcome) -> None:
        """Takes note of what the target committed."""

    @property
    def state(self) -> SourceState | None:
        """Where a source that takes time stands; None if its proposals are there at once."""
        return None

    def start(self, notify: Callable[[], None]) -> None:  # noqa: B027
        """Begins to listen to whatever proposes; `notify` is called when there is news."""

    async def advance(self, tape: Tape, pace: Pace) -> None:  # noqa: B027
        """Lets it work towards the tape's end and beyond."""

    def close(self) -> None:  # noqa: B027
        """Ends its work and frees what it holds. May be called twice."""


def offer_of(vocabulary: Vocabulary, parts: Sequence[Continuation], end_id: int | None = None) -> Offer:
    """Translates continuations, each of which continues the one before it, into candidates.

    A candidate belongs to the part in which its first byte is. `end_id` stands for a proposed end of the text.
    """
    whole = b"".join(part.data for part in parts)
    ids = candidates(vocabulary, whole[:MAX_OFFERED_BYTES])
    if len(whole) > MAX_OFFERED_BYTES or parts[-1].cut:
        ids = ids[:-1]  # the last token may end in the middle of a word
    sources, evidence, begin, offset, index = [], [], 0, 0, 0
    for id_ in ids:
        end = begin + len(vocabulary.token_bytes(id_))
        while begin >= offset + len(parts[index].data):
            offset, index = offset + len(parts[index].data), index + 1
        sources.append(parts[index].source)
        evidence.append(parts[index].evidence_of(begin - offset, end - offset))
        begin = end
    last = parts[-1]
    if last.closes and end_id is not None and begin == len(whole):
        ids.append(end_id)
        sources.append(last.source)
        evidence.append(last.evidence_of(len(last.data), len(last.data) + 1))
    return Offer(tuple(ids), tuple(sources), tuple(evidence))
