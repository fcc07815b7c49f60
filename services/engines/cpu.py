"""Which processor this is, what it can do, how many of its cores there are, and whether forwards run on it."""

import os
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from platform import processor

_CPUINFO = Path("/proc/cpuinfo")
# Lines that differ between kinds of processors: the first two on x86, the others on ARM.
_FACTS = ("model name", "flags", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")
_CGROUP = Path("/sys/fs/cgroup")
# Devices of drivers for NVIDIA (Jetson has the second one), AMD, Gaudi, and GPUs in WSL.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/accel", "/dev/dxg")


@cache
def _fields(path: Path) -> dict[str, str]:
    """Returns the first processor's lines by name; none on systems without such a file."""
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.is_file() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_name() -> str:
    """Returns the processor's model name, "" if it is not known."""
    return _fields(_CPUINFO).get("model name", processor())


def cpu_facts(path: Path = _CPUINFO) -> tuple[str, ...]:
    """Returns what identifies the kind of processor and what it can do: what is measured on one holds for all alike."""
    fields = _fields(path)
    return (processor(), *(" ".join(sorted(fields.get(name, "").split())) for name in _FACTS))


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Returns the instruction sets of an x86 processor as Linux names them, none on others."""
    return frozenset(_fields(path).get("flags", "").split())


def has_bfloat16(path: Path = _CPUINFO) -> bool:
    """Returns whether an x86 processor computes in bfloat16; False if it is not known."""
    return not cpu_flags(path).isdisjoint({"avx512_bf16", "amx_bf16"})


def lacks_bfloat16(path: Path = _CPUINFO) -> bool:
    """Returns whether an x86 processor does not compute in bfloat16; False if it is not known."""
    return bool(cpu_flags(path)) and not has_bfloat16(path)


def surely_on_cpu(device: str) -> bool:
    """Returns whether forwards on a device as in `EngineOptions` can run on the CPU only."""
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, _ACCELERATORS)))


def core_count() -> int:
    """Returns how many cores this process may use: all its threads together, because OpenMP binds some of them.

    A container with a limit on processor time sees all cores of its machine: with a thread for each, all of them would
    wait for those that are out of time.
    """
    count = _allowed_count()
    return min(count, core_quota() or count)


def core_quota(directory: Path = _CGROUP) -> int | None:
    """Returns the processor time that the container may use, in cores, rounded up; None if it has no limit."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # versions 2 and 1 of cgroups
        with suppress(OSError, ValueError):  # also for "max", no limit
            quota, period = map(int, " ".join((directory / name).read_text() for name in names).split())
            return max(1, ceil(quota / period)) if quota > 0 else None
    return None


def _allowed_count() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]
    cores: set[int] = set()
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            cores |= os.sched_getaffinity(thread)
    return len(cores)
