"""Implements prompt lookup: proposes what followed the same bytes in the text, or in a tenant's earlier output."""

from typing import ClassVar

from bridge.sources.source import CandidateSource, Continuation, Opening, Outcome
from bridge.sources.suffix_index import MAX_PROPOSAL_BYTES, SuffixMatcher
from bridge.sources.suffix_memory import suffix_drafter
from bridge.tape import Tape

# A match that continues another source's bytes, perhaps in the middle of a word, has at least this many bytes: shorter
# matches are too often wrong about the rest of the word.
_MIN_BYTES_AFTER = 8
# The lengths of matches that are counted apart, in bytes, and a number greater than the length of any match.
_LENGTHS, _CONFIRMED = (4.0, 8.0, 16.0, 32.0), 100.0


class SuffixSource(CandidateSource):
    """Proposes what followed the longest match of the text's end.

    The evidence is the match's length in bytes, plus `_CONFIRMED` for all candidates but the first: once a short match
    has been right, what follows is nearly always right, too, so it must not be mixed with matches that are not tried.
    """

    name: ClassVar[str] = "suffix"
    evidence_edges: ClassVar[tuple[float, ...]] = (*_LENGTHS, *(_CONFIRMED + length for length in (0, *_LENGTHS)))
    prior_chances: ClassVar[tuple[float, ...]] = (0.15, 0.35, 0.4, 0.7, 0.85, 0.5, 0.75, 0.65, 0.85, 0.95)

    def __init__(self, drafter: SuffixMatcher) -> None:
        self._drafter = drafter

    @classmethod
    def open(cls, opening: Opening) -> "SuffixSource":
        """Returns a source for the prompt and, if the request has a tenant, the tenant's earlier outputs."""
        return cls(suffix_drafter(opening.prompt, opening.memory, opening.tenant))

    def propose(self, tape: Tape, after: bytes = b"") -> Continuation | None:
        match = self._drafter.match(after)
        if after and (match is None or match.length < _MIN_BYTES_AFTER):
            return None
        match = match or self._drafter.recent()
        if match is None:
            return None
        cut = len(match.data) >= MAX_PROPOSAL_BYTES
        return Continuation(self.name, match.data, float(match.length), first_gain=_CONFIRMED, cut=cut)

    def observe(self, outcome: Outcome) -> None:
        self._drafter.append(b"".join(outcome.data))
