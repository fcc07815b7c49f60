"""Keeps the keys and values of all slots in optimum-habana's models, and decides which of them a token attends to.

optimum-habana's attention writes new keys and values through a module of each layer, `k_cache` and `v_cache`, at
`token_idx - 1`, and attends to all that the module returns. Here both modules are `SlotCache`, and `token_idx` counts
cells of all slots (`services.engines.habana.shapes`). A rejected token needs no cleaning up: no mask shows its cell
before another token has overwritten it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from services.engines.habana.shapes import Shape

# optimum-habana's function that makes masks, which each module of a model family imports.
_MASK_FUNCTION = "_gaudi_prepare_4d_causal_attention_mask"


class Attended:
    """The cells that a pass reads, and the masks over them.

    `slots`, `positions` [width]: those of each token. `slot` [1]: the slot that the pass reads if the shape is `alone`.
    """

    def __init__(
        self, shape: Shape, slot_count: int, slots: torch.Tensor, positions: torch.Tensor, slot: torch.Tensor
    ) -> None:
        self.shape, self._slot_count = shape, slot_count
        self._slots, self._positions = slots[:, None], positions[:, None]
        self._range = torch.arange(shape.length, device=slots.device)
        self.cells = self._range * slot_count + slot if shape.alone else None
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the keys or values that are read, from [1, heads, cells, size]."""
        if self.cells is not None:
            return cache.index_select(2, self.cells)
        return cache[:, :, : self.shape.length * self._slot_count]

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns what is added to scores [1, 1, width, read cells]. `window`: sliding window in tokens, 0 for none."""
        if (window, dtype) not in self._masks:
            positions = self._range[None]
            if not self.shape.alone:
                # Arranged as the cells are, without divisions, which are slow on integers.
                grid = (self.shape.length, self._slot_count)
                positions = self._range[:, None].expand(grid).reshape(1, -1)
            visible = positions <= self._positions
            if window:
                visible = visible & (positions > self._positions - window)
            if not self.shape.alone:
                owners = torch.arange(self._slot_count, device=self._range.device)
                visible = visible & (owners[None].expand(grid).reshape(1, -1) == self._slots)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[window, dtype] = hidden.masked_fill(~visible, torch.finfo(dtype).min)[None, None]
        return self._masks[window, dtype]


class Probe:
    """Replaces `Attended` in the first forward, of one token without cache. Records which windows masks ask for."""

    def __init__(self, device: str) -> None:
        self.windows: set[int] = set()
        self._device = device

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a mask that shows the token to itself."""
        self.windows.add(window)
        return torch.zeros(1, 1, 1, 1, dtype=dtype, device=self._device)


class _Active(threading.local):
    attended: Attended | Probe | None = None


_active = _Active()


@contextmanager
def attending(attended: Attended | Probe) -> Iterator[None]:
    """Makes forwards of this thread use these cells and masks."""
    _active.attended = attended
    try:
        yield
    finally:
        _active.attended = None


class SlotCache(torch.nn.Module):
    """The keys or the values of one layer, for all slots: [1, heads, cells, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor | None = None
        self.like: torch.Tensor | None = None

    @property
    def token_byte_count(self) -> int:
        """The bytes of one token, known after the probe."""
        assert self.like is not None
        return self.like.nbytes

    def allocate(self, cell_count: int) -> None:
        """Reserves the memory. Zeros, because what masks hide must still be finite."""
        assert self.like is not None
        _, heads, _, size = self.like.shape
        self.cache = self.like.new_zeros(1, heads, cell_count, size)

    def forward(self, new: torch.Tensor, dim: int, token_idx: torch.Tensor) -> torch.Tensor:
        """Is called by optimum-habana. Writes the keys or values of a pass, and returns all that it reads."""
        attended = _active.attended
        if isinstance(attended, Attended):
            assert self.cache is not None
            self.cache.index_copy_(2, token_idx - 1, new)
            return attended.of(self.cache)
        self.like = new
        return new

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies cells: indices [tokens]."""
        assert self.cache is not None
        self.cache.index_copy_(2, target, self.cache.index_select(2, source))

    def get_shape(self) -> None:
        """Is called by optimum-habana for its own bookkeeping, which is not used here."""


class Past(tuple[tuple[int, int, int, int], ...]):
    """Passed to optimum-habana as one layer's past, so that attention makes tables of positions with `capacity` rows.

    Most classes ask for a shape's last but one number. Gemma's asks for the length that the past has for new tokens.
    """

    capacity: int

    @classmethod
    def of(cls, capacity: int) -> "Past":
        """Returns the past of a layer in a cache of `capacity` tokens for each slot."""
        past = cls(((1, 1, capacity, 1),) * 2)
        past.capacity = capacity
        return past

    def get_usable_length(self, new: int, layer: int | None = None) -> int:
        """Returns the length that gives `capacity` with `new` tokens more."""
        return self.capacity - new


def install(model: Any) -> list[SlotCache]:
    """Replaces the caches and masks of an optimum-habana model. Returns the caches, none if the model has others.

    Layers with equal tables of positions share one afterwards. The model is usable only inside `attending` afterwards.
    """
    caches = []
    tables: dict[tuple[type, tuple[float, ...]], torch.nn.Module] = {}
    for module in model.modules():
        if hasattr(module, "k_cache") and hasattr(module, "v_cache"):
            module.k_cache, module.v_cache = SlotCache(), SlotCache()
            caches += [module.k_cache, module.v_cache]
        if hasattr(module, "rotary_emb"):
            # Each layer has made the same table of sines and cosines: gigabytes in total if the context is long.
            table = module.rotary_emb
            module.rotary_emb = tables.setdefault((type(table), tuple(table.inv_freq.tolist())), table)
    family = sys.modules[type(model).__module__]
    if not hasattr(family, _MASK_FUNCTION):
        return []
    setattr(family, _MASK_FUNCTION, _mask)
    return caches


def _mask(given: Any, shape: Any, embeds: torch.Tensor, past: int, sliding_window: int | None = None) -> torch.Tensor:
    assert _active.attended is not None
    return _active.attended.mask(sliding_window or 0, embeds.dtype)
