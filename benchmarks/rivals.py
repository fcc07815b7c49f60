"""Runs rivals: other software to compare with, each in a process of `benchmarks.rival_process`.

A rival may have its own Python environment. While it is idle it is stopped with SIGSTOP, so that its spinning threads
do not slow down what is measured.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.rival_libraries.rival import Answer
from benchmarks.rival_process import RIVALS

_ROOT = Path(__file__).parents[1]
_STOP_SECONDS = 10.0


class RivalFailed(Exception):
    """A rival did not start or could not answer; the message has the reason."""


@dataclass(frozen=True)
class Entry:
    """A rival and the interpreter that runs it."""

    name: str
    python: str = sys.executable

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """Parses NAME or NAME=PYTHON. Raises `ValueError` for an unknown name."""
        name, _, python = text.partition("=")
        if name not in RIVALS:
            raise ValueError(f"no rival is called {name!r}: there are {', '.join(RIVALS)}")
        return cls(name, os.path.expanduser(python) or sys.executable)


class Rival:
    """A process that has loaded its model. `about` names the software and its versions."""

    def __init__(self, entry: Entry, options: Sequence[str]) -> None:
        """Starts the process and waits until it is ready. Raises `RivalFailed`."""
        self.name = entry.name
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed with us
        try:
            self._process = subprocess.Popen(
                [entry.python, "-m", "benchmarks.rival_process", entry.name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # PYTHONSAFEPATH keeps it from importing the modules of the directory that it is started in.
                env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                # As for our services: Linux schedules each session as a group of its own.
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise RivalFailed(f"{entry.python} cannot be run: {error.strerror}") from error
        try:
            self.pid = self._process.pid
            self.about = str(self._read()["about"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> Answer:
        """Returns the greedy continuation of a prompt. Raises `RivalFailed`."""
        self._signal(signal.SIGCONT)
        request = {"prompt_ids": list(prompt_ids), "max_tokens": max_tokens, "stop_ids": list(stop_ids)}
        try:
            _pipe(self._process.stdin).write(json.dumps(request) + "\n")
            _pipe(self._process.stdin).flush()
        except OSError as error:
            raise RivalFailed(self._last_words()) from error
        answer = Answer(**self._read())
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the process and its children. May be called twice."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        _pipe(self._process.stdout).close()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RivalFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalFailed(str(answer["error"]))
        return answer

    def _signal(self, number: int) -> None:
        # A process that was not waited for keeps its id, so the signal cannot reach another group.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()] or ["it printed no error"]
        return f"it ended with {status}: {lines[-1][:300]}"


@contextlib.contextmanager
def started(
    entries: Sequence[Entry], options: Sequence[str], load: Mapping[str, str], report: Callable[[str], None]
) -> Iterator[list[Rival]]:
    """Starts rivals one after the other, yields those that started, and ends them.

    `options`: of every rival. `load`: by name, what a rival loads instead. `report` receives a line for each rival.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for entry in entries:
            own = ["--model", load[entry.name], "--gguf", load[entry.name]] if entry.name in load else []
            try:
                rival = Rival(entry, [*options, *own])
            except RivalFailed as failure:
                report(f"{entry.name} is left out: {failure}")
                continue
            stack.callback(rival.close)
            report(f"{entry.name}: {rival.about}")
            found.append(rival)
        yield found


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
