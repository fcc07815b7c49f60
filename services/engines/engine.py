"""What an engine is."""

import hashlib
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits

# Widths of the forwards that are timed, the tokens before them, and how long that may take in all.
_MEASURED_WIDTHS, _MEASURED_CONTEXT, _MEASURING_NS = (1, 2, 3, 5, 9, 17, 25), 128, 5_000_000_000
# With room for fewer tokens a slot is of no use. llama.cpp rounds lengths up to a multiple of it.
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Row:
    """One sequence's part of a forward.

    The slot's cache keeps its first `keep` tokens, drops the rest and takes `token_ids` behind them.
    Logits come back for the positions from `logits_from` (an index into `token_ids`) to the end.
    """

    slot: int
    keep: int
    token_ids: tuple[int, ...]
    logits_from: int


class Engine(Protocol):
    """A model's weights and the caches of `slot_count` sequences, whose memory is set aside from the start."""

    @property
    def name(self) -> str:
        """What runs it: "torch", ..."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def context_length(self) -> int:
        """The longest sequence in tokens: the model's limit, or what a slot has room for."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def slot_count(self) -> int: ...

    @property
    def cache_byte_count(self) -> int:
        """Memory of all slots' keys and values."""
        ...

    @property
    def logit_tolerance(self) -> float:
        """How far the lead of one logit over another may move with the forward that both are computed in."""
        ...

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Runs all rows, of different slots, in one pass.

        Returns for each logits [len(token_ids) - logits_from, vocabulary_size]. The arrays may be overwritten by the
        next call. Raises ValueError for rows that cannot be, before anything is done. Not thread-safe: one thread
        per engine.
        """
        ...

    def copy(self, source: int, target: int, token_count: int) -> None:
        """Puts the first so many tokens of one slot's cache into another, whose own are dropped.

        Raises ValueError for what cannot be. That a slot holds so many tokens is for the caller to see to, here and in
        `forward`.
        """
        ...


def check(engine: Engine, rows: Sequence[Row]) -> None:
    """Raises ValueError for rows that the engine cannot run."""
    if not rows or len({row.slot for row in rows}) < len(rows):
        raise ValueError("no row, or two rows for a slot")
    for row in rows:
        if not 0 <= row.slot < engine.slot_count:
            raise ValueError(f"a row for slot {row.slot} of {engine.slot_count}")
        if not 0 <= row.logits_from <= len(row.token_ids):
            raise ValueError(f"a row with logits from {row.logits_from} of {len(row.token_ids)} tokens")
        if not row.token_ids or not 0 <= row.keep <= engine.context_length - len(row.token_ids):
            raise ValueError(f"a row of {len(row.token_ids)} tokens behind {row.keep} of {engine.context_length}")
        if not 0 <= min(row.token_ids) <= max(row.token_ids) < engine.vocabulary_size:
            raise ValueError(f"a row with an id outside {engine.vocabulary_size}")


def check_copy(engine: Engine, source: int, target: int, token_count: int) -> None:
    """Raises ValueError for a copy that the engine cannot make."""
    if not (0 <= source < engine.slot_count and 0 <= target < engine.slot_count and source != target):
        raise ValueError(f"a copy from slot {source} to {target} of {engine.slot_count}")
    if not 0 <= token_count <= engine.context_length:
        raise ValueError(f"a copy of {token_count} tokens of {engine.context_length}")


def warm(engine: Engine, widths: Iterable[int]) -> None:
    """Runs a forward of each width once: libraries prepare kernels for each shape when they first meet it.

    That may take ten times as long as the forward, and would be taken for what such forwards cost.
    """
    for width in widths:
        if width <= engine.context_length:
            engine.forward([Row(0, 0, (0,) * width, 0)])


def measure(engine: Engine, *, all_logits: bool) -> list[tuple[int, int]]:
    """Numbers of tokens, from few to many, and the nanoseconds that a forward of them takes after `_MEASURED_CONTEXT`.

    Bridges plan with these until they have seen forwards of their own. `all_logits`: as a target, which verifies every
    token; a draft asks only for the last. Takes the faster of two forwards each, and stops when it has taken long.
    """
    context = min(_MEASURED_CONTEXT, engine.context_length // 2)
    engine.forward([Row(0, 0, (0,) * context, context)])
    found: dict[int, int] = {}
    stop_ns = perf_counter_ns() + _MEASURING_NS
    for width in (1, 1, *_MEASURED_WIDTHS, *_MEASURED_WIDTHS):
        if context + width <= engine.context_length and (len(found) < 2 or perf_counter_ns() < stop_ns):
            started = perf_counter_ns()
            engine.forward([Row(0, context, (0,) * width, 0 if all_logits else width - 1)])
            taken_ns = perf_counter_ns() - started
            found[width] = min(found.get(width, taken_ns), taken_ns)
    return sorted(found.items())


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_units(device: str, threads: int | None) -> tuple[frozenset[str], int]:
    """Names of the cores or the accelerator that an engine on `device` computes on, and how many it uses at a time.

    The names are those of this machine until it boots anew, and tell nothing else about it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text() if boot.is_file() else str(uuid.getnode())
    machine = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if device.lower() != "cpu":
        # Engines have different names for the same accelerator.
        return frozenset({f"{machine}/{device.lower().replace('cuda', 'gpu').removesuffix(':0')}"}), 1
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(core_count())
    return frozenset(f"{machine}/cpu{core}" for core in cores), min(threads or len(cores), len(cores))


def by_row(table: Logits, rows: Sequence[Row]) -> list[Logits]:
    """Logits of all rows behind one another, taken apart."""
    ends = np.cumsum([len(row.token_ids) - row.logits_from for row in rows])
    return np.split(table, ends[:-1])


def slot_room(token_bytes: int, slot_count: int, cache_byte_limit: int, limit: int) -> int:
    """Tokens that each slot has room for, a multiple of `CONTEXT_STEP`, and no more of them than `limit` needs.

    `token_bytes`: memory of one token's keys and values. Raises `UnusableModel` if there is room for too few.
    """
    room = cache_byte_limit // (slot_count * token_bytes) // CONTEXT_STEP * CONTEXT_STEP
    if room == 0:
        raise UnusableModel(
            f"{slot_count} sequences of {CONTEXT_STEP} tokens take "
            f"{slot_count * token_bytes * CONTEXT_STEP / 2**30:.2f} GiB of keys and values: allow more with "
            "--kv-memory, or fewer --slots"
        )
    return min(room, -(-limit // CONTEXT_STEP) * CONTEXT_STEP)
