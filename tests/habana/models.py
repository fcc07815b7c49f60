"""The model families that the habana engine is tested with, and the engine on a CPU."""

from pathlib import Path
from typing import Any

from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
from tests.support.engine_contract import LLAMA_LIKE

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE | {"model_type": "llama"},
    "qwen2": LLAMA_LIKE | {"model_type": "qwen2"},
    "mistral": LLAMA_LIKE | {"model_type": "mistral", "sliding_window": 8},
    "gemma": LLAMA_LIKE | {"model_type": "gemma", "head_dim": 8},
    "qwen3": LLAMA_LIKE | {"model_type": "qwen3", "head_dim": 8},
    "gemma2": LLAMA_LIKE
    | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 2},
}


def fix_mistral() -> None:
    """Makes optimum-habana's Mistral use positions on a CPU, where it passes on whole tables of sines.

    On a Gaudi, a fused kernel takes the positions.
    """
    from optimum.habana.transformers.models.mistral import modeling_mistral as mistral

    def rope(query: Any, key: Any, cos: Any, sin: Any, positions: Any, training: bool = True) -> Any:
        return mistral.apply_rotary_pos_emb(query, key, cos[positions], sin[positions])

    mistral.apply_customized_rope = rope


def opened(directory: Path, dtype: str = "float32", **options: Any) -> HabanaEngine:
    """Returns the engine with three slots. `options`: those of `GaudiOptions`."""
    fix_mistral()
    gaudi = GaudiOptions(bucket_size=64, **options)
    return HabanaEngine(directory, device="cpu", dtype=dtype, threads=1, slot_count=3, gaudi=gaudi)
