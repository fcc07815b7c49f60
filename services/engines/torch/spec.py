"""The `torch` engine's entry in the registry."""

from pathlib import Path

from services.engines.engine import Engine
from services.engines.openmp import bind_this_thread, load_torch
from services.engines.spec import Dtype, EngineOptions, EngineSpec, Weights
from services.store.cache import Report
from services.store.resolve import resolve


def _prepare(model: str, weights: Weights, report: Report) -> Path:
    return resolve(model, report)  # the engine quantizes weights in memory


def _open(path: Path, options: EngineOptions) -> Engine:
    load_torch()
    from services.engines.torch.engine import TorchEngine

    opened = TorchEngine(
        path,
        device=options.device,
        dtype=options.dtype.value,
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
