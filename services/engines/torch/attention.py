"""Makes attention one torch operator, so that the same model can be run, compiled and exported.

transformers calls `attend` instead of its own attention. `using` sets the implementation of the operator: attention
over the slots (`services.engines.torch.cache`) to run a model, a recorder to export it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# The name of this attention in transformers, and the operator's name in torch.
ATTENTION = "draftbridge"
OPERATOR = "draftbridge::attend"


@dataclass(frozen=True)
class Scoring:
    """How attention weights follow from queries and keys. Scores are multiplied by `scaling`.

    `window`: size of the sliding window in tokens, 0 for none. `softcap`: limits scores smoothly to +-`softcap`
    (Gemma 2). `sinks` [heads]: score of an additional position without a value, which reduces all weights (GPT-OSS).
    """

    window: int
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Attention(Protocol):
    """An implementation of the operator."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Turns [1, heads, tokens, size] into [1, tokens, heads, value size]. Keys and values may have fewer heads."""
        ...


_active = threading.local()


@contextmanager
def using(attention: Attention) -> Iterator[None]:
    """Makes `attention` the implementation of the operator, for this thread."""
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
    """Is called by transformers. Shapes as in `Attention.attend`. Raises ValueError if the model has its own mask."""
    if attention_mask is not None:
        if attention_mask.shape[2] != 0:
            raise ValueError("the model makes its own attention masks")
        # Some models pass the window only to the mask.
        sliding_window = attention_mask.shape[3]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    out = torch.ops.draftbridge.attend(
        query, key, value, module.layer_idx, sliding_window or 0, float(scaling), softcap, s_aux
    )
    return out, None


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor:
    """Replaces the mask by an empty tensor [1, 1, 0, window], whose shape passes the window to `attend`."""
    return torch.empty(1, 1, 0, local_size or 0)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _window)
