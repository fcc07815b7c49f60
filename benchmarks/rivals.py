"""Rivals: the libraries that somebody might use instead, each as a process of `benchmarks.rival_process`.

A rival may have an environment of its own, named by its interpreter. While it has nothing to do it is stopped by a
signal, so that no thread that spins for its next work takes the processor from whoever is measured.
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

from benchmarks.rival_process import RIVALS, Answer

_PROGRAM = Path(__file__).with_name("rival_process.py")
_STOP_SECONDS = 10.0


class RivalFailed(Exception):
    """A rival that did not start, or that could not answer; the message is its reason."""


@dataclass(frozen=True)
class Entry:
    """A rival as the user names it: NAME or NAME=PYTHON. Raises `ValueError` for a name that nobody knows."""

    name: str
    python: str = sys.executable

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """The entry of a word of the command line."""
        name, _, python = text.partition("=")
        if name not in RIVALS:
            raise ValueError(f"no rival is called {name!r}: there are {', '.join(RIVALS)}")
        return cls(name, os.path.expanduser(python) or sys.executable)


class Rival:
    """A process that has loaded its model. `about` says which versions of what."""

    def __init__(self, entry: Entry, options: Sequence[str]) -> None:
        """Waits until it is ready. Raises `RivalFailed`."""
        self.name = entry.name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed with us
        try:
            self._process = subprocess.Popen(
                [entry.python, str(_PROGRAM), entry.name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # The modules beside the program are none of its business.
                env=os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
                # As our services are: a session of its own, which Linux gives a share of the processor by itself.
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
        """The greedy continuation. Raises `RivalFailed`."""
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
        """Ends the process and what it started. Once more does no harm."""
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
        # One that was not waited for keeps its id, so this never hits another's group.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()] or ["it said nothing"]
        return f"it ended with {status}: {said[-1][:300]}"


@contextlib.contextmanager
def started(
    entries: Sequence[Entry], options: Sequence[str], load: Mapping[str, str], report: Callable[[str], None]
) -> Iterator[list[Rival]]:
    """Those of them that start, one after the other; of the others `report` is told why. Ends them all.

    `options`: for every rival; `load`: by name, what a rival loads instead of the target's directory.
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
