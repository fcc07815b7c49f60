"""Runs all forwards in one shape, so that logits depend on the text alone, bit for bit.

A matrix product over one row rounds in another order than one over eight, so a logit depends slightly on how many
tokens are in its forward. Here, each position is always computed in the same way: alone in the batch, in the block of
`WIDTH` tokens that begins at a multiple of `WIDTH`, with the cache ending where the block does. Cached positions of a
block are computed again, and a short block is padded; causal attention hides the padding from the positions before it.
Experts do not keep to that shape: each computes those tokens of a block that are routed to it. Blocks are single tokens
then, which leaves nothing to gain from candidates.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from bridge.sampling.sampler import Logits
from services.engines.engine import Engine, Row, check, sample_ids

WIDTH = 16
# How many blocks are compared to find out whether their later tokens matter, with an engine that cannot tell. With
# experts in float32, they did in nine of ten blocks on one processor, and in two of fifteen on another.
_TRIALS = 8


@runtime_checkable
class BatchInvariant(Protocol):
    """An engine that may be able to make logits depend on the text alone, bit for bit, at little cost."""

    def make_invariant(self) -> bool:
        """Tries it. Returns whether `forward` keeps to it from now on, as the engine has checked on this machine."""
        ...

    def routes_tokens(self) -> bool:
        """Returns whether parts of the model get only some tokens of a forward, as experts do."""
        ...


def made_invariant(engine: Engine) -> bool:
    """Makes the engine's logits depend on the text alone if that costs little. Returns whether they do."""
    return engine.logit_tolerance == 0.0 or (isinstance(engine, BatchInvariant) and engine.make_invariant())


def as_served(engine: Engine, deterministic: bool | None) -> Engine:
    """Returns the engine, or one around it, with logits that depend on the text alone if `deterministic` is true.

    None: only if that costs little; false: not, unless they do so by themselves.
    """
    if deterministic is False or made_invariant(engine) or deterministic is None:
        return engine
    return FixedWidthEngine(engine)


class FixedWidthEngine:
    """Wraps an engine. Rows run one after another, because a batch of several would be another shape."""

    logit_tolerance = 0.0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: list[list[int]] = [[] for _ in range(engine.slot_count)]
        self.name, self.device, self.dtype = engine.name, engine.device, engine.dtype
        self.vocabulary_size, self.slot_count = engine.vocabulary_size, engine.slot_count
        self._width = WIDTH if _follows_earlier_tokens_alone(engine) else 1
        self.context_length = engine.context_length // WIDTH * WIDTH
        self.cache_byte_count = engine.cache_byte_count

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        return [self._run(row) for row in rows]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        self._engine.copy(source, target, token_count)
        self._held[target] = self._held[source][:token_count]

    def _run(self, row: Row) -> Logits:
        ids = self._held[row.slot]
        ids[row.keep :] = row.token_ids
        first = row.keep + row.logits_from
        found = [np.empty((0, self.vocabulary_size), np.float32)]
        for start in range(row.keep // self._width * self._width, len(ids), self._width):
            block = ids[start : start + self._width]
            filled = (*block, *[block[-1]] * (self._width - len(block)))
            # All of a block's logits or none, because the shape of the output's matrix product matters as well.
            wanted = first < start + len(block)
            logits = self._engine.forward([Row(row.slot, start, filled, 0 if wanted else self._width)])[0]
            if wanted:
                found.append(logits[max(first - start, 0) : len(block)].copy())
        return np.concatenate(found)


def _follows_earlier_tokens_alone(engine: Engine) -> bool:
    """Returns whether the logits of a block's first tokens are the same, bit for bit, whatever its last ones are."""
    if isinstance(engine, BatchInvariant) and engine.routes_tokens():
        return False
    ids = sample_ids(WIDTH * (_TRIALS + 1), engine.vocabulary_size)
    for trial in range(_TRIALS):
        start, kept = trial * WIDTH, 1 + trial * (WIDTH - 2) // (_TRIALS - 1)
        block = ids[start : start + WIDTH]
        other = block[:kept] + ids[start + WIDTH + kept : start + 2 * WIDTH]
        one, two = (engine.forward([Row(0, 0, tuple(each), 0)])[0][:kept].copy() for each in (block, other))
        if not np.array_equal(one, two):
            return False
    return True
