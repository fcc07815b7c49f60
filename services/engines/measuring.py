"""Measurements in other processes: one at a time on a machine, ended with all that they started, of one library."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock, Timeout

from services.child import bound_command, environment_before
from services.engines import together
from services.store.cache import cache_directory, write_json

_log = logging.getLogger(__name__)

# Pairs of a number of tokens and the nanoseconds of such a forward.
Costs: TypeAlias = list[tuple[int, int]]
# The conditional acceptance of a good draft; see docs/measurements.
_CHANCE = 0.7
# Set in processes whose starter holds the lock for them.
_HELD = "DRAFTBRIDGE_MEASURING"
# A measurement of a small model takes less.
_SILENT_SECONDS = 30.0
# A slow disk, in bytes per second.
_SLOWEST_READ = 50e6


def speed(costs: Costs, *, drafts: bool = False) -> float:
    """Returns the expected tokens per second with the best number of candidates. `drafts`: without any.

    That is the speed that an engine, or a way to run it, has in the end, and so what a choice between them compares.
    """
    if drafts:
        return 1e9 / min(costs)[1]
    return max(1e9 * (1 - _CHANCE**width) / (1 - _CHANCE) / taken_ns for width, taken_ns in costs)


def reading_seconds(byte_count: int) -> float:
    """Returns how long a slow disk takes to read a file, for limits on the time of processes that load it."""
    return byte_count / _SLOWEST_READ


@contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Waits until no other process of this user measures engines, and no server that is started together with it loads.

    After `seconds` of waiting for the former, or where no lock can be had, they measure at the same time.
    """
    if os.environ.get(_HELD):
        yield
        return
    # In this order: who holds the second lock waits for nobody.
    with together.measuring():
        directory = cache_directory().parent
        lock = FileLock(directory / "trial.lock")
        with suppress(OSError, Timeout):
            directory.mkdir(parents=True, exist_ok=True)
            _acquire(lock, seconds)
        try:
            yield
        finally:
            lock.release()


def _acquire(lock: FileLock, seconds: float) -> None:
    with suppress(Timeout):
        lock.acquire(timeout=min(seconds, _SILENT_SECONDS))
        return
    _log.warning("waiting until another process has measured its engines, for at most %.0f s", seconds)
    lock.acquire(timeout=seconds)


def run(module: str, *arguments: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    """Runs a module in another process, whose starter is `alone`. Raises `subprocess.TimeoutExpired`.

    Processes that it started end with it: they would disturb the next measurement.
    """
    with subprocess.Popen(
        bound_command(module, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a library that crashes may print anything
        start_new_session=not os.environ.get(_HELD),
        env=environment_before() | {_HELD: "1"},
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        finally:
            _end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    if sys.platform != "win32" and not os.environ.get(_HELD):
        with suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)


def remember(file: Path, value: object) -> None:
    """Writes what was measured as JSON, in one step. Where that is not possible, the next start measures again."""
    try:
        write_json(file, value)
    except OSError as error:
        _log.warning("%s cannot be written (%s)", file, error.strerror)


def library_facts(module: str) -> list[tuple[str, int, int]]:
    """Names the files of an installed module's library, with sizes and times: another build is another library."""
    found = find_spec(module)
    places = [Path(found.origin), Path(found.origin).parent / "lib"] if found and found.origin else []
    if built := os.environ.get(f"{module.upper()}_LIB_PATH"):
        places.append(Path(built))
    files = [file for place in places for file in (sorted(place.iterdir()) if place.is_dir() else [place])]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
