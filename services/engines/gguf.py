"""What the engines that read GGUF files have in common: preparing a model, `--engine auto`, names of types."""

from pathlib import Path

from services.engines.spec import Dtype, EngineOptions, Weights
from services.store.cache import Report
from services.store.resolve import has_gguf, resolve, resolve_gguf


def prepare(model: str, options: EngineOptions, report: Report) -> Path:
    """Returns the model's GGUF file. Raises what `resolve` and `resolve_gguf` raise."""
    resolve(model, report, weights="")  # servers read the tokenizer there
    return resolve_gguf(model, report)


def reason_to_skip(model: str, options: EngineOptions) -> str:
    """Returns why a GGUF engine cannot, or should not, run a model with these options, or ""."""
    if options.compile or options.dtype is not Dtype.AUTO or options.weights is not Weights.AUTO:
        return "a GGUF file determines the weights and the data type"
    if not options.on_cpu:
        return "torch is faster on other devices"
    return "" if has_gguf(model) else "the model has no GGUF file"


def file_type(number: int) -> str:
    """Returns the name of a type of weights; those of ik_llama.cpp alone have none in gguf's list."""
    from gguf import LlamaFileType  # imports other libraries, for a second, that a bridge never needs

    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_")
    except ValueError:
        return f"type {number}"
