"""Quantizes linear layers to FP8, and counts what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

measured: list[tuple[Any, str]] = []
finalized: list[Any] = []


@dataclass(frozen=True)
class FP8Config:
    """What a file asks for."""

    mode: str

    @property
    def measure(self) -> bool:
        return self.mode == "MEASURE"

    @property
    def quantize(self) -> bool:
        return self.mode == "QUANTIZE"

    @classmethod
    def from_json_file(cls, path: str) -> "FP8Config":
        return cls(json.loads(Path(path).read_text())["mode"])


def prepare(model: Any, config: FP8Config) -> Any:
    """Measures the inputs of all linear layers from now on."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: measured.append((model, name)))
    return model


def convert(model: Any, config: FP8Config) -> Any:
    """Rounds the weights of all linear layers to FP8."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.abs().max() / 448.0
            rounded = (module.weight / scale).to(torch.float8_e4m3fn).to(module.weight.dtype) * scale
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)
    return model


def finalize_calibration(model: Any) -> None:
    """Writes what was measured."""
    finalized.append(model)
