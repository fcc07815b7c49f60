"""A causal language model of transformers: loaded, or refused with the reason; and the part of it that engines run."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from bridge.errors import UnusableModel

# Kinds of layers that can be cut back to a length.
_KINDS = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 2048


class TokenLogits(torch.nn.Module):
    """Of a model with attention of ours: tokens in, logits of some of them out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """[wanted, vocabulary size]; `wanted` are indices into `token_ids`, one at least."""
        options = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        if self._selects:
            found: torch.Tensor = self.model(logits_to_keep=wanted, **options).logits[0]
        else:
            found = self.model(**options).logits[0, wanted]
        return found


def load_model(source: Path, dtype: torch.dtype) -> Any:
    """A model directory's weights. Raises `UnusableModel` for what cannot be read or rolled back."""
    transformers.utils.logging.disable_progress_bar()
    # transformers 4.56 renamed the argument.
    old = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 56)
    name = "torch_dtype" if old else "dtype"
    options = {name: dtype, "local_files_only": os.path.isdir(source)}
    try:
        config = AutoConfig.from_pretrained(source)
        _refuse_newer(config)
        _refuse_state(config.get_text_config())
        # Attention as it is written down, which ours is tried against; it is never used for more.
        return AutoModelForCausalLM.from_pretrained(source, config=config, attn_implementation="eager", **options)
    except UnusableModel:
        raise
    except Exception as error:  # files can be damaged in as many ways as the library has errors
        reason = " ".join(str(error).split())[:300]
        raise UnusableModel(
            f"the model in {source} cannot be loaded ({type(error).__name__}: {reason}): check that its files are "
            "whole and that it is a causal language model, or save it again with save_pretrained",
            model=source,
        ) from error


def quantize(model: Any) -> None:
    """Puts the weights of linear layers into 8 bits, by torchao. Raises `UnusableModel`."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UnusableModel("--weights int8 needs torchao: pip install 'draftbridge[torchao]'") from error
    quantize_(model, Int8WeightOnlyConfig(version=2))


def _refuse_newer(config: PretrainedConfig) -> None:
    """An older major version reads a newer one's settings without a word, and misses some of them."""
    saved = str(getattr(config, "transformers_version", None) or "0").split(".")[0]
    if saved.isdigit() and int(saved) > int(transformers.__version__.split(".")[0]):
        raise UnusableModel(
            f"the model was saved by transformers {config.transformers_version}, this is {transformers.__version__}, "
            "which would misread it: upgrade transformers, or let DRAFTBRIDGE_CACHE name an empty directory and "
            "fetch the model again",
            saved_by=config.transformers_version,
        )


def context_limit(config: PretrainedConfig) -> int:
    """The longest text in which a token's position means the same, however long the text gets."""
    limit = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        # Beyond this all positions are turned by other factors, also those that are in the cache already.
        original = rope.get("original_max_position_embeddings")
        return int(original or getattr(config, "original_max_position_embeddings", None) or limit)
    return limit


def _refuse_state(config: PretrainedConfig) -> None:
    """Raises `UnusableModel` for layers without rollback."""
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if unknown:
        raise UnusableModel(
            f"a {config.model_type} model cannot be served: its layers of kind {', '.join(unknown)} keep a state that "
            "cannot be cut back to a length, and speculation has to. Choose a model with attention layers only",
            model_type=config.model_type,
        )
