"""Runs any causal language model of transformers with DraftBridge's own KV cache.

Replaces the model's attention (see `services.engines.torch.cache`) and keeps the rest. A rollback shortens a length. A
self-test compares the logits with the model's own forward before the model is served.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.engine import Row, by_row, check, check_copy, sample_ids, slot_room
from services.engines.selftest import LogitsDiffer, SelfTest, distance, narrowed
from services.engines.torch.attention import ATTENTION, Attention, using
from services.engines.torch.cache import ByteCounter, RaggedBatch, SlotCaches
from services.engines.torch.compiled import CompiledForwards, FastForwards, GraphForwards
from services.engines.torch.exact import first_layers
from services.engines.torch.invariant import (
    SIZES,
    SPAN,
    BlockBatch,
    divided,
    limit_rows,
    make_invariant,
    padded,
    routes_tokens,
    size_of,
)
from services.engines.torch.model import TokenLogits, context_limit, is_out_of_memory, load_model, quantize
from services.engines.torch.packed import computes_bfloat16, pack

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Measured: the difference of a position's two best logits varied over widths 1 to 16 on SmolLM2-135M and Gemma-3-270M
# by at most 0.75 in bfloat16 and 3e-5 in float32. float16 has three bits more than bfloat16.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}
# The memory for keys and values when the first layers are tested, in bytes: enough for a few tokens of any model.
_FIRST_LAYERS_CACHE_BYTES = 256 << 20


class TorchEngine:
    """A transformers model on one device.

    `source`: a directory that `from_pretrained` reads, or a model with eager attention on its device. `device`: "auto",
    "cpu", "cuda", ... `dtype`: "auto" is bfloat16 if the device computes in it, else float32. `threads`: CPU threads.
    `cache_byte_limit`: memory for the keys and values of all slots, in bytes. `int8`: stores weights in 8 bits, which
    is fast only with `compiled`.
    `compiled`: compiles forwards of few tokens, which takes minutes on CPUs; on CUDA, records them as graphs.
    `trusted`: the directory may run code, see `load_model`.
    Raises `UnusableModel` for a model that does not support rollback.
    """

    name = "torch"

    def __init__(
        self,
        source: Path | torch.nn.Module,
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
        self._model: Any
        if isinstance(source, Path):
            self._device = find_device(device)
            self._dtype = _dtype(dtype, self._device)
            self._model = load_model(source, self._dtype, trusted).eval()
        else:
            self._model = source
            self._device, self._dtype = self._model.device, self._model.dtype
        self.vocabulary_size = int(self._model.get_output_embeddings().weight.shape[0])
        self._int8 = int8
        self._config = self._model.config.get_text_config()
        self._logits = TokenLogits(self._model)
        self._fast: FastForwards | None = None
        # The most tokens of a batch-invariant forward; 0: forwards are not.
        self._invariant_width = 0
        self._least = 1
        self.slot_count = slot_count
        try:
            self._model.to(self._device)
            self._check_first_layers()
            if int8:
                quantize(self._model)
            self_test = SelfTest.of(self._model)
            with narrowed(self._model) as wide:
                narrow_test = SelfTest.of(self._model, self_test.texts) if wide else self_test
            self._sample, self._noise = self_test.texts[0], max(self_test.tolerance, narrow_test.tolerance)
            packed = not (int8 or compiled) and pack(self._model)  # the compiler packs by itself
            if packed and self._dtype is torch.bfloat16:
                self._least = SIZES[0]  # packed weights take longer for one row than for four
            self._make_room(cache_byte_limit)
            self_test.check(self)
            with narrowed(self._model) as wide:
                if wide:
                    narrow_test.check(self)
            if compiled:
                self._fast = self._made_fast()
                self_test.check(self, self._fast.widths)
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
        return 0.0 if self._invariant_width else _TOLERANCES[self._dtype]

    def make_invariant(self) -> bool:
        """See `BatchInvariant`."""
        self._invariant_width = 0
        if self._fast is None and self._device.type == "cpu" and self.context_length >= SIZES[-1]:
            try:
                self._invariant_width = make_invariant(
                    self._model,
                    self._caches,
                    self.context_length,
                    lambda row: self._run_invariant([row], width=SIZES[-1]),
                    self.vocabulary_size,
                )
                if self._invariant_width and not self._passes_agree():
                    raise ValueError("logits in batch-invariant passes differ from those in others")
            except Exception:  # the model has passed its self-test, and can be served without
                self._invariant_width = 0
                limit_rows(self._model, None)
                _log.exception("the model does not run in batch-invariant passes")
            else:
                width = self._invariant_width
                how = f"yes, up to {width} tokens at once" if width else "no, logits differ by width"
                _log.info("batch-invariant passes: %s", how)
        return self._invariant_width > 0

    @torch.inference_mode()
    def routes_tokens(self) -> bool:
        """See `BatchInvariant`. Overwrites slot 0."""
        rows = [Row(0, 0, sample_ids(SIZES[0], self.vocabulary_size), 0)]
        batch = RaggedBatch(self._caches, rows)
        return routes_tokens(self._model, SIZES[0], lambda: self._run(batch, *_flat(rows), lambda count: count))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        if self._invariant_width:
            return by_row(self._run_invariant(rows).float().numpy(), rows)
        ids, positions, wanted = _flat(rows)
        table = self._fast.run(rows, ids, positions, wanted) if self._fast else None
        if table is None:
            table = self._run_plain(rows)
        return by_row(table[: len(wanted)].float().cpu().numpy(), rows)

    @property
    def takes_branches(self) -> bool:
        """See `Branching`. Compiled forwards have none."""
        return self._fast is None

    @torch.inference_mode()
    def forward_branches(self, row: Row, branches: Sequence[tuple[int, int]]) -> Logits:
        """See `Branching.forward_branches`."""
        check(self, [row], branches)
        run = self._run_invariant if self._invariant_width else self._run_plain
        return run([row], branches).float().cpu().numpy()

    @torch.inference_mode()
    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        self._caches.copy(source, target, token_count)

    def _run_plain(self, rows: Sequence[Row], branches: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Returns the concatenated logits of rows, then those of the `branches` of a single row."""
        batch = RaggedBatch(self._caches, rows, branches)
        return self._run(batch, *_flat(rows, branches), lambda _: self._least)

    def _run_invariant(
        self, rows: Sequence[Row], branches: Sequence[tuple[int, int]] = (), width: int | None = None
    ) -> torch.Tensor:
        """Returns the same logits, each of which does not depend on what else is in the forward.

        `width`: the most tokens of a forward, if it is not `_invariant_width`.
        """
        tables = [
            self._run(BlockBatch(self._caches, part, some), *_flat(part, some), size_of)
            for part, some in divided(rows, branches, width or self._invariant_width)
        ]
        return torch.cat(tables) if len(tables) > 1 else tables[0]

    @torch.inference_mode()
    def _passes_agree(self) -> bool:
        """Returns whether batch-invariant logits are those of other passes, but for rounding. Overwrites slot 0.

        Compares a text's last positions, in two spans of positions, with attention windows as they are and narrowed.
        """
        text = (self._sample * SPAN)[: min(SPAN + SIZES[0], self.context_length)]
        rows = [Row(0, 0, text, len(text) - len(self._sample))]

        def agree() -> bool:
            plain, invariant = (run.float().numpy() for run in (self._run_plain(rows), self._run_invariant(rows)))
            return distance(invariant, plain) < self._noise

        with narrowed(self._model) as wide:
            narrow = not wide or agree()
        return narrow and agree()

    def _run(
        self,
        attention: Attention,
        ids: list[int],
        positions: list[int],
        wanted: list[int],
        size: Callable[[int], int],
    ) -> torch.Tensor:
        """Returns logits [wanted, vocabulary size]. `size`: the number of tokens that such a number is padded to."""
        tokens = [padded(one, size(len(one))) for one in (ids, positions, wanted) if one]
        with using(attention):
            if not wanted:
                self._logits.read(*self._tensors(*tokens))
                return torch.empty(0, self.vocabulary_size)
            table: torch.Tensor = self._logits(*self._tensors(*tokens))
        return table[: len(wanted)]

    def _check_first_layers(self) -> None:
        """Raises `UnusableModel` if the engine is wrong for the model's first layers in float32.

        If they do not run in it for another reason, such as too little memory, the model may run all the same.
        """
        copy = None if self._dtype is torch.float32 else first_layers(self._model)
        if copy is None:
            return
        try:
            TorchEngine(copy, slot_count=2, cache_byte_limit=_FIRST_LAYERS_CACHE_BYTES)
        except UnusableModel as error:
            if isinstance(error.__cause__, LogitsDiffer):
                raise
            _log.info("the engine is not tested in float32 with this model's first layers: %s", error)
        finally:
            del copy
            if self._device.type == "cuda":  # otherwise torch would keep the memory from other processes
                torch.cuda.empty_cache()

    def _make_room(self, cache_byte_limit: int) -> None:
        limit = context_limit(self._config)
        token_bytes = self._token_byte_count()
        self.context_length = min(limit, slot_room(token_bytes, self.slot_count, cache_byte_limit, limit))
        self.cache_byte_count = self.context_length * self.slot_count * token_bytes
        # Whole blocks of the attention that makes logits invariant.
        self._caches = SlotCaches(self.slot_count, -(-self.context_length // SPAN) * SPAN)

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

    def _unusable(self, reason: Exception) -> UnusableModel:
        if is_out_of_memory(reason):
            return UnusableModel(
                f"the model and {self.slot_count} sequences do not fit into the memory of {self.device} "
                f"({' '.join(str(reason).split())[:200]}): decrease --kv-memory or --slots, or choose a smaller model"
            )
        return UnusableModel(
            f"a {self._config.model_type} model cannot be served: its state cannot be rolled back to a shorter text, "
            f"or its attention is not supported ({reason}). Choose a model with plain causal attention, "
            "such as Llama, Gemma, Qwen, Mistral or GPT-2",
            model_type=self._config.model_type,
        )


def _flat(rows: Sequence[Row], branches: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[int], list[int]]:
    """Returns the ids and positions of all tokens of rows and branches, and the indices of those with wanted logits."""
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for row in rows:
        wanted += range(len(ids) + row.logits_from, len(ids) + len(row.token_ids))
        ids += row.token_ids
        positions += range(row.keep, row.keep + len(row.token_ids))
    for index, id_ in branches:
        wanted.append(len(ids))
        ids.append(id_)
        positions.append(rows[0].keep + index)
    return ids, positions, wanted


def find_device(name: str) -> torch.device:
    """Returns the device of this name, or for "auto" the best one. Raises `UnusableModel` if there is none."""
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


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        computes = {"cpu": computes_bfloat16, "cuda": torch.cuda.is_bf16_supported}.get(device.type, lambda: True)
        return torch.bfloat16 if computes() else torch.float32
    return _DTYPES[name]
