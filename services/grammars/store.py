"""Tries each grammar once, and compiles it for the vocabulary of a model or for bytes."""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from time import thread_time
from typing import TypeVar

from cachetools import LRUCache
from llguidance import LLMatcher

from bridge.errors import InvalidField, InvalidGrammar, NotReady
from bridge.sampling.grammar import Grammar
from bridge.text.models import Model
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.token_matcher import TextMatcher, TokenMatcher
from services.grammars.tokenizer import GrammarTokenizer
from services.grammars.trial import GrammarTrial, grammar_busy

# What grammars are tested with. In an environment that vLLM shares, pip installs an older version, which refuses some.
_LEAST_VERSION, _INSTALLED_VERSION = "1.9", version("llguidance")
# The texts of grammars that are known to be usable or refused.
_KNOWN_BYTES, _ENTRY_BYTES = 16 << 20, 1000
# Grammars that may wait until the one before them is tried, and requests for slow ones until it is compiled.
_MAX_WAITING = 32
# A grammar that takes more processor time to compile is slow. Ordinary ones take milliseconds.
_SLOW_SECONDS = 0.1

# A grammar compiled for bytes and, by a model's server, for its tokens.
_Compiled = tuple[LLMatcher, ...]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Verdict:
    """Why a grammar cannot be used, None if it can; the bytes that this takes to keep; whether it compiles slowly."""

    error: InvalidGrammar | None
    size: int
    slow: bool


class _Store:
    """Tries each grammar once, and compiles it for each request. `compile_one` does so, and blocks.

    Copies of one matcher would share an automaton that grows with every text, up to a limit: whether a request fails
    would depend on earlier ones. One thread tries new grammars and compiles slow ones, another compiles the other known
    ones, one after the other, so that hostile grammars delay only each other and new ones.
    """

    def __init__(self, compile_one: Callable[[Grammar], _Compiled], trial: GrammarTrial) -> None:
        self._compile_one, self._trial = compile_one, trial
        self._known: LRUCache[Grammar, _Verdict] = LRUCache(_KNOWN_BYTES, getsizeof=lambda verdict: verdict.size)
        self._lock = threading.Lock()
        self._trying, self._compiling = ThreadPoolExecutor(1, "grammar-trials"), ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[Grammar, Future[_Verdict]] = {}
        self._slow_count = 0

    async def matchers(self, grammar: Grammar) -> _Compiled:
        """Returns new matchers at the start of a grammar. Raises `InvalidGrammar`, `NotReady` or `SandboxBusy`."""
        _check_version(_INSTALLED_VERSION)
        verdict = self._verdict(grammar) or await self._tried(grammar)
        if verdict.error:
            raise InvalidGrammar(grammar.field, str(verdict.error).partition(" ")[2])
        return await (self._compile_slowly if verdict.slow else self._compile)(grammar)

    async def _tried(self, grammar: Grammar) -> _Verdict:
        if (future := self._waiting.get(grammar)) is None:
            if len(self._waiting) >= _MAX_WAITING:
                raise grammar_busy(f"{len(self._waiting)} others are waiting")
            self._waiting[grammar] = future = self._submit(self._trying, self._try, grammar)
            future.add_done_callback(lambda _: self._waiting.pop(grammar))
        tried = asyncio.wrap_future(future)
        tried.add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio logs an unread error
        return await asyncio.shield(tried)  # others may wait for it when this request is cancelled

    async def _compile(self, grammar: Grammar) -> _Compiled:
        return await asyncio.wrap_future(self._submit(self._compiling, self._compile_one, grammar))

    async def _compile_slowly(self, grammar: Grammar) -> _Compiled:
        if self._slow_count >= _MAX_WAITING:
            raise grammar_busy(f"{self._slow_count} others are waiting")
        self._slow_count += 1
        try:
            return await asyncio.wrap_future(self._submit(self._trying, self._compile_one, grammar))
        finally:
            self._slow_count -= 1

    def close(self) -> None:
        """Ends the threads and the trial's process. Grammars that wait are not tried, which would start another one."""
        self._trying.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _submit(
        self, thread: ThreadPoolExecutor, function: Callable[[Grammar], _Result], grammar: Grammar
    ) -> Future[_Result]:
        try:
            return thread.submit(function, grammar)
        except RuntimeError:
            raise grammar_busy("the server is stopping") from None

    def _verdict(self, grammar: Grammar) -> _Verdict | None:
        with self._lock:
            return self._known.get(grammar)

    def _try(self, grammar: Grammar) -> _Verdict:
        error, slow = None, False
        try:
            self._trial.check(grammar)
            # The trial compiles for bytes only. The first grammar of a model takes longer, for the model's vocabulary.
            slow = self._takes_long(grammar) and self._takes_long(grammar)
        except InvalidGrammar as found:
            error = found
        verdict = _Verdict(error, len(grammar.text.encode()) + _ENTRY_BYTES, slow)
        with self._lock:
            self._known[grammar] = verdict
        return verdict

    def _takes_long(self, grammar: Grammar) -> bool:
        """Compiles a grammar. Raises `InvalidGrammar`."""
        started = thread_time()
        self._compile_one(grammar)
        return thread_time() - started > _SLOW_SECONDS


def _check_version(installed: str) -> None:
    """Raises `NotReady` for a version of llguidance that is too old."""
    if [int(part) for part in re.findall(r"\d+", installed)[:2]] < [int(part) for part in _LEAST_VERSION.split(".")]:
        raise NotReady(
            f"grammars need llguidance {_LEAST_VERSION}, and this environment has {installed}: install "
            "DraftBridge's servers in an environment of their own, without vLLM"
        )


class TokenGrammars:
    """Opens matchers over the tokens of a model, after compiling each in a thread."""

    def __init__(self, model: Model, trial: GrammarTrial | None = None) -> None:
        self._model = model
        self._store = _Store(self._compile, trial or GrammarTrial())
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._byte_tokenizer = byte_tokenizer()

    async def open(self, grammar: Grammar, ends: frozenset[int]) -> TokenMatcher:
        """Returns a matcher for a target, whose texts end with one of `ends`.

        Raises `InvalidGrammar`, `NotReady`, `SandboxBusy`, and `InvalidField` if the model has none of `ends`.
        """
        known = frozenset(id_ for id_ in ends if self._model.has(id_))
        if not known:
            raise InvalidField("sampling.stop_token_ids", "set, because this model has no end-of-text token", "none")
        matcher, byte_matcher = await self._store.matchers(grammar)
        return TokenMatcher(matcher, byte_matcher, grammar, self._made_tokenizer(), known, self._model.name)

    async def open_draft(self, grammar: Grammar) -> TextMatcher:
        """Returns a matcher for a draft. Raises `InvalidGrammar`, `NotReady` or `SandboxBusy`."""
        ends = frozenset(id_ for id_ in self._model.special_ids.eos if self._model.has(id_))
        matcher, _ = await self._store.matchers(grammar)
        return TextMatcher(matcher, grammar, self._made_tokenizer(), ends, self._model.name)

    def close(self) -> None:
        """Ends the threads and the process that compile grammars."""
        self._store.close()

    def _made_tokenizer(self) -> GrammarTokenizer:
        with self._lock:  # a large vocabulary takes about a second
            self._tokenizer = self._tokenizer or GrammarTokenizer(self._model.vocabulary)
        return self._tokenizer

    def _compile(self, grammar: Grammar) -> _Compiled:
        library = self._made_tokenizer().library
        return compile_grammar(library, grammar), compile_grammar(self._byte_tokenizer, grammar)


class ByteGrammars:
    """Opens matchers over bytes, for bridges."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        self._store = _Store(lambda grammar: (compile_grammar(tokenizer, grammar),), GrammarTrial())

    async def open(self, grammar: Grammar) -> ByteMatcher:
        """Returns a matcher at the start of a text. Raises `InvalidGrammar`, `NotReady` or `SandboxBusy`."""
        return ByteMatcher(*await self._store.matchers(grammar))

    def close(self) -> None:
        """Ends the threads and the process that compile grammars."""
        self._store.close()
