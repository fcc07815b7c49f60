"""Runs each chat template in its own sandbox process, which is kept for the next chat."""

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from services.child import command
from services.errors import SandboxBusy, TemplateLimitExceeded
from services.sandbox.jinja import MAX_TEXT_CHARACTERS, Outcome, text_of
from services.sandbox.process import environment
from services.sandbox.template_process import READY, SHIELD

# Published templates take about a millisecond.
TIME_LIMIT_SECONDS = 3.0
# Python and Jinja start in 0.2 s on an idle machine, but more slowly while models are loading.
_START_LIMIT_SECONDS = 30.0
# The bridge enforces the time limit. A process ends itself this much later, in case the bridge has ended.
_OWN_LIMIT_SECONDS = 1.0
# Templates whose processes are kept. Clients and services can name new ones all the time.
_MAX_TEMPLATES = 32
# UTF-8 has up to 4 bytes per character.
_MAX_MESSAGE_BYTES = 4 * MAX_TEXT_CHARACTERS + 1000


class TemplateSandbox:
    """Runs chat templates in processes with limits. Implements `bridge.text.models.TemplateRunner`. Thread-safe.

    Each template renders one chat at a time in its own process. So a template that hangs does not delay the others,
    and delays its own chats by at most the time limit. The processes of the `max_templates` latest templates are kept.
    """

    def __init__(self, time_limit: float = TIME_LIMIT_SECONDS, max_templates: int = _MAX_TEMPLATES) -> None:
        self._time_limit, self._max_templates = time_limit, max_templates
        self._lock = threading.Lock()
        # The least recently used first.
        self._workers: dict[str, _Worker] = {}
        self._closed = False

    def __call__(self, template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> str:
        """Returns what the template writes.

        Raises `InvalidField`, `UnusableModel` or `TemplateLimitExceeded` as `text_of` does, and `SandboxBusy` if the
        template is still running for other chats or its process cannot start.
        """
        with self._lock:
            if self._closed:
                raise _stopping()
            worker = self._workers.pop(template, None) or self._new(template)
            self._workers[template] = worker
            worker.chat_count += 1
        try:
            return text_of(*worker.run(variables, marks, shield))
        finally:
            with self._lock:
                worker.chat_count -= 1

    def _new(self, template: str) -> "_Worker":
        """Returns the worker of a new template, in the place of an idle one if there are too many."""
        if len(self._workers) >= self._max_templates:
            idle = next((name for name, worker in self._workers.items() if not worker.chat_count), None)
            if idle is None:
                raise SandboxBusy(f"{self._max_templates} other templates are running")
            self._workers.pop(idle).close()
        return _Worker(template, self._time_limit)

    def close(self) -> None:
        """Kills all processes, even of running templates, and starts no more."""
        with self._lock:
            self._closed = True
        for worker in self._workers.values():
            worker.close()


class _Worker:
    """Runs one template in a process, which is started on demand.

    `chat_count`: the chats that run or are about to, counted by `TemplateSandbox`, so that they keep their worker.
    """

    def __init__(self, template: str, time_limit: float) -> None:
        self._template, self._time_limit = template, time_limit
        self._turn = threading.Lock()
        self._process: _Process | None = None
        self._hung = self._closed = False
        self.chat_count = 0

    def run(self, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> tuple[Outcome, str]:
        """Returns how running the template ended, and its text or the reason. Raises as `TemplateSandbox` does."""
        # A waiting call blocks a thread of the bridge. A template that hung in its last chat may block only one.
        if not self._turn.acquire(timeout=0 if self._hung else self._time_limit):
            raise SandboxBusy("it is running for other chats")
        try:
            # A process may end without the template's fault, for instance when the system is out of memory.
            for _attempt in range(2):
                process = self._started()
                try:
                    return self._ask(process, variables, marks, shield)
                except BlockingIOError:
                    self._hung = True
                    raise TemplateLimitExceeded("time", f"{self._time_limit:g} s") from None
                except (EOFError, OSError):
                    continue
            return Outcome.FAILED, f"its process ended with status {process.status}"
        finally:
            self._turn.release()

    def _ask(
        self, process: "_Process", variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]
    ) -> tuple[Outcome, str]:
        with ExitStack() as stack:
            stack.callback(self._discard)
            outcome, text = process.ask(variables, marks, shield)
            self._hung = False
            if outcome in (Outcome.TEXT, Outcome.REFUSED, Outcome.FAILED):
                stack.pop_all()  # the process can run the next chat
            return outcome, text

    def _started(self) -> "_Process":
        if self._process is not None and self._process.status is None:
            return self._process
        self._discard()
        if self._closed:
            raise _stopping()
        try:
            self._process = _Process(self._time_limit)
            self._process.prepare(self._template)
        except (EOFError, OSError) as error:
            self._discard()
            raise SandboxBusy(f"its process does not start, {type(error).__name__} {error}") from error
        return self._process

    def close(self) -> None:
        """Kills the process; `run` fails from now on."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._discard()

    def _discard(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _stopping() -> SandboxBusy:
    return SandboxBusy("its process is stopping")


class _Process:
    """A process that runs one template. Only `kill` may be called while another thread uses the object.

    Methods raise `BlockingIOError` if the process takes too long, `EOFError` or another `OSError` if it has ended, and
    `EOFError` if it answers what the protocol does not allow.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._socket, theirs = socket.socketpair()
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        with theirs, ExitStack() as stack:
            stack.callback(self._disconnect)
            self._popen = subprocess.Popen(
                command("services.sandbox.template_process", str(time_limit + _OWN_LIMIT_SECONDS)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
            )
            stack.pop_all()

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._popen.poll()

    def prepare(self, template: str) -> None:
        """Waits until the process has started and sends it the template."""
        kind, _ = self._receive(monotonic() + _START_LIMIT_SECONDS)
        if kind != READY:
            raise _garbled()
        self._connection.send(template)

    def ask(self, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> tuple[Outcome, str]:
        """Returns how running the template ended, and its text or the reason."""
        deadline = monotonic() + self._time_limit
        shielded_characters = 0
        self._limit(socket.SO_SNDTIMEO, self._time_limit)
        self._connection.send((dict(variables), marks))
        while True:
            kind, text = self._receive(deadline)
            if kind != SHIELD:
                return _outcome(kind), text
            shielded_characters += len(text)
            if shielded_characters > MAX_TEXT_CHARACTERS:
                return Outcome.TOO_LONG, ""
            self._connection.send_bytes(shield(text).encode("utf-8", "surrogatepass"))

    def _receive(self, deadline: float) -> tuple[str, str]:
        if monotonic() >= deadline:  # Linux rounds the limit of a system call up, so messages in a row would have none
            raise BlockingIOError
        self._limit(socket.SO_RCVTIMEO, deadline - monotonic())
        message = self._connection.recv_bytes(_MAX_MESSAGE_BYTES)
        try:
            kind, _, text = message.decode("utf-8", "surrogatepass").partition("\n")
        except UnicodeDecodeError:
            raise _garbled() from None
        return kind, text

    def _limit(self, option: int, seconds: float) -> None:
        """Sets how long a system call may block: at least a microsecond, because 0 means no limit."""
        interval = divmod(max(1, int(seconds * 1e6)), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *interval))

    def kill(self) -> None:
        """Kills the process; a call that waits for it fails."""
        self._popen.kill()

    def close(self) -> None:
        """Kills the process and closes the connection."""
        self._popen.kill()
        self._popen.wait()
        self._disconnect()

    def _disconnect(self) -> None:
        self._connection.close()
        self._socket.close()


def _outcome(kind: str) -> Outcome:
    try:
        return Outcome(kind)
    except ValueError:
        raise _garbled() from None


def _garbled() -> EOFError:
    return EOFError("its process does not follow the protocol: a template may have taken it over")
