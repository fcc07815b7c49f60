"""The `llamacpp` engine's entry in the registry."""

from pathlib import Path
from typing import TYPE_CHECKING

from services.engines import gguf
from services.engines.openmp import bind_this_thread
from services.engines.spec import EngineOptions, EngineSpec
from services.extras import install_extra

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine


def _open(path: Path, options: EngineOptions) -> "Engine":
    from services.engines.llamacpp.engine import LlamaCppEngine, uses_openmp  # the library may not be installed

    opened = LlamaCppEngine(
        path,
        device=options.device,
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
    )
    if opened.device == "cpu" and uses_openmp():
        bind_this_thread()
    return opened


def _check_device(device: str) -> None:
    from services.engines.llamacpp.engine import uses_gpu

    uses_gpu(device)


LLAMACPP = EngineSpec(
    name="llamacpp",
    runs="GGUF files that llama.cpp reads, in the file's own precision",
    devices="CPU, or the GPU that llama.cpp was built for",
    reads="gguf",
    prepare=gguf.prepare,
    open=_open,
    modules=("llama_cpp",),
    install=f"{install_extra('llamacpp')}, which compiles llama.cpp for about ten minutes",
    reason_to_skip=gguf.reason_to_skip,
    check_device=_check_device,
)
