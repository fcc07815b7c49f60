"""Runs GGUF models through llama.cpp's batch interface.

Each slot is one of llama.cpp's sequences. A rollback removes the end of a sequence, and a shared prefix is copied from
another one. A batch holds tokens of any sequences, and requests logits for some of them.
"""

import ctypes
import logging
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.child import bound_command
from services.engines.cpu import core_count
from services.engines.engine import Row, by_row, check, check_copy, slot_room
from services.engines.gguf import file_type
from services.engines.measuring import reading_seconds
from services.engines.openmp import loading
from services.extras import install_extra

# With threads that are not bound: alone, a pass of SmolLM2-135M takes 6% longer than by default (10.2 ms on an EPYC),
# beside a busy process half as long (0.5 instead of 1.1 s), and the other model of a pair gets the core 0.3 ms after a
# pass. With 1,000: 14%, 39 ms.
_SPIN_COUNT = 30_000
try:
    with loading(_SPIN_COUNT):
        import llama_cpp
except (ImportError, OSError, RuntimeError) as error:  # the latter two for a library of another platform
    raise UnusableModel(
        f"the library of llama-cpp-python cannot be loaded ({error}): {install_extra('llamacpp')}, "
        "or use --engine torch"
    ) from error

_log = logging.getLogger(__name__)

# Maximum tokens of one call of llama.cpp, and of one computation within it. Larger forwards take several calls.
_BATCH = 1024
_UBATCH = 512
_MAX_SLOTS = 256
# Slots at most this far apart share a forward: a filler token for each slot in between costs less than a forward.
_MAX_GAP = 4
# Keys and values are float16.
_CACHE_BYTES = 2
# How much the difference of a position's two best logits varied over widths 1 to 16, on SmolLM2-135M (Q4_1) and
# Gemma-3-270M (Q4_K_M). One token runs in other kernels than several, and these round activations to 8 bits.
_TOLERANCE = 0.5
# How long a trial of AMX kernels may take besides reading the file, in seconds, and the status of one that the system
# has killed.
_PROBE_SECONDS, _KILLED = 120, -9


class LlamaCppEngine:
    """A GGUF file on the CPU, or on the GPU that llama.cpp was built for.

    `threads`: CPU threads. `cache_byte_limit`: memory for the keys and values of all slots, in bytes. Raises
    `UnusableModel` for a file that llama.cpp cannot read, or a model that does not support rollback.
    """

    name = "llamacpp"
    logit_tolerance = _TOLERANCE

    def __init__(
        self,
        gguf: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        slot_count: int = 8,
        cache_byte_limit: int = 2 << 30,
    ) -> None:
        _start()
        if slot_count > _MAX_SLOTS:
            raise UnusableModel(f"llama.cpp supports at most {_MAX_SLOTS} sequences: decrease --slots")
        offload = uses_gpu(device)
        self.device = "gpu" if offload else "cpu"
        self.slot_count = slot_count
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(gguf), model_options(gguf, offload))
        if not self._model:
            raise UnusableModel(
                f"llama.cpp cannot read {gguf}: check that the file is whole, and that this version of "
                "llama-cpp-python supports its architecture, or give --engine torch a directory with the model's "
                "safetensors",
                model=gguf,
            )
        self.dtype = file_type(int(self._meta("general.file_type") or 0))
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        if llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model):
            raise UnusableModel(
                f"{gguf.name} has recurrent layers, whose state cannot be rolled back as speculation requires: choose "
                "a model with attention layers only",
                model=gguf,
            )
        token_bytes = self._token_byte_count()
        limit = llama_cpp.llama_model_n_ctx_train(self._model)
        length = slot_room(token_bytes, slot_count, cache_byte_limit, limit)
        self.context_length = min(limit, length)
        self.cache_byte_count = length * slot_count * token_bytes
        self._context = self._open(length, threads)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        ordered = sorted(rows, key=lambda row: row.slot)
        fillers = self._fillers([row.slot for row in ordered])
        tokens: list[tuple[int, int, int, bool]] = []
        for row in sorted(ordered + fillers, key=lambda row: row.slot):
            self._cut(row.slot, row.keep)
            for index, id_ in enumerate(row.token_ids):
                tokens.append((id_, row.keep + index, row.slot, index >= row.logits_from))
        parts = [self._decode(tokens[start : start + _BATCH]) for start in range(0, len(tokens), _BATCH)]
        for filler in fillers:
            self._cut(filler.slot, filler.keep)
        found = by_row(np.concatenate(parts) if len(parts) > 1 else parts[0], ordered)
        tables = {row.slot: table for row, table in zip(ordered, found, strict=True)}
        return [tables[row.slot] for row in rows]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        llama_cpp.llama_memory_seq_rm(self._memory, target, -1, -1)
        # llama.cpp copies only whole sequences between buffers.
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, target, token_count, -1)

    def _fillers(self, slots: Sequence[int]) -> list[Row]:
        """Returns a one-token row for each slot between those of a forward, to be removed after it.

        llama.cpp runs sequences together only if their numbers are consecutive, so each gap would cost a forward.
        """
        fillers = []
        for slot, after in pairwise(slots):
            for idle in range(slot + 1, after) if after - slot <= _MAX_GAP else ():
                length = llama_cpp.llama_memory_seq_pos_max(self._memory, idle) + 1
                if length < self.context_length:
                    fillers.append(Row(idle, length, (0,), 1))
        return fillers

    def _cut(self, slot: int, length: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, slot, length, -1):
            raise RuntimeError(f"llama.cpp could not roll a sequence back to {length} tokens")

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> Logits:
        """Runs tokens (id, position, slot, whether logits are wanted). Returns the wanted logits, in order."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (id_, position, slot, wanted) in enumerate(tokens):
            batch.token[index] = id_
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = slot
            batch.logits[index] = wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp failed in a forward (code {code})")
        count = sum(wanted for *_, wanted in tokens)
        if count == 0:
            return np.empty((0, self.vocabulary_size), np.float32)
        table = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (count, self.vocabulary_size))
        # In a forward of several calls, the next call overwrites the buffer.
        return table.copy() if len(tokens) == _BATCH else table

    def _open(self, length: int, threads: int | None) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = length * self.slot_count
        options.n_seq_max = self.slot_count
        options.n_batch, options.n_ubatch = _BATCH, _UBATCH
        # The default is 4 threads on every machine.
        options.n_threads = options.n_threads_batch = threads or core_count()
        # Keeps the whole text for layers with a sliding window too, because a rollback may need tokens outside it.
        options.swa_full = True
        # A separate buffer for each sequence: in a shared one, attention would compute over all sequences.
        options.kv_unified = False
        options.no_perf = True
        # On CPUs, flash attention is fast only with head sizes that are multiples of 128. After 800 tokens, a pass of 1
        # token takes 1.5 ms less with it on Gemma-3-270M (heads of 256) and 7 ms more on SmolLM2-135M (64). With heads
        # of 96, a pass of 8 tokens takes 39 ms instead of 14.
        if self.device == "cpu" and any(size % 128 for size in self._head_sizes()):
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise UnusableModel("llama.cpp could not allocate its memory: decrease --kv-memory or --slots")
        return context

    def _token_byte_count(self) -> int:
        """Returns the memory of one token's keys and values in all layers, in bytes."""
        layers, heads = (
            int(of(self._model)) for of in (llama_cpp.llama_model_n_layer, llama_cpp.llama_model_n_head_kv)
        )
        return layers * heads * sum(self._head_sizes()) * _CACHE_BYTES

    def _head_sizes(self) -> list[int]:
        """Returns the head size of keys and that of values."""
        architecture = self._meta("general.architecture")
        usual = llama_cpp.llama_model_n_embd(self._model) // llama_cpp.llama_model_n_head(self._model)
        return [int(self._meta(f"{architecture}.attention.{part}_length") or usual) for part in ("key", "value")]

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        found = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if found >= 0 else ""


def model_options(gguf: Path, offload: bool = False) -> Any:
    """Returns llama.cpp's options to load a model: on the GPU or not, and without AMX kernels if they crash here."""
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = -1 if offload else 0
    if b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info() and (problem := _amx_problem(gguf)):
        _log.warning("llama.cpp runs at half the speed, without its AMX kernels, because %s", problem)
        options.use_extra_bufts = False
    return options


def _amx_problem(gguf: Path) -> str:
    """Returns why AMX kernels cannot be used, with the remedy; "" if they work."""
    probe = bound_command("services.engines.llamacpp.probe", str(gguf))
    limit = _PROBE_SECONDS + reading_seconds(gguf.stat().st_size)
    try:
        done = subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"a trial of them took longer than {limit:.0f} s: start the server again when the machine has less to do"
    if done.returncode == _KILLED:
        return "a trial of them was killed, probably for lack of memory: free some and start the server again"
    return "they crash in this build: rebuild llama-cpp-python as `make llamacpp` does" if done.returncode else ""


@cache
def uses_gpu(device: str) -> bool:
    """Returns whether a device is the GPU. Raises `UnusableModel` if llama.cpp was built without support for it."""
    supported = bool(llama_cpp.llama_supports_gpu_offload())
    if device not in ("auto", "cpu") and not supported:
        raise UnusableModel(
            f"this build of llama.cpp supports the CPU only, not {device}: use --device cpu, or install "
            "llama-cpp-python with GPU support"
        )
    return device != "cpu" and supported


def uses_openmp() -> bool:
    """Returns whether llama.cpp was built with OpenMP. Its own threads run where the one is bound that starts them."""
    return b"OPENMP = 1" in llama_cpp.llama_print_system_info()


def _start() -> None:
    """Initializes llama.cpp, once in a process, and forwards its errors to our log."""
    llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the package is not typed
def _on_log(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # errors
        _log.error("%s", text.decode(errors="replace").strip())
