"""Tries a grammar in a process with limits of time and memory, before any server compiles it.

    python -m services.grammars.trial < socket

The library bounds the steps of a compiled grammar, but not its compilation: a short regular expression may take all
memory. The process receives a grammar, compiles it for bytes, follows it for some steps, and sends what it found.
"""

import logging
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar
from services.errors import SandboxBusy
from services.grammars.byte_matcher import allowed_bytes, byte_tokenizer
from services.grammars.compiler import check_satisfiable, compile_grammar, invalid, refused
from services.sandbox.answering_process import AnsweringProcess
from services.sandbox.process import confine

_log = logging.getLogger(__name__)

# Ordinary grammars take milliseconds.
CPU_LIMIT_SECONDS = 1.5
MEMORY_LIMIT_BYTES = 1 << 30
# The library recurses. Servers compile in threads, whose stack has 2 MB at least: what passes here must fit there.
_STACK_LIMIT_BYTES = 1 << 20
# On a busy machine, the process gets its time later. Starting it takes longest.
_WAIT_SECONDS = 20.0
_ENDING_SECONDS = 2.0
_MAX_ANSWER_BYTES = 1 << 20
# How a process ends whose grammar exceeds the limits of time, memory and stack.
_NO_MEMORY_STATUS = 77
_CAUSED_BY_GRAMMAR = (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, _NO_MEMORY_STATUS)
# The walks through a grammar, each of which always takes another one of the allowed bytes, and their length in bytes.
_WALKS, _WALK_BYTES = 4, 64


def grammar_busy(detail: str) -> SandboxBusy:
    """Returns the error for a grammar that cannot be tried now."""
    return SandboxBusy(detail, "try the grammar", "or send a request without it instead")


class GrammarTrial:
    """Tries grammars, one at a time, in a process that is started on demand. Thread-safe, and blocks."""

    def __init__(self, cpu_limit: float = CPU_LIMIT_SECONDS) -> None:
        self._cpu_limit = cpu_limit
        self._turn = threading.Lock()
        self._process: AnsweringProcess | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidGrammar` for a grammar that is invalid or exceeds the limits, `SandboxBusy` if none is tried.

        Call it in a thread.
        """
        if not self._turn.acquire(timeout=_WAIT_SECONDS):
            raise grammar_busy("it is trying others")
        try:
            problem = self._ask(grammar)
        finally:
            self._turn.release()
        if problem:
            raise InvalidGrammar(grammar.field, problem)

    def close(self) -> None:
        """Ends the process, even while it tries a grammar. `check` starts another."""
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._discard()

    def _ask(self, grammar: Grammar) -> str:
        deadline = monotonic() + _WAIT_SECONDS
        try:
            process = self._started()
            process.send(grammar, deadline)
        except (OSError, EOFError) as error:
            self._discard()
            raise grammar_busy(f"its process does not start, {type(error).__name__} {error}") from error
        grace = _ENDING_SECONDS
        try:
            return process.receive(_MAX_ANSWER_BYTES, deadline).decode(errors="replace")
        except TimeoutError:
            grace = 0.0
        except (OSError, EOFError):  # the process ends; its status gives the reason
            pass
        status = self._discard(grace)
        _log.info("the process that tried a grammar ended with status %s", status)
        if status not in _CAUSED_BY_GRAMMAR:  # an operator or the system ended it, it gave no answer, or cannot run
            raise grammar_busy(f"its process had no processor time, or ended with status {status}")
        limits = f"{self._cpu_limit:g} s or {MEMORY_LIMIT_BYTES >> 20} MiB"
        return str(invalid(grammar, f"is too complex: compiling it takes more than {limits}")).partition(" ")[2]

    def _started(self) -> AnsweringProcess:
        if self._process is None or self._process.status is not None:
            self._discard()
            self._process = AnsweringProcess("services.grammars.trial", str(self._cpu_limit))
        return self._process

    def _discard(self, grace: float = 0.0) -> int | None:
        """Ends the process, if there is one, and returns its status. `grace`: seconds that it has to end by itself."""
        process, self._process = self._process, None
        return process.close(grace) if process else None


def try_grammar(grammar: Grammar) -> None:
    """Compiles a grammar for bytes and follows some texts. Raises `InvalidGrammar`."""
    tokenizer = byte_tokenizer()
    matcher = compile_grammar(tokenizer, grammar)
    check_satisfiable(tokenizer, grammar)
    for walk in range(_WALKS):
        text = bytearray()
        while len(text) < _WALK_BYTES and (bytes_ := allowed_bytes(matcher)):
            text.append(bytes_[walk * (len(bytes_) - 1) // (_WALKS - 1)])
            matcher.consume_token(text[-1])
        if matcher.is_error():
            raise refused(grammar, matcher.get_error(), f" after {bytes(text)!r}" if text else "")
        if not text and not matcher.is_accepting():
            raise refused(grammar, "NoExtension")
        matcher.reset()


def _main(cpu_limit: float) -> None:
    confine(MEMORY_LIMIT_BYTES, _STACK_LIMIT_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(os.dup(0))
    with suppress(EOFError, OSError):
        while True:
            grammar = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_limit)  # the signal ends the process
            try:
                try_grammar(grammar)
                problem = ""
            except InvalidGrammar as error:
                problem = str(error).partition(" ")[2]
            except MemoryError:
                os._exit(_NO_MEMORY_STATUS)
            except BaseException as error:  # the library's panics are not an Exception
                problem = f"cannot be used: the compiler fails with {type(error).__name__}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(problem.encode(errors="replace"))  # it may quote a lone surrogate


if __name__ == "__main__":
    import sys

    _main(float(sys.argv[1]))
