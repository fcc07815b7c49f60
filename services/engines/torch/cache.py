"""The keys and values of all slots, and attention over them for rows of any lengths in one forward.

The tokens of all rows are concatenated like one text. Only attention relates tokens to each other, so the rest of the
model needs no padding and no masks. Attention runs row by row, over the row's own slot.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.engines.engine import Row
from services.engines.torch.attention import Scoring


class SlotCaches:
    """Keys and values by layer, [slots, heads, capacity, head size], allocated when a layer first runs."""

    def __init__(self, slot_count: int, capacity: int) -> None:
        self._slot_count, self.capacity = slot_count, capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values, allocated if needed with the sizes and dtype of the given ones."""
        if index not in self._layers:
            shapes = [(self._slot_count, like.shape[1], self.capacity, like.shape[3]) for like in (keys, values)]
            # Uninitialized, because the system provides memory only when tokens are written to it.
            self._layers[index] = (keys.new_empty(shapes[0]), values.new_empty(shapes[1]))
        return self._layers[index]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """Copies the first `token_count` tokens of a slot to another."""
        for tensor in (tensor for pair in self._layers.values() for tensor in pair):
            tensor[target, :, :token_count] = tensor[source, :, :token_count]

    def repeat(self, slot: int, token_count: int, end: int) -> None:
        """Fills a slot up to position `end` with copies of its first `token_count` tokens."""
        for tensor in (tensor for pair in self._layers.values() for tensor in pair):
            for start in range(token_count, end, token_count):
                count = min(token_count, end - start)
                tensor[slot, :, start : start + count] = tensor[slot, :, :count]


@contextmanager
def branched(
    held: Sequence[torch.Tensor], new: Sequence[torch.Tensor], slot: int, position: int, token: int
) -> Iterator[None]:
    """Replaces what a slot holds at a position by that of a token, during the context.

    `held`, `new`: keys and values of all slots, and of the forward's tokens [1, heads, tokens, size].
    """
    before = [one[slot, :, position].clone() for one in held]
    for one, other in zip(held, new, strict=True):
        one[slot, :, position] = other[0, :, token]
    try:
        yield
    finally:
        for one, kept in zip(held, before, strict=True):
            one[slot, :, position] = kept


class RaggedBatch:
    """Attention for one forward over the given rows. Tokens after those of the rows are padding.

    `branches`, of a single row: see `Branching.forward_branches`. Their tokens follow those of the row.
    """

    def __init__(self, caches: SlotCaches, rows: Sequence[Row], branches: Sequence[tuple[int, int]] = ()) -> None:
        self._caches, self._rows, self._branches = caches, rows, branches
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See `Attention.attend`. Writes the new keys and values into the slots, and reads all from there."""
        keys, values = self._caches.layer(layer, key, value)
        outputs, start = [], 0
        for index, row in enumerate(self._rows):
            end, count = row.keep + len(row.token_ids), len(row.token_ids)
            own = slice(start, start + count)
            keys[row.slot, :, row.keep : end] = key[0, :, own]
            values[row.slot, :, row.keep : end] = value[0, :, own]
            first = max(0, row.keep + 1 - scoring.window) if scoring.window else 0
            part = slice(first, end)
            mask = self._mask(index, query, keys.shape[1], first, scoring.window)
            held = keys[row.slot, None, :, part], values[row.slot, None, :, part]
            outputs.append(attention(query[:, :, own], *held, mask, scoring))
            start += count
        for index, _ in self._branches:
            row = self._rows[0]
            end = row.keep + index + 1
            part = slice(max(0, end - scoring.window) if scoring.window else 0, end)
            with branched((keys, values), (key, value), row.slot, end - 1, start):
                held = keys[row.slot, None, :, part], values[row.slot, None, :, part]
                outputs.append(attention(query[:, :, start : start + 1], *held, None, scoring))
            start += 1
        if start < query.shape[2]:
            outputs.append(query.new_zeros(1, query.shape[2] - start, query.shape[1], value.shape[3]))
        # The operator must return a new contiguous tensor, as `_shape` declares.
        return torch.cat(outputs, dim=1)

    def _mask(self, index: int, query: torch.Tensor, heads: int, first: int, window: int) -> torch.Tensor | None:
        """Returns the mask to add to scores [queries of all heads that share keys, keys from `first`], or None."""
        row = self._rows[index]
        count = len(row.token_ids)
        if count == 1:
            return None
        group = query.shape[1] // heads
        key = (index, window, group)
        if key not in self._masks:
            self._masks[key] = causal_mask(first, row.keep, row.keep + count, window, query).repeat(group, 1)
        return self._masks[key]


class TokenBatch:
    """Attention for one forward that treats each token separately: shapes do not depend on rows, as graphs require.

    `slots`, `positions` [tokens]: those of each token. Attention reads the first `length` positions of each slot.
    """

    def __init__(self, caches: SlotCaches, slots: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        self._caches, self._slots, self._positions, self._length = caches, slots, positions, length

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See `Attention.attend`. Writes the new keys and values into the slots, and reads all from there."""
        keys, values = self._caches.layer(layer, key, value)
        keys[self._slots, :, self._positions] = key[0].transpose(0, 1)
        values[self._slots, :, self._positions] = value[0].transpose(0, 1)
        own = self._positions[:, None]
        seen = torch.arange(self._length, device=query.device)[None, :]
        hidden = seen > own
        if scoring.window:
            hidden = hidden | (seen <= own - scoring.window)
        # Memory that no token was written to may contain NaN, which would spread even with a weight of 0.
        held = [
            tensor[self._slots, :, : self._length].masked_fill(hidden[:, None, :, None], 0.0)
            for tensor in (keys, values)
        ]
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, float("-inf"))
        single = query[0].transpose(0, 1)[:, :, None]
        out = attention(single, held[0], held[1], mask[:, None, None], scoring)
        return out.transpose(0, 1)


class ByteCounter:
    """Implements `Attention`: counts the bytes of one token's keys and values in all layers."""

    def __init__(self) -> None:
        self.byte_count = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Returns zeros in the shape of `Attention.attend`."""
        self.byte_count += (key.nbytes + value.nbytes) // key.shape[2]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def causal_mask(
    first: int, begin: int, end: int, window: int, like: torch.Tensor, last: int | None = None
) -> torch.Tensor:
    """Returns what to add to scores [queries from `begin` to `end`, keys from `first` to `last`], as `like` is.

    `last`: `end` if None. `window`: size of the sliding window in tokens, 0 for none.
    """
    seen = torch.arange(first, end if last is None else last, device=like.device)[None, :]
    own = torch.arange(begin, end, device=like.device)[:, None]
    hidden = seen > own
    if window:
        hidden |= seen <= own - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Computes attention of query [rows, heads, count, size] over keys and values [rows, key heads, length, size].

    Returns [rows, count, heads, size]. Heads that share keys are treated as additional queries of one head, so that no
    key is copied.
    """
    rows, heads, count, key_heads = *query.shape[:3], keys.shape[1]
    folded = query.reshape(rows, key_heads, heads // key_heads * count, query.shape[3])
    if scoring.softcap is None and scoring.sinks is None:
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scoring.scaling)
    else:
        scores = folded @ keys.transpose(2, 3) * scoring.scaling
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores if mask is None else scores + mask
        if scoring.sinks is not None:
            sinks = scoring.sinks.reshape(1, key_heads, -1).repeat_interleave(count, dim=2)[..., None]
            scores = torch.cat([scores, sinks.to(scores.dtype).expand(rows, -1, -1, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., : keys.shape[2]] @ values
    return out.reshape(rows, heads, count, values.shape[3]).transpose(1, 2)
