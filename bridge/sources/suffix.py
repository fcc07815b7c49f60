"""Implements prompt lookup: proposes what followed the same bytes in the text, or in a tenant's earlier output."""

from functools import partial
from typing import ClassVar

from bridge.sources.source import CandidateSource, Continuation, Opening, Outcome
from bridge.sources.suffix_index import MAX_PROPOSAL_BYTES, SuffixMatcher
from bridge.tape import Tape

# A match that continues another source's bytes, perhaps in the middle of a word, has at least this many bytes: shorter
# matches are too often wrong about the rest of the word.
_MIN_BYTES_AFTER = 8
# More than the length of any match.
_CONFIRMED = 100.0


class SuffixSource(CandidateSource):
    """Proposes what followed the longest match of the text's end.

    The evidence is the match's length in bytes, plus `_CONFIRMED` for all candidates but the first: once a short match
    has been right, what follows is nearly always right, too, so it must not be mixed with matches that are not tried.
    """

    name: ClassVar[str] = "suffix"
    evidence_edges: ClassVar[tuple[float, ...]] = (8, 16, 32, *(_CONFIRMED + length for length in (0, 8, 16, 32)))
    prior_chances: ClassVar[tuple[float, ...]] = (0.35, 0.4, 0.7, 0.85, 0.75, 0.65, 0.85, 0.95)

    def __init__(self, drafter: SuffixMatcher) -> None:
        self._drafter = drafter

    @classmethod
    def open(cls, opening: Opening) -> "SuffixSource":
        """Returns a source for the prompt and, if the request has a tenant, the tenant's earlier outputs."""
        if opening.memory and opening.tenant:
            return cls(SuffixMatcher(opening.prompt, elsewhere=partial(opening.memory.match, opening.tenant)))
        return cls(SuffixMatcher(opening.prompt))

    def propose(self, tape: Tape, after: bytes = b"") -> Continuation | None:
        match = self._drafter.match(after)
        if match is None or (after and match.length < _MIN_BYTES_AFTER):
            return None
        cut = len(match.data) >= MAX_PROPOSAL_BYTES
        return Continuation(self.name, match.data, float(match.length), first_gain=_CONFIRMED, cut=cut)

    def observe(self, outcome: Outcome) -> None:
        self._drafter.append(b"".join(outcome.data))
