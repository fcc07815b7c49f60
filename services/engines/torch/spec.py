"""The `torch` engine's entry in the registry."""

from pathlib import Path
from typing import TYPE_CHECKING

from services.engines.cpu import has_bfloat16, surely_on_cpu
from services.engines.openmp import bind_this_thread, load_torch
from services.engines.spec import Dtype, EngineOptions, EngineSpec, Weights
from services.store.cache import Report
from services.store.resolve import resolve

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine


def _dtype(options: EngineOptions) -> Dtype:
    """Returns bfloat16 instead of auto where that is what the engine would choose, as far as is known without torch."""
    computes = options.dtype is Dtype.AUTO and surely_on_cpu(options.device) and has_bfloat16()
    return Dtype.BFLOAT16 if computes else options.dtype


def _prepare(model: str, options: EngineOptions, report: Report) -> Path:
    # Half as much to convert and to read. The engine quantizes weights in memory.
    weights = "bfloat16" if _dtype(options) is Dtype.BFLOAT16 else "float32"
    return resolve(model, report, weights=weights, trusted=options.trusted)


def _open(path: Path, options: EngineOptions) -> "Engine":
    load_torch()
    from services.engines.torch.engine import TorchEngine

    opened = TorchEngine(
        path,
        device=options.device,
        dtype=_dtype(options).value,  # the one that the weights were prepared for
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
        int8=options.weights is Weights.INT8,
        compiled=options.compile,
        trusted=options.trusted,
    )
    if opened.device == "cpu":
        bind_this_thread()
    return opened


def _check_device(device: str) -> None:
    load_torch()
    from services.engines.torch.engine import find_device

    find_device(device)


TORCH = EngineSpec(
    name="torch",
    runs="causal Hugging Face transformers models with a fast tokenizer; GGUF files are converted",
    devices="CPU, CUDA",
    prepare=_prepare,
    open=_open,
    dtypes=(Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16),
    weights=(Weights.FULL, Weights.INT8),
    modules=("torch", "transformers"),
    install="pip install . in the checkout",
    compiles=True,
    check_device=_check_device,
    trusts=True,
)
