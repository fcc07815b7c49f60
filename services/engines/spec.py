"""Declares what an engine supports (`EngineSpec`) and the options that it is opened with (`EngineOptions`)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import InvalidField, UnusableModel
from services.engines.cpu import surely_on_cpu
from services.engines.openmp import load_torch
from services.store.cache import Report

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine


class Dtype(StrEnum):
    """Data type that a model computes in. `auto` lets the engine choose."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Weights(StrEnum):
    """Storage format of weights. `auto` lets the engine choose, `full` neither quantizes nor rearranges them."""

    AUTO = "auto"
    FULL = "full"
    REPACKED = "repacked"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class GaudiOptions:
    """Options of the `habana` engine, with the names of optimum-habana's text-generation example.

    `services.config.ModelServerConfig` describes them.
    """

    use_hpu_graphs: bool = True
    limit_hpu_graphs: bool = False
    max_graphs: int | None = None
    bucket_size: int = 128
    bucket_internal: bool = False
    attn_softmax_bf16: bool = False
    use_flash_attention: bool = False
    flash_attention_recompute: bool = False
    flash_attention_fast_softmax: bool = False
    quant_config: Path | None = None


@dataclass(frozen=True)
class EngineOptions:
    """Options of engines. `threads`: CPU threads, None for one per core. `cache_byte_limit`: memory for the keys
    and values of all `slot_count` sequences, in bytes. `trusted`: the model's directory may run code.
    `gaudi`: options of the habana engine alone."""

    device: str = "auto"
    dtype: Dtype = Dtype.AUTO
    weights: Weights = Weights.AUTO
    compile: bool = False
    threads: int | None = None
    slot_count: int = 8
    cache_byte_limit: int = 2 << 30
    trusted: bool = False
    gaudi: GaudiOptions = GaudiOptions()

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU. "auto" is the CPU unless torch can use a GPU."""
        if self.device != "auto" or surely_on_cpu(self.device):
            return surely_on_cpu(self.device)  # without torch, which takes seconds to load
        load_torch()
        from torch.cuda import is_available

        return not is_available()


@dataclass(frozen=True)
class EngineSpec:
    """One engine: what it supports, what it needs, how a model is prepared and opened.

    `runs`, `devices`: texts for help and documentation. `dtypes`, `weights`: values of `--dtype` and `--weights`
    besides `auto`. `modules`: modules that must be installed; `install`: how to install them. `prepare` downloads and
    converts a model, and returns the path that `open` reads. `reads`: the kind of files; `--engine auto` compares only
    engines of one kind, because those of another would change the weights. `reason_to_skip` returns why `--engine auto`
    skips this engine for a model, or "". `check_device` raises `UnusableModel` for a value of `--device` that is not
    there, before a model is prepared for it. `trusts`: it can run code of a model's directory. `for_gaudi`:
    `EngineOptions.gaudi` applies to it. `follows`: whether this process only computes a part of a model that another
    one serves; then `open` does not return. `auto_weights`: the meaning of `--weights auto` with `--engine auto`.
    `try_file` tries in other processes whether the engine runs a prepared file, and remembers what it finds; it raises
    `UnusableModel` if not. None: only opening the file shows that.
    """

    name: str
    runs: str
    devices: str
    prepare: Callable[[str, EngineOptions, Report], Path]
    open: Callable[[Path, EngineOptions], "Engine"]
    dtypes: tuple[Dtype, ...] = ()
    weights: tuple[Weights, ...] = ()
    modules: tuple[str, ...] = ()
    install: str = ""
    compiles: bool = False
    trusts: bool = False
    for_gaudi: bool = False
    follows: Callable[[], bool] = lambda: False
    reads: str = "transformers"
    reason_to_skip: Callable[[str, EngineOptions], str] = lambda model, options: ""
    check_device: Callable[[str], None] = lambda device: None
    auto_weights: Weights = Weights.AUTO
    try_file: Callable[[Path, EngineOptions, Report], None] | None = None

    @property
    def installed(self) -> bool:
        """Whether all modules that the engine needs can be imported."""
        return all(find_spec(module) for module in self.modules)

    def check(self, options: EngineOptions) -> None:
        """Raises `InvalidField` for unsupported options, `UnusableModel` if the engine is not installed."""
        by = f"with --engine {self.name}"
        if options.dtype not in (Dtype.AUTO, *self.dtypes):
            raise InvalidField("--dtype", f"{_either(Dtype.AUTO, *self.dtypes)} {by}", options.dtype.value)
        if options.weights not in (Weights.AUTO, *self.weights):
            raise InvalidField("--weights", f"{_either(Weights.AUTO, *self.weights)} {by}", options.weights.value)
        if options.compile and not self.compiles:
            raise InvalidField("--compile", f"left out {by}, which does not compile", "--compile")
        if options.trusted and not self.trusts:
            raise InvalidField("--trust-model", f"left out {by}, which runs no code of models", "--trust-model")
        set_ = [one.name for one in fields(GaudiOptions) if getattr(options.gaudi, one.name) != one.default]
        if set_ and not self.for_gaudi:
            flag = f"--{set_[0].replace('_', '-')}"
            raise InvalidField(flag, f"left out {by}: it is for --engine habana", flag)
        for name in ("flash_attention_recompute", "flash_attention_fast_softmax"):
            if getattr(options.gaudi, name) and not options.gaudi.use_flash_attention:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidField(flag, "left out, or set together with --use-flash-attention", flag)
        if not self.installed:
            raise UnusableModel(
                f"the {self.name} engine is not installed: {self.install}, or use --engine auto", engine=self.name
            )

    def supports(self, options: EngineOptions) -> bool:
        """Returns whether `check` accepts the options."""
        try:
            self.check(options)
        except (InvalidField, UnusableModel):
            return False
        return True


def _either(*values: str) -> str:
    return " or ".join((", ".join(values[:-1]), values[-1])) if len(values) > 1 else values[0]
