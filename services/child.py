"""The commands of child processes that run Python, and what the processes have in common."""

import ctypes
import logging
import os
import signal
import sys

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in this interpreter.

    It does not look for modules in the current directory, which may be a model's: its files must not run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def quiet_libraries() -> None:
    """Hides what transformers, and libraries that it imports, write for their developers."""
    # They warn about kernels for other devices.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def end_with_parent() -> None:
    """Makes Linux end this process when the thread that started it ends, also if its process is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
