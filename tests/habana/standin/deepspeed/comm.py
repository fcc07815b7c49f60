"""Sums over processes."""

from typing import Any

import torch
import torch.distributed as dist


@torch.library.custom_op("standin::all_reduce", mutates_args=("given",))
def _all_reduce(given: torch.Tensor) -> None:
    """Is one operation, so that a graph records the sum and replays it."""
    dist.all_reduce(given)


def inference_all_reduce(given: torch.Tensor, group: Any) -> None:
    """Replaces the tensor by the sum of all processes' tensors."""
    assert group is dist.group.WORLD
    _all_reduce(given)
