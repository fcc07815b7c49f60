"""What an engine is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.sampling import Logits


@dataclass(frozen=True)
class Row:
    """One sequence's part of a forward.

    The slot's cache keeps its first `keep` tokens, drops the rest and takes `token_ids` behind them.
    Logits come back for the positions from `logits_from` (an index into `token_ids`) to the end.
    """

    slot: int
    keep: int
    token_ids: tuple[int, ...]
    logits_from: int


class Engine(Protocol):
    """A model's weights and the caches of `slot_count` sequences."""

    @property
    def name(self) -> str:
        """What runs it: "torch", ..."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def context_length(self) -> int:
        """The longest sequence in tokens."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def slot_count(self) -> int: ...

    @property
    def logit_tolerance(self) -> float:
        """How far the lead of one logit over another may move with the forward that both are computed in."""
        ...

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Runs all rows in one pass; for each, logits [len(token_ids) - logits_from, vocabulary_size].

        The arrays may be overwritten by the next call. Not thread-safe: one thread per engine.
        """
        ...
