"""Stands in for Intel's DeepSpeed: tensor parallelism of linear layers over processes of this machine, through gloo.

`habana_frameworks` beside it stands in for the device.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors.torch import load_file

from deepspeed.module_inject.layers import LinearAllreduce

_AUTOMATIC = ("self_attn.o_proj", "mlp.down_proj")


def init_distributed(dist_backend: str) -> None:
    """Connects the processes that the environment describes."""
    assert dist_backend == "hccl"
    dist.init_process_group("gloo")


@contextmanager
def OnDevice(dtype: torch.dtype, device: str) -> Iterator[None]:  # noqa: N802, as in the library
    """On "meta", new weights have no data, but computed tables do."""
    if device == "meta":
        with init_empty_weights(include_buffers=False):
            yield
    else:
        yield


def init_inference(
    model: Any,
    *,
    dtype: torch.dtype,
    tensor_parallel: dict[str, int],
    enable_cuda_graph: bool,
    injection_policy: dict[type, tuple[str, ...]],
    checkpoint: str | None = None,
) -> SimpleNamespace:
    """Reads the weights if the model has none, and keeps this process's part of each layer.

    `injection_policy`: the linear layers of each kind of layer whose inputs are divided; others' outputs are. Without
    one, the library finds them itself ("AutoTP").
    """
    assert tensor_parallel == {"tp_size": dist.get_world_size()}
    if checkpoint:
        state: dict[str, torch.Tensor] = {}
        for file in json.loads(Path(checkpoint).read_text())["checkpoints"]:
            state |= load_file(file)
        model.load_state_dict({name: one.to(dtype) for name, one in state.items()}, strict=False, assign=True)
        model.tie_weights()
    injection_policy = injection_policy or {type(model.model.layers[0]): _AUTOMATIC}
    for layer in model.modules():
        for name, linear in [*layer.named_modules()] if type(layer) in injection_policy else []:
            if isinstance(linear, torch.nn.Linear):
                _divide(layer, name, linear, name in injection_policy[type(layer)])
    return SimpleNamespace(module=model)


def _divide(layer: torch.nn.Module, name: str, linear: torch.nn.Linear, by_input: bool) -> None:
    part = linear.weight.chunk(dist.get_world_size(), dim=int(by_input))[dist.get_rank()].contiguous()
    if by_input:
        layer.set_submodule(name, LinearAllreduce(part, linear.bias, dist.group.WORLD))
        return
    linear.weight = torch.nn.Parameter(part, requires_grad=False)
    if linear.bias is not None:
        own = linear.bias.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
        linear.bias = torch.nn.Parameter(own, requires_grad=False)
