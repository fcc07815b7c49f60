"""The interface of engines, and functions that all engines share: checks, measurements, sizes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol, runtime_checkable

import numpy as np

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.timing import Timing, timed

# `measure` times forwards of these numbers of tokens after this many cached tokens, for about this long in total. Those
# that a slow model has no time for come last: they are interpolated from 1 and 8.
_MEASURED_WIDTHS, _MEASURED_CONTEXT, _MEASURING_NS = (1, 8, 4, 2, 12, 25, 3, 6), 128, 5_000_000_000
# It times forwards this often, and those that other work on the machine disturbed again, up to the second number.
_TIMES, _MAX_TIMES = 2, 4
# `warm` goes on after this time only if it gains something.
_WARMING_NS = 5_000_000_000
# Widths whose first forward is compared with the second. Below this ratio it prepared nothing, and after this number of
# such widths warming ends. The ratio is 1.0 to 1.1 in torch and ik_llama.cpp, and 1.4 to 3.5 in OpenVINO.
_COMPARED_WIDTHS, _UNPREPARED, _UNPREPARED_WIDTHS = 5, 1.2, 3
# A prime, so that multiples of it modulo the size of a vocabulary are distinct.
_ID_STEP = 7919
# Slot lengths are multiples of this number of tokens, because llama.cpp rounds them up to it.
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Row:
    """One sequence's part of a forward.

    The slot's cache keeps its first `keep` tokens, drops the rest and appends `token_ids`. The engine returns logits
    for the positions from `logits_from` (an index into `token_ids`) to the end.
    """

    slot: int
    keep: int
    token_ids: tuple[int, ...]
    logits_from: int


class Engine(Protocol):
    """A model's weights and the KV caches of `slot_count` sequences. The memory of the caches is fixed at the start."""

    @property
    def name(self) -> str:
        """The engine's name in the registry, such as "torch"."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def context_length(self) -> int:
        """The maximum length of a sequence in tokens: the model's limit or a slot's size, whichever is smaller."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """The number of columns of the logits."""
        ...

    @property
    def slot_count(self) -> int: ...

    @property
    def cache_byte_count(self) -> int:
        """The memory of the keys and values of all slots, in bytes."""
        ...

    @property
    def logit_tolerance(self) -> float:
        """How much the difference of two logits of a position may vary with the forward that computes them."""
        ...

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Runs all rows, each of another slot, in one pass.

        Returns logits [len(token_ids) - logits_from, vocabulary_size] for each row. The next call may overwrite them.
        Raises ValueError for invalid rows, before it changes anything. Only one thread may use an engine.
        """
        ...

    def copy(self, source: int, target: int, token_count: int) -> None:
        """Replaces the cache of slot `target` by the first `token_count` tokens of slot `source`.

        Raises ValueError for slots or counts out of range. The caller ensures, here and in `forward`, that a slot
        holds the tokens that are to be kept.
        """
        ...


@runtime_checkable
class Branching(Protocol):
    """An engine whose forwards can be trees: candidates with branches."""

    @property
    def takes_branches(self) -> bool:
        """Whether `forward_branches` takes no longer than a forward of as many tokens."""
        ...

    def forward_branches(self, row: Row, branches: Sequence[tuple[int, int]]) -> Logits:
        """Runs a row as `forward` does, and `branches`: pairs of an index into `row.token_ids` and an id in its place.

        The id continues what is before that index. Returns logits [len(token_ids) - logits_from + len(branches),
        vocabulary_size], those of the branches last. The cache does not keep branches. Raises ValueError as `forward`.
        """
        ...


def branching(engine: Engine) -> Branching | None:
    """Returns the engine if it takes branches."""
    return engine if isinstance(engine, Branching) and engine.takes_branches else None


def check(engine: Engine, rows: Sequence[Row], branches: Sequence[tuple[int, int]] = ()) -> None:
    """Raises ValueError for invalid rows, or branches of the first one; see `Engine.forward`."""
    if not rows or len({row.slot for row in rows}) < len(rows):
        raise ValueError("no row, or two rows for a slot")
    for row in rows:
        if not 0 <= row.slot < engine.slot_count:
            raise ValueError(f"a row for slot {row.slot} of {engine.slot_count}")
        if not 0 <= row.logits_from <= len(row.token_ids):
            raise ValueError(f"a row with logits from {row.logits_from} of {len(row.token_ids)} tokens")
        if not row.token_ids or not 0 <= row.keep <= engine.context_length - len(row.token_ids):
            raise ValueError(f"a row of {len(row.token_ids)} tokens after {row.keep}, in {engine.context_length}")
        if not 0 <= min(row.token_ids) <= max(row.token_ids) < engine.vocabulary_size:
            raise ValueError(f"a row with an id outside the vocabulary of {engine.vocabulary_size}")
    for index, id_ in branches:
        if not (0 <= index < len(rows[0].token_ids) and 0 <= id_ < engine.vocabulary_size):
            raise ValueError(f"a branch to id {id_} at {index} of {len(rows[0].token_ids)} tokens")


def check_copy(engine: Engine, source: int, target: int, token_count: int) -> None:
    """Raises ValueError for an invalid copy; see `Engine.copy`."""
    if not (0 <= source < engine.slot_count and 0 <= target < engine.slot_count and source != target):
        raise ValueError(f"a copy from slot {source} to {target} of {engine.slot_count}")
    if not 0 <= token_count <= engine.context_length:
        raise ValueError(f"a copy of {token_count} tokens of {engine.context_length}")


def sample_ids(count: int, vocabulary_size: int) -> tuple[int, ...]:
    """Returns ids from the whole vocabulary, to run forwards without a text.

    One repeated id would be unlike any text: experts of a mixture would stay idle, and an engine that measures the
    range of values for FP8 would keep those of that id.
    """
    return tuple(index * _ID_STEP % vocabulary_size for index in range(1, count + 1))


def warm(engine: Engine, widths: Iterable[int], clock_ns: Callable[[], int] = perf_counter_ns) -> None:
    """Runs one forward of each width, because libraries prepare kernels when they first see a shape.

    The first forward of a width may take ten times as long as later ones, which would distort measured costs. Where it
    does not, there is nothing to prepare: on a CPU, three of the second to sixth widths show it, because other work may
    slow down one of them, and this ends there. Elsewhere, where some widths share a kernel, it ends after 5 seconds.
    """

    def run(width: int) -> int:
        started = clock_ns()
        engine.forward([Row(0, 0, sample_ids(width, engine.vocabulary_size), 0)])
        return clock_ns() - started

    began, unprepared = clock_ns(), 0
    for number, width in enumerate(width for width in widths if width <= engine.context_length):
        first_ns = run(width)
        late = clock_ns() - began > _WARMING_NS
        compared = engine.device.lower() == "cpu" and 0 < number <= _COMPARED_WIDTHS
        again_ns = run(width) if late or compared else 0
        # Other work may also slow down the second one.
        unprepared += compared and max(first_ns, again_ns) < _UNPREPARED * min(first_ns, again_ns)
        if unprepared == _UNPREPARED_WIDTHS or (late and first_ns < 2 * again_ns):
            return


def measure(engine: Engine, *, all_logits: bool, widths: Sequence[int] = _MEASURED_WIDTHS) -> list[tuple[int, Timing]]:
    """Returns (number of tokens, time of a forward of them), by number of tokens, after 128 cached tokens.

    Bridges plan with these until they have measured forwards themselves. `all_logits`: computes the logits of all
    tokens, as a target does; a draft needs only the last. The time is the best of two forwards, or of up to four if
    other work disturbed them. Starts no forward after 5 seconds, once it has two numbers.
    """
    context = min(_MEASURED_CONTEXT, engine.context_length // 2)
    ids = sample_ids(context + max(widths), engine.vocabulary_size)
    engine.forward([Row(0, 0, ids[:context], context)])
    found: dict[int, Timing] = {}
    stop_ns = perf_counter_ns() + _MEASURING_NS

    def run(width: int) -> None:
        late = len(found) >= 2 and perf_counter_ns() >= stop_ns
        if context + width > engine.context_length or late:
            return
        row = Row(0, context, ids[context : context + width], 0 if all_logits else width - 1)
        timing = timed(lambda: engine.forward([row]))
        found[width] = min(found.get(width, timing), timing)

    for _ in range(2):  # the first ones take longer
        run(1)
    found.clear()
    for width in tuple(widths) * _TIMES:
        run(width)
    for _ in range(_MAX_TIMES - _TIMES):
        for width in [width for width, timing in found.items() if timing.disturbed]:
            run(width)
    return sorted(found.items())


def by_row(table: Logits, rows: Sequence[Row]) -> list[Logits]:
    """Splits the concatenated logits of all rows into one array per row."""
    ends = np.cumsum([len(row.token_ids) - row.logits_from for row in rows])
    return np.split(table, ends[:-1])


def slot_room(token_bytes: int, slot_count: int, cache_byte_limit: int, limit: int) -> int:
    """Returns the size of a slot in tokens: a multiple of `CONTEXT_STEP`, at most `limit` rounded up to one.

    `token_bytes`: memory of one token's keys and values. Raises `UnusableModel` if the memory is too small.
    """
    room = cache_byte_limit // (slot_count * token_bytes) // CONTEXT_STEP * CONTEXT_STEP
    if room <= 0:  # negative if an engine has set some memory aside
        raise UnusableModel(
            f"{slot_count} sequences of {CONTEXT_STEP} tokens, the minimum, take "
            f"{slot_count * token_bytes * CONTEXT_STEP / 2**30:.2f} GiB of keys and values: increase --kv-memory, or "
            "decrease --slots"
        )
    return min(room, -(-limit // CONTEXT_STEP) * CONTEXT_STEP)
