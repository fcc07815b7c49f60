"""Forwards of a few tokens, made fast ahead of time: compiled for the CPU, recorded as graphs for CUDA.

Both need shapes that repeat, so fewer tokens than a width are filled up to it.
"""

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

# Tokens of a compiled forward. Eight cost a quarter more than one, the rest of the way is flat.
_COMPILED_WIDTHS = (1, 8, 16)
_GRAPH_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# Tokens by places of a recorded forward: each token gets a copy of its slot's keys and values.
_LARGEST = 1 << 16
_COMPILER = {
    # Weights are rearranged once, for the processor's matrix units, by whichever kernel turns out to be the fastest.
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
}


class FastForwards(Protocol):
    """Runs what it has a width for."""

    def run(self, rows: Sequence[Row], ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor | None:
        """Logits [`wanted` and perhaps more, vocabulary size] of the tokens of all rows; None if they are too many."""
        ...


class CompiledForwards:
    """For CPUs, by torch's compiler, which takes minutes. Raises `UnusableModel` if it cannot."""

    def __init__(self, logits: TokenLogits, caches: SlotCaches) -> None:
        self._caches = caches
        self._compiled = torch.compile(logits, dynamic=False, fullgraph=True)
        try:
            for width in _COMPILED_WIDTHS:
                # The settings are not given as `options`: whether weights may be taken for constants is asked before
                # it sees those. What it has to say of its choices is not for users.
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
        width = next((width for width in _COMPILED_WIDTHS if width >= len(ids)), None)
        if width is None:
            return None
        with using(RaggedBatch(self._caches, rows)):
            found: torch.Tensor = self._compiled(
                *(torch.tensor(one + [0] * (width - len(one))) for one in (ids, positions, wanted))
            )
        return found


class GraphForwards:
    """For CUDA: each width, with each of a few lengths, is recorded when it first comes, and then only replayed.

    What changes from one forward to the next stands in tensors: ids, positions, slots. On another device nothing is
    recorded, and it is a slower way to the same logits, for the tests. Raises `UnusableModel` if it cannot record.
    """

    def __init__(self, logits: TokenLogits, caches: SlotCaches, device: torch.device) -> None:
        self._logits, self._caches, self._device = logits, caches, device
        lengths = [CONTEXT_STEP]
        while lengths[-1] < caches.capacity:
            lengths.append(min(2 * lengths[-1], caches.capacity))
        self._lengths = lengths
        self._pool: Any = None
        self._recorded: dict[tuple[int, int], tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def run(self, rows: Sequence[Row], ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor | None:
        """See `FastForwards`."""
        width = next((width for width in _GRAPH_WIDTHS if width >= len(ids)), None)
        length = self._lengths[bisect_left(self._lengths, max(positions) + 1)]
        if width is None or width * length > _LARGEST:
            return None
        slots = [row.slot for row in rows for _ in row.token_ids]
        # Filled up with the last token once more: it writes the same to the same place.
        lists = (ids, positions, slots, wanted or [0])
        filled = torch.tensor([one + one[-1:] * (width - len(one)) for one in lists])
        if (width, length) not in self._recorded:
            self._recorded[width, length] = self._record(filled.to(self._device), length)
        inputs, replay = self._recorded[width, length]
        inputs.copy_(filled)
        return replay()

    def _record(self, inputs: torch.Tensor, length: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """`inputs` [4, width] are those of a forward that is due: recording runs it, and leaves its keys and values."""
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
    """A forward, recorded. What it returns is valid until another one runs that shares the `pool` of memory."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries set up what they need
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = forward()

    def replay() -> torch.Tensor:
        graph.replay()
        return found

    return replay
