"""Engines whose forwards can be trees, and a draft whose second choice is right where its first is wrong."""

from collections.abc import Sequence

import numpy as np

from bridge.sampling.sampler import Logits
from bridge.text.models import Model
from services.engines.engine import Row
from tests.support import tiny


class BranchingEngine(tiny.HashEngine):
    """Runs branches, and records how many each forward had."""

    def __init__(self, of: Model, seed: int = 0, slot_count: int = 4) -> None:
        super().__init__(of, seed, slot_count)
        self.branch_counts: list[int] = []
        self.takes_branches = True

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.branch_counts.append(0)
        return super().forward(rows)

    def forward_branches(self, row: Row, branches: Sequence[tuple[int, int]]) -> Logits:
        """See `Branching.forward_branches`."""
        (found,) = super().forward([row])
        held = self._cache[row.slot]
        others = [self.logits([*held[: row.keep + index], id_]) for index, id_ in branches]
        self.branch_counts.append(len(branches))
        return np.concatenate([found, np.array(others, np.float32)])


class SecondBest(tiny.HashEngine):
    """Prefers the second best token of a `HashEngine` with the same seed after one of three texts."""

    def logits(self, ids: Sequence[int]) -> Logits:
        found = super().logits(ids).copy()
        if sum(ids[-3:]) % 3 == 0:
            second, best = np.argsort(found)[-2:]
            found[[second, best]] = found[[best, second]]
        return found
