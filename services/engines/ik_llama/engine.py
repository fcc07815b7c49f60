"""ik_llama.cpp: a GGUF model on the CPU, whose logits depend on nothing but the text, bit for bit.

Each slot has a context of its own over one copy of the weights. Several sequences in one context share a pass, but the
cells of their tokens lie between one another, so sums in attention round in another order and logits move by up to 1.7.
Rows of a forward run beside one another, with their share of the threads each: eight sequences cost eight passes.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.cpu import core_count
from services.engines.engine import Row, check, check_copy, slot_room
from services.engines.gguf import file_type
from services.engines.ik_llama.library import MAX_AT_ONCE, Context, Model
from services.engines.ik_llama.probe import choose_way
from services.engines.ik_llama.spec import MAX_CONTEXTS
from services.engines.openmp import unbound

# A token that fills a pass up, and is cut off again.
_FILLER = 0
# Room for it after a full slot; llama.cpp rounds lengths up to a multiple of it.
_SPARE = 32
# Logits that are taken out of a pass. The library clears its output at each pass, as large as it ever was.
_MAX_LOGITS = 16


class IkLlamaEngine:
    """A GGUF file on the CPU.

    `threads`: CPU threads. `cache_byte_limit`: memory for the keys and values of all slots. `repacked`: whether the
    library rearranges the weights; None leaves that to a measurement. The first time that it sees a file it tries how
    to run it, for a few seconds. Raises `UnusableModel` for a file that ik_llama.cpp cannot run, or whose state cannot
    be cut back to a length.
    """

    name = "ik_llama"
    device = "cpu"

    def __init__(
        self,
        gguf: Path,
        *,
        threads: int | None = None,
        slot_count: int = 8,
        cache_byte_limit: int = 2 << 30,
        repacked: bool | None = None,
    ) -> None:
        if slot_count > MAX_CONTEXTS:
            raise UnusableModel(f"the ik_llama engine holds at most {MAX_CONTEXTS} sequences: use fewer --slots")
        self._threads = threads or core_count()
        self._way = choose_way(gguf, self._threads, repacked)
        self._model = Model(gguf, repacked=self._way.repacked)
        # Logits depend on the way, so it is a part of what two servers compare.
        file_dtype = file_type(int(self._model.meta("general.file_type") or 0))
        self.dtype = f"{file_dtype} repacked" if self._way.repacked else file_dtype
        self.vocabulary_size = self._model.vocabulary_size
        self.slot_count = slot_count
        token_bytes = self._model.token_byte_count
        spare = _SPARE if self._way.min_width > 1 else 0
        left = cache_byte_limit - slot_count * spare * token_bytes
        length = slot_room(token_bytes, slot_count, left, self._model.length)
        self.context_length = min(self._model.length, length)
        self.cache_byte_count = (length + spare) * slot_count * token_bytes
        self._contexts = [Context(self._model, length + spare, self._threads) for _ in range(slot_count)]
        self._at_once = min(self._threads, slot_count, MAX_AT_ONCE)
        self._pool = ThreadPoolExecutor(self._at_once, "ik_llama")

    @property
    def logit_tolerance(self) -> float:
        """See `Engine`. 0.0 for every type of weights that was tried."""
        return 2 * self._way.drift

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        if len(rows) == 1 or self._at_once == 1:
            return [self._run(row, self._threads) for row in rows]
        threads = self._threads // min(len(rows), self._at_once)
        with unbound():
            running = [self._pool.submit(self._run, row, threads) for row in rows]
            wait(running)  # also if one fails: the next forward may not meet a context that is still in use
        return [one.result() for one in running]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        if token_count:
            self._contexts[target].copy_from(self._contexts[source])
        self._contexts[target].cut(token_count)

    def _run(self, row: Row, threads: int) -> Logits:
        context = self._contexts[row.slot]
        context.use_threads(threads)
        context.cut(row.keep)
        ids, start, tables = row.token_ids, 0, []
        for end in _ends(len(ids), len(ids) - row.logits_from, self._way.max_width):
            part = ids[start:end]
            filled = (*part, *[_FILLER] * (self._way.min_width - len(part)))
            table = context.decode(filled, row.keep + start, min(max(row.logits_from - start, 0), len(filled)))
            if len(filled) > len(part):
                context.cut(row.keep + end)
                table = table[: len(part)] if row.logits_from < end else table[:0]
            tables.append(table if end == len(ids) else table.copy())
            start = end
        return np.concatenate(tables) if len(tables) > 1 else tables[0]


def _ends(count: int, logit_count: int, width: int) -> list[int]:
    """Returns where the passes end that `count` tokens go through, about as wide as one another."""
    limit = min(width, _MAX_LOGITS) if logit_count > _MAX_LOGITS else width
    parts = -(-count // limit)
    return [count * (part + 1) // parts for part in range(parts)]
