"""Any causal language model of transformers, its KV cache in our hands.

The model sees a `_View` in place of transformers' own cache: it writes the new keys and values behind
what each row keeps and hands back everything up to there. Rolling back is keeping less. Masks and
positions are made here for each row, so rows of any lengths share a forward.
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
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PretrainedConfig

from bridge.errors import UnusableModel
from bridge.sampling import Logits
from services.engine.engine import Row

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Measured over widths 1 to 16 on SmolLM2-135M and Gemma-3-270M: the best two logits of a position moved against each
# other by at most 0.75 in bfloat16 and 3e-5 in float32. float16 has three bits more than bfloat16.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}
_KINDS = {"full_attention", "sliding_attention"}
_GROWTH = 256
_DEFAULT_CONTEXT = 2048


class TorchEngine:
    """A transformers model on one device.

    `source`: a directory that `from_pretrained` reads. `device`: "auto", "cpu", "cuda", ... `dtype`:
    "auto" takes bfloat16 where the device computes in it and float32 elsewhere. `threads`: CPU threads.
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
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._dtype = _dtype(dtype, self._device)
        self._model = _load(source, self._dtype).to(self._device).eval()
        self._config = self._model.config.get_text_config()
        self._window = _sliding_window(self._config)
        self._kinds = _attention_kinds(self._config)
        self._accepts = frozenset(inspect.signature(self._model.forward).parameters)
        self.slot_count = slot_count
        self._caches = [_SlotCache(self.context_length) for _ in range(slot_count)]
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
    def context_length(self) -> int:
        return int(getattr(self._config, "max_position_embeddings", None) or _DEFAULT_CONTEXT)

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        width = max(len(row.token_ids) for row in rows)
        # Rows stand at the right edge, so that the last columns are those whose logits are wanted.
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            count = len(row.token_ids)
            input_ids[index, width - count :] = torch.tensor(row.token_ids)
            positions[index, width - count :] = torch.arange(row.keep, row.keep + count)
        wanted = [len(row.token_ids) - row.logits_from for row in rows]
        view = _View([self._caches[row.slot] for row in rows], rows)
        options: dict[str, Any] = {"position_ids": positions.to(self._device)}
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = max(1, *wanted)
        elif "cache_position" in self._accepts and len(rows) == 1:
            options["cache_position"] = positions[0].to(self._device)
        logits = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=self._mask(positions, view.length),
            past_key_values=view,
            use_cache=True,
            **options,
        ).logits
        table = logits.float().cpu().numpy()
        columns = table.shape[1]
        return [table[index, columns - count :] for index, count in enumerate(wanted)]

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [rows, 1, width, length] by kind of attention; one alone if there is one kind."""
        keys = torch.arange(length)[None, None, :]
        queries = positions[:, :, None]
        masks = {}
        for kind in self._kinds:
            visible = keys <= queries
            if kind == "sliding_attention":
                visible &= keys > queries - self._window
            mask = torch.zeros(visible.shape, dtype=self._dtype)
            mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
            masks[kind] = mask[:, None].to(self._device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def _prove(self) -> None:
        """Refuses a model that our cache, masks or positions do not suit, by trying them against its own.

        Two rows of different lengths, cut in pieces, with a rejected token in between, must give the
        logits that the model gives without any cache.
        """
        generator = torch.Generator().manual_seed(0)
        size = min(self.vocabulary_size, 1000)
        text = torch.randint(size, (12,), generator=generator).tolist()
        other = torch.randint(size, (5,), generator=generator).tolist()
        try:
            self.forward([Row(0, 0, (*text[:7], 1), 7)])
            if self.slot_count > 1:
                got = self.forward([Row(0, 7, tuple(text[7:]), 4), Row(1, 0, tuple(other), 4)])
            else:
                got = self.forward([Row(0, 7, tuple(text[7:]), 4)])
            for ids, logits in zip((text, other), got, strict=False):
                alone = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0, -1]
                expected = alone.float().cpu().numpy()
                error = float(np.linalg.norm(logits[-1] - expected) / np.linalg.norm(expected))
                if not error < (1e-3 if self._dtype is torch.float32 else 0.1):
                    raise ValueError(f"logits differ by {error:.0%} from the model's own")
        except Exception as error:  # whatever it stumbles over, the model is not for us
            raise UnusableModel(
                f"a {self._config.model_type} model cannot be served: its state cannot be cut back to a length, "
                f"or its attention takes no mask of ours ({error}). Choose a model with plain causal attention, "
                "such as Llama, Gemma, Qwen, Mistral or GPT-2",
                model_type=self._config.model_type,
            ) from error


class _SlotCache:
    """Keys and values of one sequence, by layer: [heads, capacity, head size]; grows by doubling."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, keep: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts [heads, count, head size] behind the first `keep` tokens."""
        end = keep + keys.shape[1]
        if layer not in self._layers or self._layers[layer][0].shape[1] < end:
            self._grow(layer, keep, end, keys, values)
        held_keys, held_values = self._layers[layer]
        held_keys[:, keep:end] = keys
        held_values[:, keep:end] = values

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer]

    def _grow(self, layer: int, keep: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        capacity = min(max(_GROWTH, 1 << (end - 1).bit_length()), max(self._limit, end))
        grown = tuple(like.new_zeros(like.shape[0], capacity, like.shape[2]) for like in (keys, values))
        if layer in self._layers:
            for new, old in zip(grown, self._layers[layer], strict=True):
                new[:, :keep] = old[:, :keep]
        self._layers[layer] = (grown[0], grown[1])


class _View(Cache):  # type: ignore[misc]  # transformers is not typed
    """What the model takes for its cache, for one forward over the given rows."""

    is_compileable = False

    def __init__(self, caches: Sequence[_SlotCache], rows: Sequence[Row]) -> None:
        # Not Cache.__init__: it sets up layers of its own. Isinstance checks are all that we want of it.
        self.layers: list[Any] = []
        self._caches = caches
        self._rows = rows
        self.length = max(row.keep + len(row.token_ids) for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [rows, heads, width, head size]; returns [rows, heads, length, head size]."""
        width = key_states.shape[2]
        for index, (cache, row) in enumerate(zip(self._caches, self._rows, strict=True)):
            first = width - len(row.token_ids)
            cache.write(layer_idx, row.keep, key_states[index, :, first:], value_states[index, :, first:])
        if len(self._caches) == 1:
            keys, values = self._caches[0].read(layer_idx)
            return keys[None, :, : self.length], values[None, :, : self.length]
        return self._padded(layer_idx, key_states, 0), self._padded(layer_idx, value_states, 1)

    def _padded(self, layer: int, like: torch.Tensor, which: int) -> torch.Tensor:
        padded = like.new_zeros(like.shape[0], like.shape[1], self.length, like.shape[3])
        for index, (cache, row) in enumerate(zip(self._caches, self._rows, strict=True)):
            end = row.keep + len(row.token_ids)
            padded[index, :, :end] = cache.read(layer)[which][:, :end]
        return padded

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward, of the longest row."""
        return max(row.keep for row in self._rows)

    def __len__(self) -> int:
        return 0


def _load(source: Path, dtype: torch.dtype) -> Any:
    transformers.utils.logging.disable_progress_bar()
    # transformers 4.56 renamed the argument.
    old = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 56)
    name = "torch_dtype" if old else "dtype"
    options = {name: dtype, "local_files_only": os.path.isdir(source)}
    try:
        config = AutoConfig.from_pretrained(source)
        _refuse_newer(config)
        _attention_kinds(config.get_text_config())
        try:
            return AutoModelForCausalLM.from_pretrained(source, config=config, attn_implementation="sdpa", **options)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
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


def _sliding_window(config: PretrainedConfig) -> int:
    return int(getattr(config, "sliding_window", None) or 0)


def _attention_kinds(config: PretrainedConfig) -> list[str]:
    """Which masks the model's layers want. Raises `UnusableModel` for layers without rollback."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        slides = bool(_sliding_window(config)) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"]
    unknown = sorted(set(kinds) - _KINDS)
    if unknown:
        raise UnusableModel(
            f"a {config.model_type} model cannot be served: its layers of kind {', '.join(unknown)} keep a state that "
            "cannot be cut back to a length, and speculation has to. Choose a model with attention layers only",
            model_type=config.model_type,
        )
    return sorted(set(kinds))
