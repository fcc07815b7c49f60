"""Keys and values of all slots, and attention over them for rows of any lengths in one forward.

The tokens of all rows stand behind one another, as one text would. Everything in a model but attention treats each
token by itself, so nothing is filled up and nothing masked out. Attention goes row by row, over the row's own slot.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.engine.engine import Row

# What a model's attention is told to use; see `attend`.
ATTENTION = "draftbridge"

_active = threading.local()


@dataclass(frozen=True)
class Scoring:
    """How queries and keys become weights: scores are multiplied by `scaling`, and limited smoothly to +-`softcap`.

    `sinks` [heads]: a score for nothing at all, which takes its share of the weights (Gemma 2 has the one, GPT-OSS
    the other).
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class SlotCaches:
    """Memory for keys and values by layer, [slots, heads, capacity, head size], set aside when one is first seen."""

    def __init__(self, slot_count: int, capacity: int) -> None:
        self._slot_count, self._capacity = slot_count, capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of a layer; `keys` and `values` [1, heads, tokens, head size] are like what they will hold."""
        if index not in self._layers:
            shapes = [(self._slot_count, like.shape[1], self._capacity, like.shape[3]) for like in (keys, values)]
            # Not filled with zeros: memory that no token has reached is not taken from the system.
            self._layers[index] = (keys.new_empty(shapes[0]), values.new_empty(shapes[1]))
        return self._layers[index]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """Puts the beginning of one slot into another."""
        for tensor in (tensor for pair in self._layers.values() for tensor in pair):
            tensor[target, :, :token_count] = tensor[source, :, :token_count]


class RaggedBatch(Cache):  # type: ignore[misc]  # transformers is not typed
    """What the model takes for its cache, for one forward over the given rows."""

    is_compileable = False

    def __init__(self, caches: SlotCaches, rows: Sequence[Row], device: torch.device) -> None:
        # Not Cache.__init__: it sets up layers of its own. Isinstance checks are all that we want of it.
        self.layers: list[Any] = []
        self._caches = caches
        self._rows = rows
        places = [(row.slot, position) for row in rows for position in _positions(row)]
        self._slots, self._places = torch.tensor(places, device=device).unbind(1)
        self._layer: tuple[torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor:
        """Of each token in its own sequence, [1, tokens]."""
        return self._places[None]

    def __enter__(self) -> "RaggedBatch":
        _active.batch = self
        return self

    def __exit__(self, *error: object) -> None:
        _active.batch = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [1, heads, tokens, head size] into the slots; attention will read them there."""
        self._layer = self._caches.layer(layer_idx, key_states, value_states)
        for held, new in zip(self._layer, (key_states, value_states), strict=True):
            held[self._slots, :, self._places] = new[0].transpose(0, 1)
        return key_states, value_states

    def attend(self, query: torch.Tensor, window: int, scoring: Scoring) -> torch.Tensor:
        """Attention of [1, heads, tokens, head size] over the layer that was updated last; [1, tokens, heads, size]."""
        assert self._layer is not None
        keys, values = self._layer
        outputs, start = [], 0
        for index, row in enumerate(self._rows):
            end, count = row.keep + len(row.token_ids), len(row.token_ids)
            first = max(0, row.keep + 1 - window) if window else 0
            part = slice(first, end)
            outputs.append(
                _attend(
                    query[:, :, start : start + count],
                    keys[row.slot, None, :, part],
                    values[row.slot, None, :, part],
                    self._mask(index, query, keys.shape[1], first, window),
                    scoring,
                )
            )
            start += count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _mask(self, index: int, query: torch.Tensor, heads: int, first: int, window: int) -> torch.Tensor | None:
        """What is added to scores [queries of all heads that share keys, keys from `first` on]; None adds nothing."""
        row = self._rows[index]
        count = len(row.token_ids)
        if count == 1:
            return None
        group = query.shape[1] // heads
        key = (index, window, group)
        if key not in self._masks:
            end = row.keep + count
            seen = torch.arange(first, end, device=query.device)[None, :]
            own = torch.arange(row.keep, end, device=query.device)[:, None]
            hidden = seen > own
            if window:
                hidden |= seen <= own - window
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat(group, 1)
        return self._masks[key]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward, of the longest row."""
        return max(row.keep for row in self._rows)

    def __len__(self) -> int:
        return 0


def _positions(row: Row) -> range:
    return range(row.keep, row.keep + len(row.token_ids))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """One row: query [1, heads, count, size] over [1, key heads, length, size]; [1, count, heads, size].

    Heads that share keys stand below one another as if they were further queries, so that no key is copied.
    """
    heads, count, key_heads = query.shape[1], query.shape[2], keys.shape[1]
    folded = query.reshape(1, key_heads, heads // key_heads * count, query.shape[3])
    if scoring.softcap is None and scoring.sinks is None:
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scoring.scaling)
    else:
        scores = folded @ keys.transpose(2, 3) * scoring.scaling
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores if mask is None else scores + mask
        if scoring.sinks is not None:
            sinks = scoring.sinks.reshape(1, key_heads, -1).repeat_interleave(count, dim=2)[..., None]
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., : keys.shape[2]] @ values
    return out.reshape(1, heads, count, values.shape[3]).transpose(1, 2)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention. Shapes as in `RaggedBatch.attend`."""
    scoring = Scoring(scaling or query.shape[3] ** -0.5, softcap, s_aux)
    return _active.batch.attend(query, sliding_window or 0, scoring), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Rows see to it themselves."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _no_mask)
