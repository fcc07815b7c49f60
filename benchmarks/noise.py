"""Measures the time of the sampling noise, and of choosing a token, on one core.

    python -m benchmarks.noise [--ids 262144] [--positions 8]

The sampler draws noise only for the ids that it can make the best, so a choice takes less time than the noise for all.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bridge.sampling.noise import gumbel
from bridge.sampling.sampler import Sampler, SamplingParameters

REPEATS = 30


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=262_144)
    parser.add_argument("--positions", type=int, default=8)
    arguments = parser.parse_args()
    chance = np.random.default_rng(0)
    keys = chance.integers(-(2**63), 2**63 - 1, arguments.ids)
    table = Table("noise", "ids", "positions", "ms", box=box.SIMPLE)

    def add(name: str, ids: int, positions: int, work: Callable[[], object]) -> None:
        table.add_row(name, str(ids), str(positions), f"{_milliseconds(work):.2f}")

    def draw(count: int) -> None:
        for offset in range(arguments.positions):
            gumbel(1, offset, 0, keys[:count])

    add("for all ids", arguments.ids, arguments.positions, lambda: draw(arguments.ids))
    add("for 1,000 ids", 1000, arguments.positions, lambda: draw(1000))
    logits = chance.standard_normal(arguments.ids).astype(np.float32) * 4
    for parameters in (
        SamplingParameters(),
        SamplingParameters(temperature=1.0),
        SamplingParameters(temperature=0.7, top_k=50),
        SamplingParameters(temperature=1.0, top_p=0.9),
    ):
        sampler = Sampler(parameters, 1, keys, np.empty(0, np.int64))
        shown = f"T={parameters.temperature}, top_k={parameters.top_k}, top_p={parameters.top_p}"
        add(f"a choice at {shown}", arguments.ids, 1, lambda one=sampler: one.choose(logits, 5, 0))  # type: ignore[misc]
    Console(width=100).print(table)


def _milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return 1000 * median(times)


if __name__ == "__main__":
    main()
