"""Any causal language model of transformers, its KV cache in our hands.

Attention is ours (`torch_cache`), everything else is the model's own. Rolling back is keeping less. What a model makes
of it is tried against its own forward before it is served.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from torch._inductor import config

from bridge.errors import UnusableModel
from bridge.sampling import Logits
from services.engine.attention import ATTENTION, using
from services.engine.engine import Row, by_row, check, slot_room
from services.engine.proof import Proof
from services.engine.torch_cache import ByteCounter, RaggedBatch, SlotCaches
from services.engine.torch_model import TokenLogits, context_limit, load_model, quantize

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Measured over widths 1 to 16 on SmolLM2-135M and Gemma-3-270M: the best two logits of a position moved against each
# other by at most 0.75 in bfloat16 and 3e-5 in float32. float16 has three bits more than bfloat16.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}
# Tokens of a compiled forward; fewer are filled up. Eight cost a quarter more than one, the rest of the way is flat.
_WIDTHS = (1, 8, 16)
_COMPILER = {
    # Weights are rearranged once, for the processor's matrix units, by whichever kernel turns out to be the fastest.
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
}


class TorchEngine:
    """A transformers model on one device.

    `source`: a directory that `from_pretrained` reads. `device`: "auto", "cpu", "cuda", ... `dtype`:
    "auto" takes bfloat16 where the device computes in it and float32 elsewhere. `threads`: CPU threads.
    `cache_byte_limit`: memory for the keys and values of all slots. `int8`: weights in 8 bits, which is
    fast only where it is compiled. `compiled`: forwards of up to sixteen tokens are, which takes minutes.
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
        int8: bool = False,
        compiled: bool = False,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._dtype = _dtype(dtype, self._device)
        self._model = load_model(source, self._dtype).to(self._device).eval()
        self._int8 = int8
        if int8:
            quantize(self._model)
        self._config = self._model.config.get_text_config()
        self._logits = TokenLogits(self._model)
        self._compiled: dict[int, Callable[..., torch.Tensor]] = {}
        self.slot_count = slot_count
        try:
            proof, tolerance = Proof.of(self._model), 1e-3 if self._dtype is torch.float32 else 0.1
            self._make_room(cache_byte_limit)
            proof.check(self, tolerance)
            if compiled:
                self._compile()
                proof.check(self, tolerance)
        except UnusableModel:
            raise
        except Exception as error:  # whatever it stumbles over, the model is not for us
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

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

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
        width = next((width for width in self._compiled if width >= len(ids)), None)
        with using(RaggedBatch(self._caches, rows)):
            if width is None:
                # At least one is wanted, because models take an empty selection for all.
                table = self._logits(*self._tensors(ids, positions, wanted or [0]))
            else:
                table = self._compiled[width](
                    *self._tensors(*(_filled(one, width) for one in (ids, positions, wanted)))
                )
        return by_row(table[: len(wanted)].float().cpu().numpy(), rows)

    @torch.inference_mode()
    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        self._caches.copy(source, target, token_count)

    def _make_room(self, cache_byte_limit: int) -> None:
        limit = context_limit(self._config)
        token_bytes = self._token_byte_count()
        self.context_length = min(limit, slot_room(token_bytes, self.slot_count, cache_byte_limit, limit))
        self.cache_byte_count = self.context_length * self.slot_count * token_bytes
        self._caches = SlotCaches(self.slot_count, self.context_length)

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compiles forwards of each width by running them. Raises `UnusableModel`."""
        compiled = torch.compile(self._logits, dynamic=False, fullgraph=True)
        try:
            for width in _WIDTHS:
                batch = RaggedBatch(self._caches, [Row(0, 0, (0,) * width, 0)])
                # The settings are not given as `options`: whether weights may be taken for constants is asked before
                # it sees those. What it has to say of its choices is not for users.
                with using(batch), config.patch(_COMPILER), redirect_stderr(StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compiled(*self._tensors([0] * width, list(range(width)), [0] * width))
                self._compiled[width] = compiled
        except Exception as error:
            raise UnusableModel(
                f"the model could not be compiled ({type(error).__name__}: {str(error)[:300]}): install a C++ compiler "
                "(g++) if there is none, or leave out --compile"
            ) from error

    def _tensors(self, *lists: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(one, device=self._device) for one in lists]

    @torch.inference_mode()
    def _token_byte_count(self) -> int:
        """Memory of one token's keys and values, found by looking at those of one."""
        counter = ByteCounter()
        self._model.set_attn_implementation(ATTENTION)
        with using(counter):
            self._logits(*self._tensors([0], [0], [0]))
        if not counter.byte_count:
            raise ValueError("it keeps no keys and values")
        return counter.byte_count

    def _unusable(self, reason: object) -> UnusableModel:
        return UnusableModel(
            f"a {self._config.model_type} model cannot be served: its state cannot be cut back to a length, "
            f"or its attention is not plain ({reason}). Choose a model with plain causal attention, "
            "such as Llama, Gemma, Qwen, Mistral or GPT-2",
            model_type=self._config.model_type,
        )


def _filled(values: list[int], width: int) -> list[int]:
    return values + [0] * (width - len(values))


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
