"""Which processor this is, and what it can do."""

from functools import cache
from pathlib import Path
from platform import processor

_CPUINFO = Path("/proc/cpuinfo")


@cache
def _fields(path: Path) -> dict[str, str]:
    """Returns the first processor's lines by name; none on systems without such a file."""
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.is_file() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_name() -> str:
    """Returns the processor's model name, "" if it is not known."""
    return _fields(_CPUINFO).get("model name", processor())


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Returns the instruction sets of an x86 processor as Linux names them, none on others."""
    return frozenset(_fields(path).get("flags", "").split())
