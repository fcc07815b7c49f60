"""The `llamacpp` engine's entry in the registry."""

from pathlib import Path

from services.engines.engine import Engine
from services.engines.spec import Dtype, EngineOptions, EngineSpec, Weights
from services.store.cache import Report
from services.store.resolve import has_gguf, resolve, resolve_gguf


def _prepare(model: str, weights: Weights, report: Report) -> Path:
    resolve(model, report)  # servers read the tokenizer from the converted model
    return resolve_gguf(model, report)


def _open(path: Path, options: EngineOptions) -> Engine:
    from services.engines.llamacpp.engine import LlamaCppEngine  # the library may not be installed

    return LlamaCppEngine(
        path,
        device=options.device,
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
    )


def _passed_over(model: str, options: EngineOptions) -> str:
    if options.compile or options.dtype is not Dtype.AUTO or options.weights is not Weights.AUTO:
        return "a GGUF file determines the weights and the data type"
    if not options.on_cpu:
        return "torch is faster on other devices"
    return "" if has_gguf(model) else "the model has no GGUF file"


LLAMACPP = EngineSpec(
    name="llamacpp",
    runs="GGUF files that llama.cpp reads, in the file's own precision",
    devices="CPU, or the GPU that llama.cpp was built for",
    prepare=_prepare,
    open=_open,
    modules=("llama_cpp",),
    install="pip install '.[llamacpp]' in the checkout, which compiles llama.cpp for about ten minutes",
    passed_over=_passed_over,
)
