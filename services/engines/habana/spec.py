"""The `habana` engine's entry in the registry."""

from pathlib import Path
from typing import TYPE_CHECKING

from services.engines.habana.launch import rank
from services.engines.spec import Dtype, EngineOptions, EngineSpec, Weights
from services.store.cache import Report
from services.store.resolve import resolve

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine


def _prepare(model: str, options: EngineOptions, report: Report) -> Path:
    return resolve(model, report, trusted=options.trusted)


def _open(path: Path, options: EngineOptions) -> "Engine":
    from services.engines.habana.engine import HabanaEngine  # the library may not be installed

    return HabanaEngine(
        path,
        device=options.device,
        dtype=options.dtype.value,
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
        trusted=options.trusted,
        gaudi=options.gaudi,
    )


HABANA = EngineSpec(
    name="habana",
    runs="Llama, Qwen2, Mistral, Gemma and similar models of Hugging Face transformers, through optimum-habana",
    devices="Intel Gaudi (HPU)",
    prepare=_prepare,
    open=_open,
    dtypes=(Dtype.FLOAT32, Dtype.BFLOAT16),
    weights=(Weights.FULL,),
    modules=("optimum", "optimum.habana", "habana_frameworks"),
    install="see docs/guides/gaudi.md",
    trusts=True,
    for_gaudi=True,
    follows=lambda: rank() > 0,
    reason_to_skip=lambda model, options: "" if options.device == "hpu" else "it is for --device hpu",
)
