"""Defines the port of all sources, which propose how a text continues.

A source proposes bytes, so that it needs no tokenizer but its own, and so that one source can continue another's
bytes. `offer_of` translates the bytes of one or several sources into candidates.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from math import prod
from time import perf_counter_ns
from typing import ClassVar

from bridge.errors import DraftBridgeError
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.ports import Drafter, Pass, TextGrammar
from bridge.sources.ngrams import NgramMemory
from bridge.tape import Tape
from bridge.text.common_prefix import common_prefix_length
from bridge.text.models import Model
from bridge.text.translation import candidates
from bridge.text.vocabulary import Rendering, Vocabulary

# The name of the source that is a draft model. The others propose at once.
DRAFT = "draft"
# The most bytes of a proposal that are translated for one offer: enough candidates for several forwards.
MAX_OFFERED_BYTES = 512
# The most branches of an offer: each is translated, and few more would be right.
_MAX_BRANCHES = 4


@dataclass(frozen=True)
class RunnerUp:
    """What a source would have proposed in place of a token: bytes that follow `data[:start]`, and its probability."""

    start: int
    data: bytes
    confidence: float


@dataclass(frozen=True)
class Continuation:
    """The bytes that a source proposes after the end of the tape.

    `evidence` is the source's own measure of its certainty about the first byte; each byte that is right adds `gain`
    to it. A source with its own tokens also gives the offset in `data` where each of them starts, and its probability:
    `starts`, `confidences`. If they are the target's own, `token_ids` has them, too.
    `closes`: the source proposes that the text ends after `data`. `cut`: the source has more bytes than `data`, which
    may end in the middle of a word. `runners_up`: what may come in place of some of its tokens.
    """

    source: str
    data: bytes
    evidence: float = 1.0
    gain: float = 0.0
    starts: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    closes: bool = False
    cut: bool = False
    runners_up: tuple[RunnerUp, ...] = ()

    def evidence_of(self, begin: int, end: int) -> float:
        """Returns the evidence for `data[begin:end]`, times the probabilities of the tokens that start there."""
        tokens = slice(bisect_left(self.starts, begin), bisect_left(self.starts, end))
        return (self.evidence + self.gain * begin) * prod(self.confidences[tokens])


@dataclass(frozen=True)
class Branch:
    """A candidate in place of that with an index, from the same source."""

    index: int
    token_id: int
    evidence: float


@dataclass(frozen=True)
class Offer:
    """The candidates that can be sent, in the target's ids, each with its source and the source's evidence."""

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    evidence: tuple[float, ...] = ()
    branches: tuple[Branch, ...] = ()

    def part(self, begin: int, end: int | None = None) -> "Offer":
        """Returns the offer of candidates `begin` to `end` only, and their branches."""
        part = slice(begin, end)
        ids, branches = self.token_ids[part], self.branches
        if branches:
            shifted = (replace(one, index=one.index - begin) for one in branches)
            branches = tuple(one for one in shifted if 0 <= one.index < len(ids))
        return Offer(ids, self.sources[part], self.evidence[part], branches)


@dataclass(frozen=True)
class Outcome:
    """A committed pass. `tried`: the candidates that it took along; `data`: the bytes of each of its tokens.

    `tried` has the branches, too. `elapsed_ns`: the time since the pass before; None if that is not its own time: for
    the first, which reads the prompt, for one that came after the target had used up its credit, and for a guest's
    forward of several sequences. `timed_out`: the target waited for candidates for its full patience, and none arrived.
    """

    result: Pass
    tried: Offer
    data: tuple[bytes, ...]
    elapsed_ns: int | None = None
    timed_out: bool = False

    @property
    def accepted_sources(self) -> tuple[str, ...]:
        """Returns the sources of the accepted tokens, with which the pass begins."""
        count = self.result.accepted_token_count
        return self.tried.sources[: count + self.result.branch_accepted]


@dataclass(frozen=True)
class DraftState:
    """How far a draft is with its proposals.

    `lag_token_count`: committed tokens, in its own vocabulary, that it must read before it can propose, without those
    that it has probably cached. `token_bytes`: average bytes of its tokens. `awaited`: a proposal is due. `overdue`:
    the target has waited for it in vain. `runs_ahead`: it works while the target does.
    """

    lag_token_count: int = 1
    token_bytes: float = 4.0
    awaited: bool = False
    overdue: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True)
class DraftPace:
    """The way in which a draft is to work.

    `lead`: the most tokens that it may be ahead of the tape; 0 pauses it. `turns`: it sends them all in one message,
    and then waits for the target; otherwise each token has its own message. It ends a turn early when the product of
    its tokens' probabilities falls below `min_probability`.
    """

    lead: int = 0
    turns: bool = False
    min_probability: float = 0.0


@dataclass(frozen=True)
class Draft:
    """A draft model, the stream to its server, and its estimates, which all requests share.

    `on_use` is called when it takes part in a request, `on_fault` receives the error of one that breaks the contract or
    hangs.
    """

    model: Model
    drafter: Drafter
    times: DraftEstimates
    on_use: Callable[[], object] = lambda: None
    on_fault: Callable[[DraftBridgeError], object] = lambda error: None


@dataclass(frozen=True)
class Opening:
    """The values that a source may need at the start of a request.

    `tape` holds the prompt and, later, what the target commits. `render` returns the prompt in another model's tokens,
    or raises a `DraftBridgeError`. `memory` holds what was learned from outputs; `tenant`: whose output this is, empty
    if nothing may be learned from it. `grammar`: what the text must satisfy. `threads` returns the threads that
    `render` runs in, see `bridge.threads`.
    """

    tape: Tape
    render: Callable[[Model], Rendering]
    confidence_threshold: float = 0.0
    memory: NgramMemory | None = None
    tenant: Hashable = ""
    grammar: TextGrammar | None = None
    threads: Callable[[Model], Executor | None] = lambda _: None
    clock: Callable[[], int] = perf_counter_ns


class CandidateSource(ABC):
    """Proposes how a text continues, which it reads from the tape.

    For one that proposes at once, `evidence_edges` divide its evidence into groups; for each group the bridge learns
    how often candidates are right, and starts from the group's item in `prior_chances`. A draft has these in its
    `DraftEstimates`.
    """

    name: ClassVar[str]
    evidence_edges: ClassVar[tuple[float, ...]]
    prior_chances: ClassVar[tuple[float, ...]]
    proposed_token_count: int = 0
    compute_ns: int = 0

    @abstractmethod
    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        """Returns its best continuation of the tape's bytes followed by `after`, or None.

        Only about the first `limit` bytes will be used. Between two passes, a source that proposes at once is not asked
        again for the same.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Records what the target committed, which the tape already holds."""


def own_tokens(
    name: str, vocabulary: Vocabulary, token_ids: Sequence[int], confidences: Sequence[float]
) -> Continuation | None:
    """Returns what a source proposes in the target's own tokens, up to the first without bytes; None if that is empty.

    `confidences`: the chance of each token.
    """
    tokens = list(takewhile(bool, map(vocabulary.token_bytes, token_ids)))
    if not tokens:
        return None
    return Continuation(
        name,
        b"".join(tokens),
        starts=tuple(accumulate(map(len, tokens[:-1]), initial=0)),
        confidences=tuple(confidences[: len(tokens)]),
        token_ids=tuple(token_ids[: len(tokens)]),
        cut=True,
    )


def offer_of(
    vocabulary: Vocabulary,
    parts: Sequence[Continuation],
    end_id: int | None = None,
    limit_bytes: int = MAX_OFFERED_BYTES,
    *,
    branches: bool = False,
) -> Offer:
    """Translates continuations, each of which continues the one before it, into candidates.

    A single one with `token_ids` needs no translation, so `limit_bytes` does not apply to it.

    A candidate belongs to the part that has its first byte. `end_id` is the candidate for a proposed end of the text.
    With `branches`, candidates of the first part get some.
    """
    if len(parts) == 1 and (own := parts[0].token_ids):
        return Offer(own, (parts[0].source,) * len(own), parts[0].confidences)
    whole = b"".join(part.data for part in parts)
    ids = candidates(vocabulary, whole[:limit_bytes])
    if len(whole) > limit_bytes or parts[-1].cut:
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
    others = _branches(vocabulary, parts[0], ids, limit_bytes) if branches else ()
    return Offer(tuple(ids), tuple(sources), tuple(evidence), others)


def _branches(vocabulary: Vocabulary, part: Continuation, ids: Sequence[int], limit_bytes: int) -> tuple[Branch, ...]:
    """Returns the most probable runners-up as branches of candidates. Translates `limit_bytes` for each at most."""
    found = dict[tuple[int, int], Branch]()
    likely = sorted(part.runners_up, key=lambda one: part.evidence_of(0, one.start) * one.confidence, reverse=True)
    for one in likely[:_MAX_BRANCHES]:
        other = candidates(vocabulary, (part.data[: one.start] + one.data)[:limit_bytes])
        index = common_prefix_length(ids, other)
        if index < min(len(ids), len(other)):
            begin = sum(len(vocabulary.token_bytes(id_)) for id_ in ids[:index])
            evidence = part.evidence_of(begin, one.start) * one.confidence if begin < one.start else one.confidence
            found.setdefault((index, other[index]), Branch(index, other[index], evidence))
    return tuple(found.values())
