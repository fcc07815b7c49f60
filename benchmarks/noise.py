"""Measures the time of the sampling noise in NumPy, torch, and compiled torch, on one core.

    python -m benchmarks.noise [--ids 262144] [--positions 8]

Compiled torch needs a C++ compiler; without one its row is left out. The last rows time the sampler itself at one
position, which draws noise only for the ids that it can make the best.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bridge.sampling.noise import gumbel, gumbel_of, position_state
from bridge.sampling.sampler import Sampler, SamplingParameters

REPEATS = 30


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=262_144)
    parser.add_argument("--positions", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance = np.random.default_rng(0)
    keys = chance.integers(-(2**63), 2**63 - 1, arguments.ids)
    states = [position_state(1, offset) for offset in range(arguments.positions)]
    table = Table("noise", "ids", "positions", "ms", box=box.SIMPLE)

    def add(name: str, ids: int, positions: int, work: Callable[[], object]) -> None:
        table.add_row(name, str(ids), str(positions), f"{_milliseconds(work):.2f}")

    def in_numpy(count: int) -> None:
        for offset in range(arguments.positions):
            gumbel(1, offset, 0, keys[:count])

    def in_torch(state: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return gumbel_of(state, keys, torch)  # type: ignore[no-any-return]

    block, tensor = torch.tensor(states)[:, None], torch.from_numpy(keys)[None]
    add("NumPy", arguments.ids, arguments.positions, lambda: in_numpy(arguments.ids))
    add("NumPy, truncated", 1000, arguments.positions, lambda: in_numpy(1000))
    add("torch", arguments.ids, arguments.positions, lambda: in_torch(block, tensor))
    compiled = torch.compile(in_torch, dynamic=False)
    try:
        compiled(block, tensor)
    except Exception as error:  # there is no compiler, or torch cannot use it
        Console(stderr=True).print(f"torch cannot compile here: {type(error).__name__}")
    else:
        add("torch, compiled", arguments.ids, arguments.positions, lambda: compiled(block, tensor))
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
