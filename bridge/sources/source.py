"""The port behind which everything is that can guess how a text goes on.

A source proposes bytes, so that it needs to know no tokenizer but its own, and so that one source can continue
another's bytes in the middle of a word. `offer_of` translates what one or several sources propose into candidates.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter_ns
from typing import ClassVar, Protocol

from bridge.models import Model
from bridge.ports import Drafter, Pass, Proposal
from bridge.suffix_memory import SuffixMemory
from bridge.tape import Tape
from bridge.translation import candidates
from bridge.vocabulary import Rendering, Vocabulary

# A token is taken to have at most this many bytes where a number of tokens limits a number of bytes.
_MAX_TOKEN_BYTES = 8


@dataclass(frozen=True)
class Continuation:
    """Bytes that a source proposes after the tape's end.

    `evidence` is the source's own measure of how sure it is, such as the length of a match. A source with tokens of
    its own also gives the offset in `data` where each of them starts, and its probability: `starts`, `confidences`.
    `closes`: the source proposes that the text ends after `data`. `cut`: the source knows more than `data`, which may
    stop in the middle of a word.
    """

    source: str
    data: bytes
    evidence: float = 1.0
    starts: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    closes: bool = False
    cut: bool = False

    def evidence_of(self, begin: int, end: int) -> float:
        """The evidence for `data[begin:end]`: `evidence` times the probabilities of the tokens that start there."""
        tokens = slice(bisect_left(self.starts, begin), bisect_left(self.starts, end))
        return self.evidence * prod(self.confidences[tokens])


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

    `elapsed_ns`: time since the pass before; 0 for the first, which reads the prompt. `timed_out`: the target waited
    for candidates as long as it was told to, and none came.
    """

    result: Pass
    tried: Offer
    data: tuple[bytes, ...]
    elapsed_ns: int = 0
    timed_out: bool = False


@dataclass(frozen=True)
class SourceState:
    """Where a source stands that takes time to propose, such as a model.

    `lag_token_count`: tokens that it reads before it can propose. `token_bytes`: bytes of its tokens on average;
    `awaited`: it is about to propose. `overdue`: the
    target has waited for it in vain. `stale`: what it works on is of no use any more. `runs_ahead`: it works while
    the target does.
    """

    lag_token_count: int = 1
    token_bytes: float = 4.0
    awaited: bool = False
    overdue: bool = False
    stale: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True)
class Pace:
    """How a source that takes time is to work: up to `lead` tokens ahead of the tape, 0 to leave it alone.

    It sends the first `batch` of them at once and every other one by itself. In `turns` it rests after the first.
    """

    lead: int = 0
    batch: int = 1
    turns: bool = False

    def within(self, max_tokens: int) -> "Pace":
        """The same with a lead of at most `max_tokens`."""
        return replace(self, lead=min(self.lead, max_tokens))


class DraftTimes(Protocol):
    """Where a draft's speed is recorded, for all requests that use it."""

    @property
    def round_trip_ns(self) -> float: ...

    @property
    def token_ns(self) -> float: ...

    def observe_proposal(self, proposal: Proposal, round_trip_ns: int | None, ahead: bool) -> None: ...


@dataclass(frozen=True)
class Opening:
    """What a source may need at the start of a request.

    `prompt`: the bytes of the prompt in the target's tokens. `drafter`, `draft_model`, `draft_prompt`, `draft_times`:
    the draft, its prompt and where its speed is recorded, if there is one. `memory`: outputs that the `tenant` may see.
    """

    prompt: bytes
    drafter: Drafter | None = None
    draft_model: Model | None = None
    draft_prompt: Rendering | None = None
    draft_times: DraftTimes | None = None
    confidence_threshold: float = 0.0
    memory: SuffixMemory | None = None
    tenant: str = ""
    clock: Callable[[], int] = perf_counter_ns


class CandidateSource(Protocol):
    """Something that can guess. Asking it changes nothing; it learns from `observe` and works in `advance`.

    `evidence_edges` divide its evidence into groups, for which the bridge learns how often candidates are right;
    `prior_chances` is what it assumes for each group until then.
    """

    name: ClassVar[str]
    evidence_edges: ClassVar[tuple[float, ...]]
    prior_chances: ClassVar[tuple[float, ...]]
    proposed_token_count: int
    compute_ns: int

    @property
    def state(self) -> SourceState | None:
        """Where a source that takes time stands; None for one whose proposals are there at once."""
        ...

    def start(self, notify: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """Begins to listen to whatever proposes. `notify` reports news, `fail` what makes the source unusable."""
        ...

    def propose(self, tape: Tape, after: bytes = b"") -> Continuation | None:
        """Its best continuation of the tape's text and the bytes `after`."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Takes note of what the target committed, and of what became of the source's candidates."""
        ...

    async def advance(self, tape: Tape, pace: Pace) -> None:
        """Lets it work towards the tape's end and beyond."""
        ...

    def close(self) -> None:
        """Ends its work and frees what it holds."""
        ...


def offer_of(
    vocabulary: Vocabulary, parts: Sequence[Continuation], max_tokens: int, end_id: int | None = None
) -> Offer:
    """Translates continuations, each of which continues the one before it, into at most `max_tokens` candidates.

    A candidate belongs to the part in which its first byte is. `end_id` stands for a proposed end of the text.
    """
    limit = _MAX_TOKEN_BYTES * (max_tokens + 1)
    whole = b"".join(part.data for part in parts)
    data = whole[:limit]
    ids = candidates(vocabulary, data)
    if len(whole) > limit or parts[-1].cut:
        ids = ids[:-1]  # the last token may end in the middle of a word
    sources, evidence, begin, offset, index = [], [], 0, 0, 0
    for id_ in ids[:max_tokens]:
        end = begin + len(vocabulary.token_bytes(id_))
        while begin >= offset + len(parts[index].data):
            offset, index = offset + len(parts[index].data), index + 1
        part = parts[index]
        sources.append(part.source)
        evidence.append(part.evidence_of(begin - offset, end - offset))
        begin = end
    if parts[-1].closes and end_id is not None and begin == len(whole) and len(sources) < max_tokens:
        last = parts[-1]
        return Offer(
            (*ids, end_id), (*sources, last.source), (*evidence, last.evidence_of(len(last.data), len(last.data) + 1))
        )
    return Offer(tuple(ids[: len(sources)]), tuple(sources), tuple(evidence))
