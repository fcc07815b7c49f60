"""Names the cores and accelerators of this machine, so that a bridge can see which models compete for them."""

import hashlib
import os
import uuid
from pathlib import Path


def compute_units(device: str, threads: int | None) -> tuple[frozenset[str], int]:
    """Returns names of the cores or the accelerator that an engine on `device` computes on, and how many it uses.

    The names are the same in all processes of this machine until it reboots, and reveal nothing else about it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text() if boot.is_file() else str(uuid.getnode())
    machine = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if device.lower() != "cpu":
        # Engines have different names for the same accelerator.
        name = device.lower().replace("cuda", "gpu").removesuffix(":0")
        numbers = _gaudis() if name == "hpu" else [""]
        # A launcher names all Gaudis of a model to each of its processes.
        count = int(os.environ.get("WORLD_SIZE", "0")) if name == "hpu" else 1
        return frozenset(f"{machine}/{name}{one}" for one in numbers), min(max(count, 1), len(numbers))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(f"{machine}/cpu{core}" for core in cores), min(threads or len(cores), len(cores))


def _gaudis() -> list[str]:
    """Returns the Gaudis that this process may use, as its environment names them. Each process calls its own "hpu"."""
    named = os.environ.get("HABANA_VISIBLE_MODULES") or os.environ.get("HABANA_VISIBLE_DEVICES") or "all"
    return [""] if named == "all" else [one.strip() for one in named.split(",")]
