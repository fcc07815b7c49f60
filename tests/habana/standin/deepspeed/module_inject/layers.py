"""Layers that are divided among processes."""

from typing import Any

import torch

from deepspeed import comm


class LinearAllreduce(torch.nn.Module):
    """A linear layer of which this process has some inputs. The outputs are the sums of all processes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, mp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias, self.mp_group = bias, mp_group

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found = given @ self.weight.T
        comm.inference_all_reduce(found, self.mp_group)
        return found if self.bias is None else found + self.bias
