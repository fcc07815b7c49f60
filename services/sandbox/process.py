"""How a process of the sandbox is started, and the limits that it puts on itself."""

import contextlib
import os
import sys

# What Python itself may need of the environment; nothing that could be a secret.
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ")


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in an interpreter like this one."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns the environment for `command`: our modules are found in it, our secrets are not."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(directory) for directory in sys.path)
    return inherited | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}


def confine(memory_limit_bytes: int) -> None:
    """Limits this process's memory, where the system can, and keeps it from leaving a core file."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
