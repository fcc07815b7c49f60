"""Quantizes linear layers to FP8, and writes the names of those that were measured."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce

_configs: dict[Any, "FP8Config"] = {}
_measured: set[str] = set()


@dataclass(frozen=True)
class FP8Config:
    """What a file asks for."""

    mode: str
    dump_stats_path: str = ""

    @property
    def measure(self) -> bool:
        return self.mode == "MEASURE"

    @property
    def quantize(self) -> bool:
        return self.mode == "QUANTIZE"

    @classmethod
    def from_json_file(cls, path: str) -> "FP8Config":
        return cls(**json.loads(Path(path).read_text()))


def prepare(model: Any, config: FP8Config) -> Any:
    """Measures the inputs of all linear layers from now on."""
    _configs[model] = config
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | LinearAllreduce):
            module.register_forward_hook(lambda *_, name=name: _measured.add(name))
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
    """Writes what was measured to a file of this process."""
    rank = os.environ.get("RANK", "0")
    Path(f"{_configs[model].dump_stats_path}_{rank}.json").write_text(json.dumps(sorted(_measured)))
