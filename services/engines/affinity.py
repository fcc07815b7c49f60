"""Pins this process to cores: those of one NUMA node, so that threads compute next to their memory."""

import os
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from bridge.errors import InvalidField

_SYSTEM = Path("/sys/devices/system")
_FLAG = "--cpu-affinity"


def pin(text: str, system: Path = _SYSTEM) -> frozenset[int]:
    """Restricts all threads of this process, present and future, to the cores that `text` names, and returns them.

    `text`: numbers as 0-7,16, or numa:0 for those physical cores of a NUMA node that the process may use. Linux gives
    memory from the node of the core that first writes to it. Raises `InvalidField`.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidField(_FLAG, "left out: this system does not pin processes to cores", text)
    allowed = os.sched_getaffinity(0)
    cores = _first_threads(text, allowed, system) if text.startswith("numa:") else _numbers(text)
    if not cores or not cores <= allowed:
        raise InvalidField(_FLAG, f"some of the cores {_text(allowed)} that this process may use", text)
    for task in Path("/proc/self/task").iterdir():  # threads of libraries exist already
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
    return cores


def _first_threads(text: str, allowed: set[int], system: Path) -> frozenset[int]:
    """Returns the allowed cores of a node, one of each set of hyper-threads: two on one core share its matrix units."""
    path = system / "node" / f"node{text.removeprefix('numa:')}" / "cpulist"
    if not path.is_file():
        nodes = sorted(one.name.removeprefix("node") for one in (system / "node").glob("node[0-9]*"))
        raise InvalidField(_FLAG, f"numa: and the number of a node ({', '.join(nodes) or 'none is known here'})", text)
    return frozenset(map(min, physical_cores(_numbers(path.read_text().strip()) & allowed, system)))


def physical_cores(cores: Set[int], system: Path = _SYSTEM) -> list[frozenset[int]]:
    """Groups `cores`, which are hyper-threads, by their physical core. Groups are in ascending order."""
    found = set()
    for core in cores:
        file = system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
        siblings = _numbers(file.read_text().strip()) if file.is_file() else {core}
        found.add(frozenset(siblings & cores))
    return sorted(found, key=min)


def physical_core_count() -> int:
    """Returns how many physical cores this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len(physical_cores(frozenset(allowed)))


def _numbers(text: str) -> frozenset[int]:
    """Parses a list of numbers and ranges, as 0-7,16."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if not match:
            raise InvalidField(_FLAG, "numbers of cores as 0-7,16, or numa:0", text)
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _text(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))
