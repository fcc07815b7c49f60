"""Accelerates forwards of few tokens: compiles them for the CPU, records them as graphs for CUDA.

Both need fixed shapes, so tokens are padded to the next of a few widths.
"""

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, Protocol

import torch
from torch._inductor import config

from bridge.errors import UnusableModel
from services.engines.engine import CONTEXT_STEP, Row
from services.engines.torch.attention import using
from services.engines.torch.cache import RaggedBatch, SlotCaches, TokenBatch
from services.engines.torch.model import TokenLogits

_log = logging.getLogger(__name__)

# Numbers of tokens of compiled forwards. 8 tokens cost a quarter more than 1, so padding costs little.
_COMPILED_WIDTHS = (1, 8, 16)
_GRAPH_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# Maximum of tokens times positions of a recorded forward, because it copies a slot's keys and values for each token.
_MAX_COPIED = 1 << 16
_COMPILER = {
    # Rearranges the weights once, for the processor's matrix units, and chooses the fastest kernel by measuring.
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
}


class FastForwards(Protocol):
    """Runs forwards of few tokens. `widths`: the numbers that these are padded to."""

    widths: tuple[int, ...]

    def run(self, rows: Sequence[Row], ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor | None:
        """Returns logits [`wanted` and possibly padding, vocabulary size], or None if the forward is too large."""
        ...


class CompiledForwards:
    """Compiles forwards for CPUs, which takes minutes. Raises `UnusableModel` if that fails."""

    def __init__(self, logits: TokenLogits, caches: SlotCaches) -> None:
        self.widths: tuple[int, ...] = _COMPILED_WIDTHS
        self._caches = caches
        self._compiled = torch.compile(logits, dynamic=False, fullgraph=True)
        try:
            for width in self.widths:
                # Not as `options` of `torch.compile`, which are read after it has decided whether weights are
                # constants. Its reports on the choice of kernels are hidden, because users cannot act on them.
                with config.patch(_COMPILER), redirect_stderr(StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.run([Row(0, 0, (0,) * width, 0)], [0] * width, list(range(width)), [0])
        except Exception as error:
            raise UnusableModel(
                f"the model could not be compiled ({type(error).__name__}: {str(error)[:300]}): install a C++ compiler "
                "(g++) if there is none, or leave out --compile"
            ) from error

    def run(self, rows: Sequence[Row], ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor | None:
        """See `FastForwards`."""
        width = next((width for width in self.widths if width >= len(ids)), None)
        if width is None:
            return None
        with using(RaggedBatch(self._caches, rows)):
            found: torch.Tensor = self._compiled(
                *(torch.tensor(one + [0] * (width - len(one))) for one in (ids, positions, wanted))
            )
        return found


class GraphForwards:
    """Records a graph for each width and cache length when it first occurs, on CUDA, and replays it from then on.

    Tensors hold all inputs that change between forwards: ids, positions, slots. On other devices, for tests, forwards
    are not recorded but return the same logits. `run` raises `UnusableModel` if the first one cannot be recorded. Where
    a later one cannot, because memory has run out, its forwards run without.
    """

    def __init__(self, logits: TokenLogits, caches: SlotCaches, device: torch.device) -> None:
        self.widths: tuple[int, ...] = _GRAPH_WIDTHS
        self._logits, self._caches, self._device = logits, caches, device
        lengths = [min(CONTEXT_STEP, caches.capacity)]
        while lengths[-1] < caches.capacity:
            lengths.append(min(2 * lengths[-1], caches.capacity))
        self._lengths = lengths
        self._pool: Any = None
        self._recorded: dict[tuple[int, int], tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        self._failed: set[tuple[int, int]] = set()

    def run(self, rows: Sequence[Row], ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor | None:
        """See `FastForwards`."""
        width = next((width for width in self.widths if width >= len(ids)), None)
        length = self._lengths[bisect_left(self._lengths, max(positions) + 1)]
        if width is None or width * length > _MAX_COPIED or (width, length) in self._failed:
            return None
        slots = [row.slot for row in rows for _ in row.token_ids]
        # Padded with copies of the last token, which write the same keys and values to the same position.
        lists = (ids, positions, slots, wanted or [0])
        filled = torch.tensor([one + one[-1:] * (width - len(one)) for one in lists])
        if (width, length) not in self._recorded:
            try:
                self._recorded[width, length] = self._record(filled.to(self._device), length)
            except UnusableModel as error:
                if not self._recorded:
                    raise
                self._failed.add((width, length))
                _log.warning("forwards of %d tokens and %d positions run without a graph: %s", width, length, error)
                return None
        inputs, replay = self._recorded[width, length]
        inputs.copy_(filled)
        return replay()

    def _record(self, inputs: torch.Tensor, length: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Records the forward of `inputs` [4, width]. Recording also runs it, so its keys and values are stored."""
        ids, positions, slots, wanted = inputs

        def forward() -> torch.Tensor:
            with using(TokenBatch(self._caches, slots, positions, length)):
                found: torch.Tensor = self._logits(ids, positions, wanted)
            return found

        if self._device.type != "cuda":
            return inputs, forward
        try:
            if self._pool is None:  # one for all, because only one of them runs at a time
                self._pool = torch.cuda.graph_pool_handle()
            return inputs, _graph(forward, self._pool)
        except Exception as error:
            raise UnusableModel(
                f"the model's forward could not be recorded as a CUDA graph ({type(error).__name__}: "
                f"{str(error)[:300]}): leave out --compile"
            ) from error


def _graph(forward: Callable[[], torch.Tensor], pool: Any) -> Callable[[], torch.Tensor]:
    """Returns a recorded forward. Its result is valid until another one runs that shares the memory `pool`."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries initialize themselves, which cannot be recorded
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = forward()

    def replay() -> torch.Tensor:
        graph.replay()
        return found

    return replay
