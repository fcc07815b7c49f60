"""Runs each chat template in its own sandbox process, which is kept for the next chat."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Any

from services.errors import SandboxBusy, TemplateLimitExceeded
from services.sandbox.answering_process import AnsweringProcess
from services.sandbox.jinja import MAX_TEXT_CHARACTERS, Outcome, text_of
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
        self._process: AnsweringProcess | None = None
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
                except TimeoutError:
                    self._hung = True
                    raise TemplateLimitExceeded("time", f"{self._time_limit:g} s") from None
                except (EOFError, OSError):
                    continue
            return Outcome.FAILED, f"its process ended with status {process.status}"
        finally:
            self._turn.release()

    def _ask(
        self, process: AnsweringProcess, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]
    ) -> tuple[Outcome, str]:
        with ExitStack() as stack:
            stack.callback(self._discard)
            outcome, text = _render(process, variables, marks, shield, monotonic() + self._time_limit)
            self._hung = False
            if outcome in (Outcome.TEXT, Outcome.REFUSED, Outcome.FAILED):
                stack.pop_all()  # the process can run the next chat
            return outcome, text

    def _started(self) -> AnsweringProcess:
        if self._process is not None and self._process.status is None:
            return self._process
        self._discard()
        if self._closed:
            raise _stopping()
        try:
            own_limit = self._time_limit + _OWN_LIMIT_SECONDS
            self._process = AnsweringProcess("services.sandbox.template_process", str(own_limit))
            deadline = monotonic() + _START_LIMIT_SECONDS
            if _receive(self._process, deadline)[0] != READY:
                raise _garbled()
            self._process.send(self._template, deadline)
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


def _render(
    process: AnsweringProcess,
    variables: Mapping[str, Any],
    marks: str,
    shield: Callable[[str], str],
    deadline: float,
) -> tuple[Outcome, str]:
    """Returns how running the process's template ended, and its text or the reason."""
    shielded_characters = 0
    process.send((dict(variables), marks), deadline)
    while True:
        kind, text = _receive(process, deadline)
        if kind != SHIELD:
            return _outcome(kind), text
        shielded_characters += len(text)
        if shielded_characters > MAX_TEXT_CHARACTERS:
            return Outcome.TOO_LONG, ""
        process.send_bytes(shield(text).encode("utf-8", "surrogatepass"), deadline)


def _receive(process: AnsweringProcess, deadline: float) -> tuple[str, str]:
    message = process.receive(_MAX_MESSAGE_BYTES, deadline)
    try:
        kind, _, text = message.decode("utf-8", "surrogatepass").partition("\n")
    except UnicodeDecodeError:
        raise _garbled() from None
    return kind, text


def _outcome(kind: str) -> Outcome:
    try:
        return Outcome(kind)
    except ValueError:
        raise _garbled() from None


def _garbled() -> EOFError:
    return EOFError("its process does not follow the protocol: a template may have taken it over")
