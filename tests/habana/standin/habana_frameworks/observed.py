"""Implements the stand-in's working parts, and records graphs, steps, shapes, and waits for the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

mark_step_count = 0
# Recorded graphs, and calls that asked not to be recorded.
graph_count = 0
bypass_count = 0

# Calls that prepare FP8.
inference_calls: list[str] = []


def mark_step() -> None:
    """Ends a lazily collected graph. Here operations run at once, so it is only counted."""
    global mark_step_count
    mark_step_count += 1


def wrap_in_hpu_graph(module: Any, max_graphs: int | None = None) -> Any:
    """Records the module's forward once for each set of shapes and other arguments, and replays the record.

    As on a Gaudi, a replay runs no Python: whatever the forward reads besides tensors in place is that of the record.
    The tensors of the first call are the record's inputs, to which a replay copies its own. All replays return the same
    output.
    """
    own = module.forward
    graphs: dict[tuple[Any, ...], tuple[Callable[..., Any], list[torch.Tensor], Any]] = {}

    def forward(*given: Any, bypass_hpu_graphs: bool = False) -> Any:
        global graph_count, bypass_count
        bypass_count += bypass_hpu_graphs
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        key = tuple((one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in given)
        if key in graphs:
            graph, inputs, output = graphs[key]
            for kept, new in zip(inputs, tensors, strict=True):
                kept.copy_(new)
            found = graph(*inputs)
            return output if output is None else output.copy_(found)
        if bypass_hpu_graphs or len(graphs) == max_graphs:
            return own(*given)

        def record(*tensors: torch.Tensor) -> Any:
            left = iter(tensors)
            return own(*(next(left) if isinstance(one, torch.Tensor) else one for one in given))

        graph = make_fx(record)(*tensors)
        graphs[key] = graph, tensors, graph(*tensors)
        graph_count += 1
        return graphs[key][2]

    module.forward = forward
    return module


# The modes of each call of the fused attention kernel: softmax, and whether it recomputes.
fused_calls: list[tuple[str, bool]] = []
_recompute = False


@contextmanager
def sdp_kernel(enable_recompute: bool) -> Iterator[None]:
    """Sets whether the fused attention kernel recomputes."""
    global _recompute
    _recompute = enable_recompute
    yield
    _recompute = False


class FusedSDPA:
    """The fused attention kernel."""

    @staticmethod
    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        dropout: float,
        causal: bool,
        scale: float | None,
        softmax: str = "None",
        recompute: bool | None = None,
        *_: Any,
    ) -> torch.Tensor:
        """Records the modes, which change only speed."""
        fused_calls.append((softmax, _recompute if recompute is None else recompute))
        return scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=True)


class _Operations(TorchDispatchMode):
    def __init__(self, seen: set[tuple[Any, ...]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.add((str(function), *map(_signature, (*args, *(kwargs or {}).values()))))
        return function(*args, **(kwargs or {}))


def _signature(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return tuple(given.shape), str(given.dtype)
    return tuple(map(_signature, given)) if isinstance(given, list | tuple) else str(given)


@contextmanager
def operations() -> Iterator[set[tuple[Any, ...]]]:
    """Yields a set that receives each operation with its shapes and numbers: what a Gaudi compiles something for."""
    seen: set[tuple[Any, ...]] = set()
    with _Operations(seen):
        yield seen


class _Waits(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _WAITING or (name in _MAY_WAIT and _MAY_WAIT[name](args, kwargs or {})):
            self._seen.append(name)
        return function(*args, **(kwargs or {}))


# Functions that need the value of a tensor on the host, or a shape that depends on one.
_WAITING = {
    "item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique",
    "equal", "allclose",
}  # fmt: skip


def _moves(args: Any, kwargs: Any) -> bool:
    targets = (*args[1:], kwargs.get("device"))
    return not kwargs.get("non_blocking") and any(isinstance(one, str | torch.device) for one in targets)


def _selects(args: Any, kwargs: Any) -> bool:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in index)


_MAY_WAIT = {"to": _moves, "__getitem__": _selects, "__setitem__": _selects}


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yields a list that receives the names of functions for which the host waits for the device."""
    seen: list[str] = []
    with _Waits(seen):
        yield seen


PROVIDED = {
    "habana_frameworks.torch.core.hpu_set_env": lambda: inference_calls.append("hpu_set_env"),
    "habana_frameworks.torch.core.hpu_initialize": lambda model, **_: inference_calls.append("hpu_initialize"),
    "habana_frameworks.torch.core.mark_step": mark_step,
    "habana_frameworks.torch.hpu.wrap_in_hpu_graph": wrap_in_hpu_graph,
    "habana_frameworks.torch.hpu.sdp_kernel": sdp_kernel,
    "habana_frameworks.torch.hpex.kernels.FusedSDPA": FusedSDPA,
}
