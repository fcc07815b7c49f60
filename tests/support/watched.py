"""An engine that records its forwards, and sequences of a scheduler that use it."""

import random
import threading
import time
from collections.abc import Sequence

import numpy as np

from bridge.sampling.sampler import Logits
from services.engines.engine import Row
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from tests.support import tiny

MODEL = tiny.model("byte_level", context_length=4096)


class Watched(tiny.HashEngine):
    """Records every forward; fails where a row has the id `poison`."""

    poison = 13

    def __init__(self, slot_count: int = 4) -> None:
        super().__init__(MODEL, slot_count=slot_count)
        self.forwards: list[list[Row]] = []
        self.copies: list[int] = []
        self.gate = threading.Event()  # each forward waits for it after its start
        self.gate.set()
        self.seconds = 0.0

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.forwards.append(list(rows))
        assert self.gate.wait(60)
        time.sleep(self.seconds)  # stands in for the time of a model's forward
        assert len({row.slot for row in rows}) == len(rows)
        if any(self.poison in row.token_ids for row in rows):
            raise RuntimeError("out of memory")
        return super().forward(rows)

    def copy(self, source: int, target: int, token_count: int) -> None:
        self.copies.append(token_count)
        super().copy(source, target, token_count)

    @property
    def token_count(self) -> int:
        """Returns the number of tokens that went through the model."""
        return sum(len(row.token_ids) for rows in self.forwards for row in rows)


class Holding(Watched):
    """Holds each forward of several rows until `gate` is set again."""

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        if len(rows) > 1:
            self.gate.clear()
        return super().forward(rows)


async def after(scheduler: Scheduler, ids: Sequence[int], extra: Sequence[int] = ()) -> np.ndarray:
    """Returns the logits after `ids` from a new sequence, which stays open."""
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids)
    return (await sequence.forward(extra, np.array)).value


async def drop(scheduler: Scheduler, ids: Sequence[int]) -> np.ndarray:
    """Returns the logits after `ids` from a new sequence, and closes it."""
    sequence = CachedSequence(scheduler)
    sequence.replace(0, ids)
    try:
        return (await sequence.forward((), np.array)).value
    finally:
        sequence.close()


def ids(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 200) for _ in range(count)]
