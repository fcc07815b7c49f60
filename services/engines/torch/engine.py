"""Runs any causal language model of transformers with DraftBridge's own KV cache.

Replaces the model's attention (see `services.engines.torch.cache`) and keeps the rest. A rollback shortens a length. A
self-test compares the logits with the model's own forward before the model is served.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.engine import Row, by_row, check, check_copy, slot_room
from services.engines.selftest import SelfTest
from services.engines.torch.attention import ATTENTION, using
from services.engines.torch.cache import ByteCounter, RaggedBatch, SlotCaches
from services.engines.torch.compiled import CompiledForwards, FastForwards, GraphForwards
from services.engines.torch.model import TokenLogits, context_limit, load_model, quantize
from services.engines.torch.packed import pack

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Measured: the difference of a position's two best logits varied over widths 1 to 16 on SmolLM2-135M and Gemma-3-270M
# by at most 0.75 in bfloat16 and 3e-5 in float32. float16 has three bits more than bfloat16.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}


class TorchEngine:
    """A transformers model on one device.

    `source`: a directory that `from_pretrained` reads. `device`: "auto", "cpu", "cuda", ... `dtype`: "auto" is
    bfloat16 if the device computes in it, else float32. `threads`: CPU threads. `cache_byte_limit`: memory for the keys
    and values of all slots, in bytes. `int8`: stores weights in 8 bits, which is fast only with `compiled`.
    `compiled`: compiles forwards of few tokens, which takes minutes on CPUs; on CUDA, records them as graphs.
    `trusted`: the directory may run code, see `load_model`.
    Raises `UnusableModel` for a model that does not support rollback.
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
        int8: bool = False,
        compiled: bool = False,
        trusted: bool = False,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._dtype = _dtype(dtype, self._device)
        self._model = load_model(source, self._dtype, trusted).to(self._device).eval()
        self.vocabulary_size = int(self._model.get_output_embeddings().weight.shape[0])
        self._int8 = int8
        if int8:
            quantize(self._model)
        self._config = self._model.config.get_text_config()
        self._logits = TokenLogits(self._model)
        self._fast: FastForwards | None = None
        self.slot_count = slot_count
        try:
            if not (int8 or compiled):  # the compiler packs by itself
                pack(self._model)
            self_test = SelfTest.of(self._model)
            self._make_room(cache_byte_limit)
            self_test.check(self)
            if compiled:
                self._fast = self._made_fast()
                self_test.check(self)
        except UnusableModel:
            raise
        except Exception as error:  # an unsupported model can fail with errors of many types
            raise self._unusable(error) from error

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def dtype(self) -> str:
        return "int8" if self._int8 else str(self._dtype).removeprefix("torch.")

    @property
    def logit_tolerance(self) -> float:
        return _TOLERANCES[self._dtype]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        ids = [id_ for row in rows for id_ in row.token_ids]
        positions = [position for row in rows for position in range(row.keep, row.keep + len(row.token_ids))]
        wanted: list[int] = []
        start = 0
        for row in rows:
            wanted += range(start + row.logits_from, start + len(row.token_ids))
            start += len(row.token_ids)
        table = self._fast.run(rows, ids, positions, wanted) if self._fast else None
        if table is None:
            with using(RaggedBatch(self._caches, rows)):
                # At least one is wanted, because models treat an empty selection as all.
                table = self._logits(*self._tensors(ids, positions, wanted or [0]))
        return by_row(table[: len(wanted)].float().cpu().numpy(), rows)

    @torch.inference_mode()
    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        self._caches.copy(source, target, token_count)

    def _make_room(self, cache_byte_limit: int) -> None:
        limit = context_limit(self._config)
        token_bytes = self._token_byte_count()
        self.context_length = min(limit, slot_room(token_bytes, self.slot_count, cache_byte_limit, limit))
        self.cache_byte_count = self.context_length * self.slot_count * token_bytes
        self._caches = SlotCaches(self.slot_count, self.context_length)

    @torch.inference_mode()
    def _made_fast(self) -> FastForwards:
        if self._device.type == "cuda":
            return GraphForwards(self._logits, self._caches, self._device)
        return CompiledForwards(self._logits, self._caches)

    def _tensors(self, *lists: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(one, device=self._device) for one in lists]

    @torch.inference_mode()
    def _token_byte_count(self) -> int:
        """Returns the memory of one token's keys and values in bytes, measured on one token."""
        counter = ByteCounter()
        self._model.set_attn_implementation(ATTENTION)
        with using(counter):
            self._logits(*self._tensors([0], [0], [0]))
        if not counter.byte_count:
            raise ValueError("it has no keys and values")
        return counter.byte_count

    def _unusable(self, reason: object) -> UnusableModel:
        return UnusableModel(
            f"a {self._config.model_type} model cannot be served: its state cannot be rolled back to a shorter text, "
            f"or its attention is not supported ({reason}). Choose a model with plain causal attention, "
            "such as Llama, Gemma, Qwen, Mistral or GPT-2",
            model_type=self._config.model_type,
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("meta tensors have no data")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnusableModel(
            f"torch has no device {name!r} here ({error}): use --device cpu, or install a build of torch for it"
        ) from error
    return device


def auto_dtype() -> str:
    """Returns the name of the type that an engine computes in if nothing is asked for."""
    return str(_dtype("auto", _device("auto"))).removeprefix("torch.")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported()
        else:
            fast = device.type != "cpu" or _cpu_computes_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return _DTYPES[name]


def _cpu_computes_bfloat16() -> bool:
    # Without these instructions, bfloat16 is emulated and slower than float32.
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capability:
        return bool(capability.get("avx512_bf16") or capability.get("amx_bf16") or capability.get("bf16"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
