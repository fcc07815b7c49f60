"""The commands of child processes that run Python, and what the processes have in common."""

import ctypes
import logging
import os
import runpy
import signal
import sys

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# The variables by which `services.engines.openmp` configures OpenMP for this process, as they were before.
OPENMP_BEFORE = {
    name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES")
}


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in this interpreter.

    It does not look for modules in the current directory, which may be a model's: its files must not run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def bound_command(module: str, *arguments: str) -> list[str]:
    """Returns `command` for a process that Linux ends when the thread that starts it ends, also if that is killed.

    This begins before the module's imports, which may take seconds.
    """
    return command("services.child", str(os.getpid()), module, *arguments)


def environment_before() -> dict[str, str]:
    """Returns this process's environment without its own settings of OpenMP, which would bind all threads of a child.

    It is for children that use several cores, or have settings of their own.
    """
    others = {name: value for name, value in os.environ.items() if name not in OPENMP_BEFORE}
    return others | {name: value for name, value in OPENMP_BEFORE.items() if value is not None}


def quiet_libraries() -> None:
    """Hides what transformers, and libraries that it imports, write for their developers."""
    # They warn about kernels for other devices.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _run(parent_id: int, module: str, *arguments: str) -> None:
    """Runs a module as the main program of this process, unless its parent has ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_id:  # it ended before that call
            sys.exit(1)
        # OpenMP may have bound the thread that started this process.
        os.sched_setaffinity(0, os.sched_getaffinity(parent_id))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(int(sys.argv[1]), *sys.argv[2:])
