"""Runs optimum-habana's models on Intel Gaudi: fixed slots, static shapes, one read of the device per pass.

Rolling back is a smaller `keep`: cells after it are overwritten later, and no mask shows them before.
"""

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.engine import Row, by_row, check, check_copy, slot_room
from services.engines.habana.cache import Probe, attending, install
from services.engines.habana.launch import rank, rank_count
from services.engines.habana.model import (
    check_lazy_mode,
    computes_fp8,
    load_sharded,
    mark_constants,
    model_options,
    prepare_process,
    quantize,
    self_test,
)
from services.engines.habana.ranks import Ranks
from services.engines.habana.shapes import Shapes
from services.engines.habana.worker import Worker
from services.engines.spec import GaudiOptions
from services.engines.torch.model import context_limit, load_model, read_config

_log = logging.getLogger(__name__)

_DTYPES = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}
# As for the torch engine: not measured on a Gaudi, see docs/guides/gaudi.md.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.75}
# Gaudi's library has no type for this error: "... MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB".
_MEMORY_FULL = re.compile("memory|alloc", re.IGNORECASE)


class HabanaEngine:
    """A model of optimum-habana on one Gaudi, or on several with a process each.

    `source`: a directory that `from_pretrained` reads. `device`: "hpu", or "cpu" to test without a Gaudi. In all
    processes but the first, `__init__` does not return: the process ends when the first one stops.
    Raises `UnusableModel` for a model that cannot run in static shapes with fixed slots.
    """

    name = "habana"

    def __init__(
        self,
        source: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        slot_count: int = 8,
        cache_byte_limit: int = 2 << 30,
        trusted: bool = False,
        gaudi: GaudiOptions = GaudiOptions(),  # noqa: B008, it is frozen
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = "hpu" if device == "auto" else device
        self._dtype, self._gaudi = _DTYPES[dtype], gaudi
        self.slot_count = slot_count
        check_lazy_mode(gaudi)
        config = read_config(source, trusted)
        sharded = rank_count() > 1
        self._in_fp8 = computes_fp8(gaudi.quant_config)
        test = None if sharded or self._in_fp8 else self_test(source, self._dtype, trusted)
        prepare_process(gaudi)
        if sharded:
            self._model = load_sharded(source, config, self._dtype, trusted)
        else:
            self._check_device()
            self._model = load_model(source, self._dtype, trusted).eval()
        self._config = self._model.config.get_text_config()
        try:
            finish = self._open(cache_byte_limit)
            if not rank():
                self._warm_up()
            if test:
                test.check(self)
        except UnusableModel:
            raise
        except Exception as error:  # optimum-habana's classes fail with errors of many types
            raise self._unusable(error) from error
        if rank():
            self._follow(finish)

    @property
    def dtype(self) -> str:
        return "fp8" if self._in_fp8 else str(self._dtype).removeprefix("torch.")

    @property
    def logit_tolerance(self) -> float:
        return _TOLERANCES[self._dtype]

    @property
    def vocabulary_size(self) -> int:
        return int(self._config.vocab_size)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        found = [np.empty((0, self.vocabulary_size), np.float32)]
        for _, message, count in self._shapes.passes(rows):
            self._ranks.send(message)
            logits = self._worker.execute(message)
            if count:
                assert logits is not None
                # The only wait for the device. All rows are read, because a part would be another shape.
                found.append(logits.cpu().float().numpy()[:count])
        return by_row(np.concatenate(found), rows)

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        message = self._shapes.copying(source, target, token_count)
        self._ranks.send(message)
        self._worker.execute(message)

    def _check_device(self) -> None:
        try:
            torch.empty(0, device=self.device)
        except Exception as error:  # of many types, depending on what is installed
            raise UnusableModel(
                f"there is no device {self.device} ({' '.join(str(error).split())[:200]}): follow step 1 of "
                "docs/guides/gaudi.md, or use --engine torch"
            ) from error

    def _open(self, cache_byte_limit: int) -> Callable[[], None] | None:
        """Prepares the model. Returns what a process calls before it ends, if anything."""
        options = model_options(self._model, self._gaudi)
        caches = install(self._model)
        if not caches:
            raise ValueError("optimum-habana's class has no replaceable cache or mask")
        finish: Callable[[], None] | None = None
        if self._gaudi.quant_config:
            self._model, finish = quantize(self._model, self._gaudi.quant_config)
        self._model = self._model.to(self.device)
        windows = self._probe(options)
        token_bytes = sum(cache.token_byte_count for cache in caches)
        limit = self._context_limit(windows)
        self.context_length = min(limit, slot_room(token_bytes, self.slot_count, cache_byte_limit, limit))
        self.cache_byte_count = self.context_length * self.slot_count * token_bytes
        gaudi = self._gaudi
        self._shapes = Shapes(self.slot_count, self.context_length, gaudi.bucket_size, gaudi.bucket_internal)
        self._worker = Worker(self._model, caches, self._shapes, gaudi, options)
        if gaudi.quant_config:
            mark_constants(self._model)
        self._ranks = Ranks()
        if not rank():
            if finish:
                atexit.register(finish)
            self._ranks.stop_with(self)
        return finish

    def _follow(self, finish: Callable[[], None] | None) -> None:
        """Computes this process's part of the model until the first process stops, and then ends this process."""
        status = self._ranks.follow(self._worker.execute)
        if finish:
            finish()
        os._exit(status)

    @torch.inference_mode()
    def _probe(self, options: dict[str, bool]) -> set[int]:
        """Runs one token, after which all caches know their sizes. Returns the windows of the model's masks."""
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        probe = Probe(self.device)
        with attending(probe):
            self._model(
                input_ids=one, position_ids=one, use_cache=True, reuse_cache=True, token_idx=one[0] + 1, **options
            )
        if not probe.windows:
            raise ValueError("optimum-habana's class makes its masks itself")
        return probe.windows

    def _context_limit(self, windows: set[int]) -> int:
        limit = context_limit(self._config)
        window = getattr(self._config, "sliding_window", None)
        if window and windows == {0}:
            # The class ignores the window. Within one window, that makes no difference.
            limit = min(limit, int(window))
        return limit

    def _warm_up(self) -> None:
        """Runs every shape twice, because a Gaudi compiles then, for seconds or minutes in total.

        The first run records a graph, the second one replays it, which copies its inputs to those of the recording.
        """
        shapes = self._shapes.all()
        _log.info("%d shapes: %s tokens, %s cached", len(shapes), self._shapes.widths, self._shapes.lengths)
        for shape in track(
            shapes * 2,
            f"warming up {len(shapes)} shapes",
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ):
            self.forward(self._shapes.example(shape, self.vocabulary_size))
        if self.slot_count > 1:
            for length in self._shapes.lengths * 2:
                self.copy(0, 1, length)

    def _unusable(self, reason: Exception) -> UnusableModel:
        if isinstance(reason, RuntimeError) and _MEMORY_FULL.search(str(reason)):
            return UnusableModel(
                f"the model and {self.slot_count} sequences do not fit into the memory of {self.device} "
                f"({' '.join(str(reason).split())[:200]}): decrease --kv-memory or --slots, use --limit-hpu-graphs, or "
                "choose a smaller model"
            )
        return UnusableModel(
            f"a {self._config.model_type} model cannot be served by optimum-habana with fixed slots ({reason}): choose "
            "a Llama, Qwen2, Mistral or Gemma model, or use --engine torch",
            model_type=self._config.model_type,
        )
