"""Proposes the bytes that a request's grammar leaves no choice about."""

from typing import ClassVar

from bridge.ports import TextGrammar
from bridge.sources.source import MAX_OFFERED_BYTES, CandidateSource, Continuation, Opening


class GrammarSource(CandidateSource):
    """Proposes forced bytes. They are always right, but the target may spell them in other tokens.

    That happens mostly at their end, where a token may also contain what follows. So the evidence for a token is the
    number of forced bytes from its start. `SourceSet` moves the grammar, which all sources share.
    """

    name: ClassVar[str] = "grammar"
    evidence_edges: ClassVar[tuple[float, ...]] = (1.5, 2.5, 4.5, 8.5)
    prior_chances: ClassVar[tuple[float, ...]] = (0.8, 0.85, 0.93, 0.97, 0.98)

    def __init__(self, grammar: TextGrammar) -> None:
        self._grammar = grammar

    @classmethod
    def open(cls, opening: Opening) -> "GrammarSource | None":
        """Returns the source, or None for a request without a grammar."""
        return cls(opening.grammar) if opening.grammar else None

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        data, closes = self._grammar.forced(after, MAX_OFFERED_BYTES)
        evidence = float(len(data)) + (MAX_OFFERED_BYTES if closes else 0)  # nothing can follow in the last token
        return Continuation(self.name, data, evidence, -1.0, closes=closes, cut=len(data) == MAX_OFFERED_BYTES)
