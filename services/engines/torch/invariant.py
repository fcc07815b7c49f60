"""Batch-invariant forwards: logits depend on the text alone, bit for bit, not on what else is in the forward.

* Tokens, and those whose logits are wanted, are padded to one of a few numbers. oneDNN's product with packed weights
  rounds each row alike for all of them.
* Attention runs in blocks of `_BLOCK` positions that begin at multiples of it, with the cache ending where the block
  does: the same shape for a position in every forward.
* Everything else in a model treats each token separately.

`is_invariant` checks this on the model at start, because libraries differ by processor.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from services.engines.engine import Row, sample_ids
from services.engines.torch.attention import Scoring
from services.engines.torch.cache import SlotCaches, attention, causal_mask
from services.engines.torch.packed import PackedLinear

# The numbers of tokens in a forward. One or two tokens take no less time than four.
SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
_BLOCK = 4


def size_of(count: int) -> int:
    """Returns the number of tokens that `count` of them, 1 to 64, are padded to."""
    return next(size for size in SIZES if size >= count)


def padded(indices: Sequence[int], size: int) -> list[int]:
    """Returns the indices, with the last one repeated up to `size` of them."""
    return [*indices, *[indices[-1]] * (size - len(indices))]


def pieces(rows: Sequence[Row]) -> Iterator[list[tuple[int, Row]]]:
    """Divides rows into forwards of at most 64 tokens. Yields the parts of a forward, each with its row's number."""
    piece: list[tuple[int, Row]] = []
    room = SIZES[-1]
    for number, row in enumerate(rows):
        start = 0
        while start < len(row.token_ids):
            ids = row.token_ids[start : start + room]
            piece.append((number, Row(row.slot, row.keep + start, ids, min(max(row.logits_from - start, 0), len(ids)))))
            start += len(ids)
            room -= len(ids)
            if not room:
                yield piece
                piece, room = [], SIZES[-1]
    if piece:
        yield piece


class BlockBatch:
    """Attention for one forward, in blocks. Tokens after those of the rows are padding."""

    def __init__(self, caches: SlotCaches, rows: Sequence[Row]) -> None:
        self._caches, self._rows = caches, rows
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See `Attention.attend`. Writes the new keys and values into the slots, and reads all from there."""
        keys, values = self._caches.layer(layer, key, value)
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        start = 0
        for row in self._rows:
            end = row.keep + len(row.token_ids)
            own = slice(start, start + len(row.token_ids))
            for held, new in ((keys, key), (values, value)):
                held[row.slot, :, row.keep : end] = new[0, :, own]
                # The mask hides what lies there, but a NaN would spread even with a weight of 0.
                held[row.slot, :, end : -(-end // _BLOCK) * _BLOCK] = 0
            for block in range(row.keep // _BLOCK * _BLOCK, end, _BLOCK):
                low, high = max(block, row.keep), min(block + _BLOCK, end)
                mine = slice(start + low - row.keep, start + high - row.keep)
                first = max(0, block + 1 - scoring.window) if scoring.window else 0
                part = slice(first, block + _BLOCK)
                queries = query.new_zeros(1, query.shape[1], _BLOCK, query.shape[3])
                queries[:, :, low - block : high - block] = query[:, :, mine]
                found = attention(
                    queries,
                    keys[row.slot, None, :, part],
                    values[row.slot, None, :, part],
                    self._mask(query, query.shape[1] // keys.shape[1], first, block, scoring.window),
                    scoring,
                )
                out[:, mine] = found[:, low - block : high - block]
            start = own.stop
        return out

    def _mask(self, like: torch.Tensor, group: int, first: int, block: int, window: int) -> torch.Tensor:
        key = (block, group, window)
        if key not in self._masks:
            self._masks[key] = causal_mask(first, block, block + _BLOCK, window, like).repeat(group, 1)
        return self._masks[key]


@torch.inference_mode()
def is_invariant(model: torch.nn.Module, forward: Callable[[Row], torch.Tensor], vocabulary_size: int) -> bool:
    """Returns whether the model's logits are the same bit for bit in a forward of each size.

    `forward` runs one row in slot 0 and returns its logits. Each packed layer must get all tokens, so that the sizes
    that are compared are all that occur: experts, for example, get some.
    """
    matrices = sum(len(one.shape) > 1 for one in model.parameters())
    if matrices > sum(isinstance(part, torch.nn.Embedding) for part in model.modules()):
        return False  # a product with weights that are not packed
    counts: set[int] = set()

    def count(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        counts.add(given[0].numel() // given[0].shape[-1])

    hooks = [part.register_forward_pre_hook(count) for part in model.modules() if isinstance(part, PackedLinear)]
    try:
        ids = sample_ids(SIZES[-1], vocabulary_size)
        whole = forward(Row(0, 0, ids, 0)).clone()
        for size in SIZES:
            counts.clear()
            found = forward(Row(0, len(ids) - size, ids[-size:], 0))
            if counts != {size} or not torch.equal(found, whole[-size:]):
                return False
    finally:
        for hook in hooks:
            hook.remove()
    return True
