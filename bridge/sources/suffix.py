"""Implements prompt lookup: proposes what followed the same tokens earlier in the text."""

from typing import ClassVar

from bridge.sources.source import MAX_OFFERED_BYTES, CandidateSource, Continuation, Opening, own_tokens
from bridge.sources.token_lookup import TokenLookup
from bridge.tape import Tape
from bridge.text.translation import candidates

# The fewest tokens that match where it continues another source's bytes: these may end in the middle of a word.
_MIN_TOKENS_AFTER = 2
# The average bytes of a token.
_TOKEN_BYTES = 4


class SuffixSource(CandidateSource):
    """Proposes what followed the longest match of the text's last tokens, and the confidence in each token of it."""

    name: ClassVar[str] = "suffix"
    evidence_edges: ClassVar[tuple[float, ...]] = (0.15, 0.3, 0.5, 0.7, 0.9, 0.97)
    prior_chances: ClassVar[tuple[float, ...]] = (0.1, 0.22, 0.4, 0.6, 0.8, 0.93, 0.98)

    def __init__(self, tape: Tape) -> None:
        self._vocabulary, self._lookup = tape.vocabulary, TokenLookup(tape.ids)

    @classmethod
    def open(cls, opening: Opening) -> "SuffixSource":
        """Returns a source for the text."""
        return cls(opening.tape)

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        before, min_token_count = (candidates(self._vocabulary, after), _MIN_TOKENS_AFTER) if after else ((), 1)
        if self._vocabulary.spell(before) != after:  # such as bytes that end in the middle of a character
            return None
        ids, confidences = self._lookup.match(max(limit // _TOKEN_BYTES, 1), before, min_token_count)
        return own_tokens(self.name, self._vocabulary, ids, confidences)
