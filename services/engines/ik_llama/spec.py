"""The `ik_llama` engine's entry in the registry."""

from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING

from bridge.errors import UnusableModel
from services.engines import gguf
from services.engines.cpu import core_count, cpu_flags
from services.engines.openmp import bind_this_thread
from services.engines.spec import EngineOptions, EngineSpec, Weights
from services.extras import install_extra
from services.store.cache import Report

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine

# What the prebuilt library is compiled for.
_NEEDED = frozenset({"avx2", "fma", "f16c"})
# Each slot has a context; `library.MAX_AT_ONCE` says why there are no more.
MAX_CONTEXTS = 27


def missing_instructions(flags: Set[str] | None = None, architecture: str = machine()) -> str:
    """Returns the instruction sets that the library needs and an x86 processor lacks, "" if it has all."""
    if architecture.lower() not in ("x86_64", "amd64"):
        return ""
    known = cpu_flags() if flags is None else flags
    return ", ".join(sorted(_NEEDED - known)) if known else ""


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        raise UnusableModel(f"the ik_llama engine runs on the CPU, not on {device}: use --device cpu")


def _prepare(model: str, options: EngineOptions, report: Report) -> Path:
    if missing := missing_instructions():
        raise UnusableModel(
            f"the ik_llama engine needs a processor with {missing.upper()}: use --engine llamacpp or torch"
        )
    return gguf.prepare(model, options, report)


def _open(path: Path, options: EngineOptions) -> "Engine":
    _check_device(options.device)
    from services.engines.ik_llama.engine import IkLlamaEngine  # the library may not be installed

    opened = IkLlamaEngine(
        path,
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
        repacked=_repacked(options),
    )
    bind_this_thread()
    return opened


def _try_file(path: Path, options: EngineOptions, report: Report) -> None:
    from services.engines.ik_llama.probe import choose_way

    choose_way(path, options.threads or core_count(), _repacked(options), report=report)


def _repacked(options: EngineOptions) -> bool | None:
    return None if options.weights is Weights.AUTO else options.weights is Weights.REPACKED


def _passed_over(model: str, options: EngineOptions) -> str:
    if missing := missing_instructions():
        return f"the processor lacks {missing.upper()}"
    if options.slot_count > MAX_CONTEXTS:
        return f"it holds at most {MAX_CONTEXTS} sequences"
    if options.weights is Weights.REPACKED:  # no other engine does that
        options = replace(options, weights=Weights.AUTO)
    return gguf.reason_to_skip(model, options)


IK_LLAMA = EngineSpec(
    name="ik_llama",
    runs="GGUF files that ik_llama.cpp reads, in the file's own precision, the same bit for bit at every width",
    devices="CPU",
    reads="gguf",
    prepare=_prepare,
    open=_open,
    weights=(Weights.FULL, Weights.REPACKED),
    modules=("ik_llama_cpp",),
    install=install_extra("ik-llama"),
    reason_to_skip=_passed_over,
    check_device=_check_device,
    try_file=_try_file,
)
