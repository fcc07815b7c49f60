"""Reads what a launcher (DeepSpeed, torchrun, mpirun) sets in the environment of each process of a sharded model."""

import os


def rank() -> int:
    """Returns the number of this process among those of a model, 0 for the one that serves."""
    return int(os.environ.get("RANK", "0")) if rank_count() > 1 else 0


def rank_count() -> int:
    """Returns the number of processes that share a model, 1 without a launcher."""
    return max(int(os.environ.get("WORLD_SIZE", "0")), 1)
