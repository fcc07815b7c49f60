"""Names the cores and accelerators of this machine, so that a bridge can see which models compete for them."""

import hashlib
import os
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path


def compute_units(device: str, threads: int | None, gpus: Sequence[int] = ()) -> tuple[frozenset[str], int]:
    """Returns names of the cores or accelerators that an engine on `device` computes on, and how many it uses.

    `gpus`: the numbers of the GPUs of an engine that uses several, as this process counts them. Until this machine
    reboots, all its processes use the same names, and they reveal nothing else about it. But of a GPU, a process knows
    only what its environment calls it: a number or a UUID. Processes that differ in this do not see that they share it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text() if boot.is_file() else str(uuid.getnode())
    machine = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if device.lower() != "cpu":
        name, _, number = device.lower().partition(":")
        if name in ("cuda", "gpu"):  # the latter is llama.cpp's
            used = _gpus(gpus or [int(number or 0)])
            return frozenset(f"{machine}/gpu{one}" for one in used), len(used)
        name = device.lower().removesuffix(":0")
        numbers = _gaudis() if name == "hpu" else [""]
        # A launcher names all Gaudis of a model to each of its processes.
        count = int(os.environ.get("WORLD_SIZE", "0")) if name == "hpu" else 1
        return frozenset(f"{machine}/{name}{one}" for one in numbers), min(max(count, 1), len(numbers))
    cores = _cores()
    return frozenset(f"{machine}/cpu{core}" for core in cores), min(threads or len(cores), len(cores))


def _cores() -> Collection[int]:
    """Returns the numbers of the cores that this process computes on.

    OpenMP binds each thread that computes to one core, and so the thread that has started them. Then the cores of all
    such threads count, else all that the process may use.
    """
    if not hasattr(os, "sched_getaffinity"):
        return range(os.cpu_count() or 1)
    masks = [os.sched_getaffinity(0)]
    for task in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # it has ended
            masks.append(os.sched_getaffinity(int(task.name)))
    return set().union(*([mask for mask in masks if len(mask) == 1] or masks))


def _gpus(numbers: Iterable[int]) -> list[str]:
    """Returns the names of the GPUs to which this process gives these numbers."""
    names = [str(number) for number in numbers]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES")
    # Of the GPUs of its container, a process may use some. Each list numbers its own from 0.
    for listed in (visible, os.environ.get("NVIDIA_VISIBLE_DEVICES")):
        if listed and listed not in ("all", "none", "void"):
            found = {str(place): name.strip() for place, name in enumerate(listed.split(","))}
            names = [found.get(name, name) for name in names]
    return [name if name.isdecimal() else hashlib.sha256(name.encode()).hexdigest()[:16] for name in names]


def _gaudis() -> list[str]:
    """Returns the Gaudis that this process may use, as its environment names them. Each process calls its own "hpu"."""
    named = os.environ.get("HABANA_VISIBLE_MODULES") or os.environ.get("HABANA_VISIBLE_DEVICES") or "all"
    return [""] if named == "all" else [one.strip() for one in named.split(",")]
