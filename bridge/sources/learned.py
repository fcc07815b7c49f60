"""Proposes the tokens that mostly followed the same few tokens in a tenant's earlier outputs."""

from collections.abc import Hashable
from typing import ClassVar

from bridge.sources.ngrams import MAX_LENGTH, NgramMemory
from bridge.sources.source import MAX_OFFERED_BYTES, CandidateSource, Continuation, Opening, Outcome, own_tokens
from bridge.tape import Tape

# The most tokens of a proposal, and the chance that all are right below which it ends.
_MAX_TOKENS, _MIN_CHANCE = 24, 0.02
# The average bytes of a token.
_TOKEN_BYTES = 4


class LearnedSource(CandidateSource):
    """Proposes from a tenant's table, and adds to it what the target commits."""

    name: ClassVar[str] = "learned"
    evidence_edges: ClassVar[tuple[float, ...]] = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    prior_chances: ClassVar[tuple[float, ...]] = (0.1, 0.18, 0.27, 0.37, 0.58, 0.83, 0.95)

    def __init__(self, tape: Tape, memory: NgramMemory, tenant: Hashable) -> None:
        self._tape, self._memory = tape, memory
        self._key = tenant, tape.vocabulary.sha256

    @classmethod
    def open(cls, opening: Opening) -> "LearnedSource | None":
        """Returns the source, or None for a request without a tenant, or a bridge without memory for outputs."""
        memory = opening.memory
        return cls(opening.tape, memory, opening.tenant) if memory and opening.tenant else None

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        if after:
            return None
        table, end, chance = self._memory.open(*self._key), self._tape.ids[-MAX_LENGTH:], 1.0
        ids, confidences = list[int](), list[float]()
        while len(ids) < min(_MAX_TOKENS, limit // _TOKEN_BYTES) and (found := table.following(end)):
            id_, likely = found
            chance *= likely
            if chance < _MIN_CHANCE:
                break
            ids.append(id_)
            confidences.append(likely)
            end = [*end, id_][-MAX_LENGTH:]
        return own_tokens(self.name, self._tape.vocabulary, ids, confidences)

    def observe(self, outcome: Outcome) -> None:
        count = len(outcome.result.token_ids)
        ids = self._tape.ids[-count - MAX_LENGTH :]
        self._memory.open(*self._key).learn(ids, len(ids) - count)
