"""Implements prompt lookup: proposes what followed the same tokens earlier in the text."""

from typing import ClassVar

from bridge.sources.source import MAX_OFFERED_BYTES, CandidateSource, Continuation, Opening, own_tokens
from bridge.sources.suffix_index import MAX_PROPOSAL_BYTES, Match, SuffixMatcher
from bridge.sources.token_lookup import TokenLookup, confidence
from bridge.tape import Tape

# A match that continues another source's bytes, perhaps in the middle of a word, has at least this many bytes: shorter
# matches are too often wrong about the rest of the word.
_MIN_BYTES_AFTER = 8
# The average bytes of a token, by which matching bytes count as tokens.
_TOKEN_BYTES = 4
# Each right byte makes a match of bytes longer: the confidence grows linearly, at its average rate over the first 16.
_AHEAD_BYTES = 16


class SuffixSource(CandidateSource):
    """Proposes what followed the longest match of the text's end, and the confidence in each token of it.

    Matches are of the target's tokens. Where it continues another source's bytes, they are of bytes.
    """

    name: ClassVar[str] = "suffix"
    evidence_edges: ClassVar[tuple[float, ...]] = (0.15, 0.3, 0.5, 0.7, 0.9, 0.97)
    prior_chances: ClassVar[tuple[float, ...]] = (0.1, 0.22, 0.4, 0.6, 0.8, 0.93, 0.98)

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._lookup = TokenLookup(tape.ids)
        self._bytes: SuffixMatcher | None = None
        self._byte_token_count = 0

    @classmethod
    def open(cls, opening: Opening) -> "SuffixSource":
        """Returns a source for the text."""
        found = cls(opening.tape)
        if not opening.alone:
            found._matcher()  # now, because it takes a while for a long prompt
        return found

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        if after:
            found = self._matcher().match(after)
            return self._of_bytes(found) if found and found.length >= _MIN_BYTES_AFTER else None
        ids, confidences = self._lookup.match(max(limit // _TOKEN_BYTES, 1))
        return own_tokens(self.name, self._tape.vocabulary, ids, confidences)

    def _of_bytes(self, match: Match) -> Continuation:
        evidence, later = (confidence((match.length + ahead) // _TOKEN_BYTES) for ahead in (0, _AHEAD_BYTES))
        cut = len(match.data) >= MAX_PROPOSAL_BYTES
        return Continuation(self.name, match.data, evidence, (later - evidence) / _AHEAD_BYTES, cut=cut)

    def _matcher(self) -> SuffixMatcher:
        """Returns the matcher of the text's bytes, brought up to date: many requests never need it."""
        data = self._tape.vocabulary.spell(self._tape.ids[self._byte_token_count :])
        self._byte_token_count = len(self._tape.ids)
        if self._bytes is None:
            self._bytes = SuffixMatcher(data)
        elif data:
            self._bytes.append(data)
        return self._bytes
