"""Loads causal Hugging Face transformers models, or refuses them with the reason, and wraps what engines run."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from bridge.errors import UnusableModel
from services.engines.selftest import LENGTH
from services.extras import install_extra
from services.store.cache import remedy_for
from services.store.code import REMEDY, refuse_code
from services.store.convert import dtype_keyword

# Kinds of layers that support rollback.
_KINDS = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 2048
# What torch writes where the system refuses memory; on CUDA it raises `OutOfMemoryError`.
_CPU_FULL = "can't allocate memory"


class TokenLogits(torch.nn.Module):
    """Wraps a model with our attention: takes tokens, returns the logits of some of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Returns logits [wanted, vocabulary size]. `wanted` has at least one index into `token_ids`."""
        options = self._options(token_ids, positions)
        if self._selects:
            found: torch.Tensor = self.model(logits_to_keep=wanted, **options).logits[0]
        else:
            found = self.model(**options).logits[0, wanted]
        return found

    def read(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Runs the model without its output layer: only what attention keeps of the tokens matters."""
        self.model.base_model(**self._options(token_ids, positions))

    def _options(self, token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}


def load_model(source: Path, dtype: torch.dtype, trusted: bool = False) -> Any:
    """Loads a model directory. Runs no code of it unless it is `trusted`.

    Raises `UnusableModel` if it cannot be read, needs code to be run, has a context too short for the self-test, or
    does not support rollback.
    """
    transformers.utils.logging.disable_progress_bar()
    options = {
        dtype_keyword(): dtype,
        "local_files_only": os.path.isdir(source),
        "trust_remote_code": trusted,  # unset, transformers would ask on the terminal
        "use_safetensors": None if trusted else True,
    }
    config = read_config(source, trusted)
    _refuse_short(source, config.get_text_config())
    with _readable(source):
        # The self-test compares our attention with this reference implementation, which then is not used any more.
        return AutoModelForCausalLM.from_pretrained(source, config=config, attn_implementation="eager", **options)


def read_config(source: Path, trusted: bool = False) -> Any:
    """Reads the configuration of a model directory. Raises `UnusableModel` as `load_model` does."""
    if not trusted:
        refuse_code(source)
    with _readable(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
        _refuse_newer(config)
        _refuse_state(config.get_text_config())
        return config


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    """Raises `UnusableModel` with the reason if the library fails."""
    try:
        yield
    except UnusableModel:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UnusableModel(
                f"the model in {source} does not fit into memory ({' '.join(str(error).split())[:200]}): choose a "
                "smaller model or dtype, or free memory",
                model=source,
            ) from error
        if "trust_remote_code" in str(error):
            raise UnusableModel(
                f"the model in {source} needs Python code of its directory to be run, which is refused: {REMEDY}",
                model=source,
            ) from error
        # For damaged files the library raises errors of many types.
        reason = " ".join(str(error).split())[:300]
        remedy = remedy_for(source) or "save it again with save_pretrained"
        raise UnusableModel(
            f"the model in {source} cannot be loaded ({type(error).__name__}: {reason}): check that its files are "
            f"whole and that it is a causal language model, or {remedy}",
            model=source,
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory was too small, which torch reports for the CPU as a plain error."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_FULL in str(error)


def quantize(model: Any) -> None:
    """Quantizes the weights of linear layers to 8 bits with torchao. Raises `UnusableModel` if it is not installed."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UnusableModel(f"--weights int8 needs torchao: {install_extra('torchao')}") from error
    quantize_(model, Int8WeightOnlyConfig(version=2))


def _refuse_newer(config: PretrainedConfig) -> None:
    """Raises `UnusableModel` for a newer major version's model, some settings of which would be ignored silently."""
    saved = str(getattr(config, "transformers_version", None) or "0").split(".")[0]
    if saved.isdigit() and int(saved) > int(transformers.__version__.split(".")[0]):
        raise UnusableModel(
            f"the model was saved by transformers {config.transformers_version}, which the installed version "
            f"{transformers.__version__} may misread: upgrade transformers, or set DRAFTBRIDGE_CACHE to an empty "
            "directory to convert the model again",
            saved_by=config.transformers_version,
        )


def context_limit(config: PretrainedConfig) -> int:
    """Returns the maximum text length up to which the encoding of positions does not depend on the length."""
    limit = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        # In longer texts, longrope rotates all positions by other factors, which makes the cached keys wrong.
        original = rope.get("original_max_position_embeddings")
        return int(original or getattr(config, "original_max_position_embeddings", None) or limit)
    return limit


def _refuse_short(source: Path, config: PretrainedConfig) -> None:
    """Raises `UnusableModel` for a context that does not hold the texts of the self-test."""
    if (limit := context_limit(config)) < LENGTH:
        raise UnusableModel(
            f"the model in {source} cannot be served: its context of {limit} tokens is shorter than the {LENGTH} of "
            "the self-test. If its config.json states it wrongly, correct it there; otherwise choose a model with a "
            "longer context",
            model=source,
            context_length=limit,
        )


def _refuse_state(config: PretrainedConfig) -> None:
    """Raises `UnusableModel` for layers without rollback."""
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if unknown:
        raise UnusableModel(
            f"a {config.model_type} model cannot be served: the state of its {', '.join(unknown)} layers cannot be "
            "rolled back as speculation requires. Choose a model with attention layers only",
            model_type=config.model_type,
        )
