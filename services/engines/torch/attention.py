"""Attention as one operator of torch's, so that the same model can be run as it is, compiled, and exported.

transformers calls `attend` in place of its own attention. What is behind the operator is no concern of the model: the
keys and values of all sequences (`torch_cache`) where it is run, a kernel of another library where it is exported.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What a model's attention is told to use, and the operator's name.
ATTENTION = "draftbridge"
OPERATOR = "draftbridge::attend"


@dataclass(frozen=True)
class Scoring:
    """How queries and keys become weights: scores are multiplied by `scaling`, and limited smoothly to +-`softcap`.

    `sinks` [heads]: a score for nothing at all, which takes its share of the weights (Gemma 2 has the one, GPT-OSS
    the other). `window`: how many tokens back a query sees; 0 for all.
    """

    window: int
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Attention(Protocol):
    """What is behind the operator."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """[1, tokens, heads, value size] for [1, heads, tokens, size]; `key` and `value` may have fewer heads."""
        ...


_active = threading.local()


@contextmanager
def using(attention: Attention) -> Iterator[None]:
    """Puts something behind the operator, for this thread."""
    _active.attention = attention
    try:
        yield
    finally:
        _active.attention = None


_library = torch.library.Library(ATTENTION, "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor key, Tensor value, int layer, int window, float scaling, float? softcap, "
    "Tensor? sinks) -> Tensor"
)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    window: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    found: torch.Tensor = _active.attention.attend(layer, query, key, value, Scoring(window, scaling, softcap, sinks))
    return found


_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake(OPERATOR, lib=_library)  # type: ignore[untyped-decorator]
def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


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
    """What transformers calls. Shapes as in `Attention.attend`. Raises ValueError for a mask of the model's own."""
    if attention_mask is not None:
        if attention_mask.shape[2] != 0:
            raise ValueError("it makes masks of its own")
        # Some models tell of a window in the mask only.
        sliding_window = attention_mask.shape[3]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    out = torch.ops.draftbridge.attend(
        query, key, value, module.layer_idx, sliding_window or 0, float(scaling), softcap, s_aux
    )
    return out, None


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor:
    """What is behind the operator masks; a tensor of no elements tells the window, by its shape [1, 1, 0, window]."""
    return torch.empty(1, 1, 0, local_size or 0)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _window)
