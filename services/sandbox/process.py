"""The environment of a sandbox process, and the limits that it sets for itself."""

import contextlib
import os
import sys

# Variables that Python itself may need. No others, because they may hold secrets.
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ")


def environment() -> dict[str, str]:
    """Returns the environment for a sandbox process, with this process's module path but without its secrets."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(directory) for directory in sys.path)
    return inherited | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}


def confine(memory_limit_bytes: int, stack_limit_bytes: int = 0) -> None:
    """Limits the memory of this process and disables core files, where the system supports that.

    `stack_limit_bytes`: the limit of the main thread's stack, 0 for the one that it has.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
        if stack_limit_bytes:
            resource.setrlimit(resource.RLIMIT_STACK, (stack_limit_bytes, resource.getrlimit(resource.RLIMIT_STACK)[1]))
