"""Measures what deterministic logits cost: the forwards of the torch engine with and without, in one run.

    python -m benchmarks.deterministic [--model NAME] [--dtype bfloat16] [--threads 2]

Prints the median milliseconds of reading a prompt, of one token for each of eight sequences, and of forwards of one to
eight tokens after the prompt. The last row counts the positions whose logits were bit-identical in the latter and in
one forward of all tokens after the prompt.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from services.engines.engine import Engine, Row
from services.engines.fixed_width import as_served
from services.engines.torch.engine import TorchEngine
from services.store.resolve import resolve

PROMPT = 500
STEPS = 48
WIDTHS = (1, 4, 8)
SEQUENCES = 8
REPEATS = 3


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    directory = resolve(arguments.model)
    plain, other = (
        TorchEngine(directory, dtype=arguments.dtype, threads=arguments.threads, slot_count=SEQUENCES) for _ in range(2)
    )
    served = as_served(other, True)
    print("batch-invariant passes" if served is other else "passes of one shape")
    ways: dict[str, Engine] = {"plain": plain, "deterministic": served}
    ids = np.random.default_rng(0).integers(1000, 10_000, PROMPT + STEPS).tolist()
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    same: dict[str, list[bool]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, engine in ways.items():
            _time(times[name, f"prompt of {PROMPT}"], lambda engine=engine: _read(engine, 0, 0, ids[:PROMPT]))
            batch = [Row(slot, 0, tuple(ids[:SEQUENCES]), SEQUENCES - 1) for slot in range(SEQUENCES)]
            engine.forward(batch)
            batch = [Row(slot, SEQUENCES, (ids[SEQUENCES],), 0) for slot in range(SEQUENCES)]
            for _ in range(REPEATS):
                _time(times[name, f"{SEQUENCES} sequences"], lambda e=engine, batch=batch: e.forward(batch)[0])
            _read(engine, 0, 0, ids[:PROMPT])
            whole = _read(engine, 1, PROMPT, ids[PROMPT:], ids[:PROMPT])
            for width in WIDTHS:
                for start in range(PROMPT, PROMPT + STEPS, width):
                    row = Row(0, start, tuple(ids[start : start + width]), 0)
                    logits = _time(times[name, f"width {width}"], lambda e=engine, row=row: e.forward([row])[0])
                    same[name] += [
                        a.tobytes() == b.tobytes() for a, b in zip(logits, whole[start - PROMPT :], strict=False)
                    ]
    table = Table("ms", *ways, "ratio", box=box.SIMPLE, title=f"{arguments.model}, {arguments.dtype}")
    for what in dict.fromkeys(what for _, what in times):
        a, b = (1000 * median(times[name, what]) for name in ways)
        table.add_row(what, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}")
    counts = [f"{sum(equal)} of {len(equal)}" for equal in same.values()]
    table.add_row("identical bit for bit", *counts, "")
    Console(width=100).print(table)


def _read(engine: Engine, slot: int, keep: int, ids: list[int], before: list[int] | None = None) -> np.ndarray:
    """Returns the logits of `ids` after `before` in one forward; of the last id only, without `before`."""
    if before:
        engine.forward([Row(slot, 0, tuple(before), len(before))])
    return engine.forward([Row(slot, keep, tuple(ids), 0 if before else len(ids) - 1)])[0].copy()


def _time(times: list[float], work: Callable[[], np.ndarray]) -> np.ndarray:
    started = perf_counter()
    result = work()
    times.append(perf_counter() - started)
    return result


if __name__ == "__main__":
    main()
