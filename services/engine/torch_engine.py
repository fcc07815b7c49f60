"""Any causal language model of transformers, its KV cache in our hands.

The model sees a `RaggedBatch` in place of transformers' own cache, and attention is ours (`torch_cache`); everything
else is the model's own. Rolling back is keeping less. What a model makes of it is tried against its own forward
before it is served.
"""

import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

from bridge.errors import UnusableModel
from bridge.sampling import Logits
from services.engine.engine import Row, by_row, check, slot_room
from services.engine.torch_cache import ATTENTION, RaggedBatch, SlotCaches

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Measured over widths 1 to 16 on SmolLM2-135M and Gemma-3-270M: the best two logits of a position moved against each
# other by at most 0.75 in bfloat16 and 3e-5 in float32. float16 has three bits more than bfloat16.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}
_KINDS = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 2048


class TorchEngine:
    """A transformers model on one device.

    `source`: a directory that `from_pretrained` reads. `device`: "auto", "cpu", "cuda", ... `dtype`:
    "auto" takes bfloat16 where the device computes in it and float32 elsewhere. `threads`: CPU threads.
    `cache_byte_limit`: memory for the keys and values of all slots.
    Raises `UnusableModel` for a model that cannot be rolled back by length.
    """

    name = "torch"

    def __init__(
        self,
        source: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        slot_count: int = 8,
        cache_byte_limit: int = 2 << 30,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._dtype = _dtype(dtype, self._device)
        self._model = _load(source, self._dtype).to(self._device).eval()
        self._config = self._model.config.get_text_config()
        self._accepts = frozenset(inspect.signature(self._model.forward).parameters)
        self.slot_count = slot_count
        limit = _context_limit(self._config)
        token_bytes = self._token_byte_count()
        length = slot_room(token_bytes, slot_count, cache_byte_limit, limit)
        self.context_length = min(limit, length)
        self.cache_byte_count = self.context_length * slot_count * token_bytes
        self._caches = SlotCaches(slot_count, self.context_length)
        self._prove()

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def logit_tolerance(self) -> float:
        return _TOLERANCES[self._dtype]

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        ids = [id_ for row in rows for id_ in row.token_ids]
        wanted: list[int] = []
        start = 0
        for row in rows:
            wanted += range(start + row.logits_from, start + len(row.token_ids))
            start += len(row.token_ids)
        with RaggedBatch(self._caches, rows, self._device) as batch:
            logits = self._logits(torch.tensor([ids], device=self._device), batch, wanted)
        return by_row(logits.float().cpu().numpy(), rows)

    @torch.inference_mode()
    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        self._caches.copy(source, target, token_count)

    def _logits(self, input_ids: torch.Tensor, batch: RaggedBatch, wanted: list[int]) -> torch.Tensor:
        """For the `wanted` tokens of [1, tokens], [len(wanted), vocabulary_size]."""
        options: dict[str, Any] = {"position_ids": batch.positions, "past_key_values": batch, "use_cache": True}
        # At least one, because models take an empty selection for all.
        some = torch.tensor(wanted or [0], device=self._device)
        if "logits_to_keep" in self._accepts:
            logits = self._model(input_ids=input_ids, logits_to_keep=some, **options).logits[0]
        else:
            logits = self._model(input_ids=input_ids, **options).logits[0, some]
        return logits[: len(wanted)]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _token_byte_count(self) -> int:
        """Memory of one token's keys and values, found by looking at those of one."""
        cache = DynamicCache()
        shapes: list[torch.Tensor] = []

        def update(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shapes.extend((keys, values))
            return keys, values

        cache.update = update
        try:
            self._model(torch.zeros(1, 1, dtype=torch.long, device=self._device), past_key_values=cache, use_cache=True)
        except Exception as error:  # whatever it stumbles over, the model is not for us
            raise self._unusable(error) from error
        if not shapes:
            raise self._unusable("it keeps no keys and values")
        return sum(tensor.nbytes for tensor in shapes)

    @torch.inference_mode()
    def _prove(self) -> None:
        """Refuses a model that our cache, attention or positions do not suit, by trying them against its own.

        Two rows of different lengths, cut in pieces, with a rejected token in between and a copied slot, must give
        the logits that the model gives without any of it.
        """
        generator = torch.Generator().manual_seed(0)
        size = min(self.vocabulary_size, 1000)
        text = torch.randint(size, (12,), generator=generator).tolist()
        other = text[:3] + torch.randint(size, (3,), generator=generator).tolist()
        try:
            inputs = [torch.tensor([ids], device=self._device) for ids in (text, other)]
            expected = [self._model(ids, use_cache=False).logits[0, -1].float().cpu().numpy() for ids in inputs]
            self._model.set_attn_implementation(ATTENTION)
            self.forward([Row(0, 0, (*text[:7], 1), 7)])
            rows = [Row(0, 7, tuple(text[7:]), 4)]
            if self.slot_count > 1:
                self.copy(0, 1, 3)
                rows.append(Row(1, 3, tuple(other[3:]), 2))
            for logits, reference in zip(self.forward(rows), expected, strict=False):
                error = float(np.linalg.norm(logits[-1] - reference) / np.linalg.norm(reference))
                if not error < (1e-3 if self._dtype is torch.float32 else 0.1):
                    raise ValueError(f"logits differ by {error:.0%} from the model's own")
        except Exception as error:  # whatever it stumbles over, the model is not for us
            raise self._unusable(error) from error

    def _unusable(self, reason: object) -> UnusableModel:
        return UnusableModel(
            f"a {self._config.model_type} model cannot be served: its state cannot be cut back to a length, "
            f"or its attention is not plain ({reason}). Choose a model with plain causal attention, "
            "such as Llama, Gemma, Qwen, Mistral or GPT-2",
            model_type=self._config.model_type,
        )


def _load(source: Path, dtype: torch.dtype) -> Any:
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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnusableModel(
            f"this machine's torch has no device {name!r} ({error}): use --device cpu, or install a torch build for it"
        ) from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported()
        else:
            fast = device.type != "cpu" or _cpu_computes_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return _DTYPES[name]


def _cpu_computes_bfloat16() -> bool:
    # Without these instructions bfloat16 is emulated, and slower than float32.
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capability:
        return bool(capability.get("avx512_bf16") or capability.get("amx_bf16") or capability.get("bf16"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _context_limit(config: PretrainedConfig) -> int:
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
