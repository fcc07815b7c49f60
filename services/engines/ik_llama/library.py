"""The C interface of ik_llama.cpp, as far as the engine needs it: a model, and contexts of one sequence each.

It is llama.cpp's interface of 2024. The package's own bindings declare the structures and half of the functions; the
others are declared here. A cell of a context's cache holds the token of the same position, because a sequence that is
alone in its context is only ever cut at its end.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.openmp import loading
from services.extras import install_extra

# With threads that are not bound: alone, a pass of SmolLM2-135M takes a fifth longer than by default (6.2 ms on an
# EPYC). Beside a busy process it takes 27 ms with this, 137 ms with 10,000 and 830 ms by default.
_SPIN_COUNT = 1000
try:
    with loading(_SPIN_COUNT):
        from ik_llama_cpp import _ctypes_api as api
except (ImportError, OSError, AttributeError) as error:  # the last one for a library of another program or version
    named = os.environ.get("IK_LLAMA_CPP_LIB_PATH")
    remedy = "unset IK_LLAMA_CPP_LIB_PATH" if named else install_extra("ik-llama")
    raise UnusableModel(
        f"the library of ik-llama-cpp-python cannot be loaded ({error}): {remedy}, or use --engine torch"
    ) from error

_log = logging.getLogger(__name__)
_lib = api._lib

# Tokens of a pass. From 32 tokens on (16 with a few of the i-quants) the library unpacks the weights first: logits move
# by up to 1.6, with weights in Q4_1 they are wrong in 0.1.5 (72% of SmolLM2-135M's best tokens are others), and Gemma's
# prompts are read no faster.
MAX_WIDTH, SMALL_WIDTH = 31, 14
# The library crashes when a process has more than 64 of ggml's contexts: one for a model, two for each of our contexts,
# and one for each pass that is under way. `spec.MAX_CONTEXTS` leaves room for these passes.
MAX_AT_ONCE = 8
# Keys and values are float16.
CACHE_BYTES = 2

_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _pointer)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = getattr(_lib, name)
    except AttributeError as error:  # in a library that IK_LLAMA_CPP_LIB_PATH names
        raise UnusableModel(
            f"the library of ik_llama.cpp has no function {name}: unset IK_LLAMA_CPP_LIB_PATH, or use --engine torch"
        ) from error
    function.restype, function.argtypes = result, arguments
    return function


_log_set = _function("llama_log_set", None, _LOG, _pointer)
_meta = _function("llama_model_meta_val_str", _int, _pointer, ctypes.c_char_p, ctypes.c_char_p, _size)
_train_length = _function("llama_n_ctx_train", _int, _pointer)
_layer_count = _function("llama_n_layer", _int, _pointer)
_keeps_state = [
    _function(f"llama_model_{name}", ctypes.c_bool, _pointer) for name in ("is_recurrent", "is_hybrid", "has_recurrent")
]
_set_threads = _function("llama_set_n_threads", None, _pointer, ctypes.c_uint32, ctypes.c_uint32)
_remove = _function("llama_kv_cache_seq_rm", ctypes.c_bool, _pointer, _int, _int, _int)
_logits = _function("llama_get_logits", ctypes.POINTER(ctypes.c_float), _pointer)
_state_size = _function("llama_state_seq_get_size", _size, _pointer, _int, ctypes.c_uint32)
_get_state = _function("llama_state_seq_get_data", _size, _pointer, _pointer, _size, _int, ctypes.c_uint32)
_set_state = _function("llama_state_seq_set_data", _size, _pointer, _pointer, _size, _int, ctypes.c_uint32)


_ERROR_LEVEL = 4


@_LOG  # type: ignore[untyped-decorator]  # ctypes types its own decorators loosely
def _on_log(level: int, text: bytes, _: Any) -> None:
    # It logs much besides errors.
    if level == _ERROR_LEVEL:
        _log.error("%s", text.decode(errors="replace").strip())


@cache
def _start() -> None:
    """Prepares the library, once in a process."""
    _log_set(_on_log, None)
    api.llama_backend_init()


class Model:
    """The weights of a GGUF file. `repacked`: rearranged for the processor, in memory that is not the file's.

    Raises `UnusableModel` for a file that the library cannot read, or whose state cannot be cut back to a length.
    """

    def __init__(self, gguf: Path, *, repacked: bool = False) -> None:
        _start()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        options.repack_tensors, options.use_mmap = repacked, not repacked
        self.pointer = api.llama_model_load_from_file(os.fsencode(gguf), options)
        if not self.pointer:
            raise UnusableModel(
                f"ik_llama.cpp cannot read {gguf}: check that the file is whole; if it is, this version of "
                "ik-llama-cpp-python does not know its architecture: use --engine llamacpp, or give --engine torch a "
                "directory with the model's safetensors",
                model=gguf,
            )
        finalize(self, api.llama_free_model, self.pointer)
        if any(keeps(self.pointer) for keeps in _keeps_state):
            raise UnusableModel(
                f"{gguf.name} keeps a state that cannot be cut back to a length, and speculation has to: choose a "
                "model with attention layers only",
                model=gguf,
            )
        self.vocabulary_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.pointer)))
        self.length = int(_train_length(self.pointer))

    def meta(self, key: str) -> str:
        """Returns a value of the file's metadata as text, "" if there is none."""
        buffer = ctypes.create_string_buffer(4096)
        found = _meta(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if found >= 0 else ""

    @property
    def token_byte_count(self) -> int:
        """Memory of one token's keys and values in all layers."""
        prefix = f"{self.meta('general.architecture')}.attention."
        heads = [int(one) for one in self.meta(f"{prefix}head_count").strip("[]").split(",")]
        usual = int(api.llama_model_n_embd(self.pointer)) // max(heads)
        size = sum(int(self.meta(f"{prefix}{part}_length") or usual) for part in ("key", "value"))
        shared = [int(one) for one in self.meta(f"{prefix}head_count_kv").strip("[]").split(",") if one] or heads
        layers = int(_layer_count(self.pointer))
        return (sum(shared) if len(shared) == layers else max(shared) * layers) * size * CACHE_BYTES


def _free(context: int, batch: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)


class Context:
    """The keys and values of one sequence of up to `length` tokens. Raises `UnusableModel` if memory is short."""

    def __init__(self, model: Model, length: int, threads: int) -> None:
        self._model, self._threads = model, threads
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = length, MAX_WIDTH, MAX_WIDTH, 1
        options.n_threads = options.n_threads_batch = threads
        # Its kernel divides a single token's cache among the threads, and starts where a layer's window does: logits
        # then differ from those of wider passes. It gained Gemma-3-270M nothing after 256 tokens, 9% after 1,536.
        options.flash_attn = False
        self._pointer = api.llama_init_from_model(model.pointer, options)
        if not self._pointer:
            raise UnusableModel(
                "ik_llama.cpp could not set its memory aside: allow less with --kv-memory, or fewer --slots"
            )
        self._batch = api.llama_batch_init(MAX_WIDTH, 0, 1)
        finalize(self, _free, self._pointer, self._batch)

    def use_threads(self, count: int) -> None:
        """Sets the number of threads of the next passes."""
        if count != self._threads:
            _set_threads(self._pointer, count, count)
            self._threads = count

    def cut(self, length: int) -> None:
        """Drops what comes after the first `length` tokens."""
        if not _remove(self._pointer, 0, length, -1):
            raise RuntimeError(f"ik_llama.cpp could not cut a sequence back to {length} tokens")

    def decode(self, token_ids: Sequence[int], position: int, logits_from: int) -> Logits:
        """Runs tokens that follow the first `position`, in one pass.

        Returns the logits of those from `logits_from` on, which the next call overwrites.
        """
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for index, id_ in enumerate(token_ids):
            batch.token[index], batch.pos[index] = id_, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index >= logits_from
        if code := api.llama_decode(self._pointer, batch):
            raise RuntimeError(f"ik_llama.cpp failed in a forward (code {code})")
        count = len(token_ids) - logits_from
        if count == 0:
            return np.empty((0, self._model.vocabulary_size), np.float32)
        return np.ctypeslib.as_array(_logits(self._pointer), (count, self._model.vocabulary_size))

    def copy_from(self, other: "Context") -> None:
        """Takes all that another context holds, in place of its own."""
        size = _state_size(other._pointer, 0, 0)
        buffer = np.empty(size, np.uint8)
        if _get_state(other._pointer, buffer.ctypes.data, size, 0, 0) != size:
            raise RuntimeError("ik_llama.cpp could not read a sequence")
        self.cut(0)
        if _set_state(self._pointer, buffer.ctypes.data, size, 0, 0) != size:
            raise RuntimeError("ik_llama.cpp could not copy a sequence")
