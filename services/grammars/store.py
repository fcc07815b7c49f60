"""Compiles each grammar once for a vocabulary or for bytes, and keeps the latest."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cachetools import LRUCache
from llguidance import LLMatcher

from bridge.errors import InvalidField, InvalidGrammar
from bridge.sampling.grammar import Grammar
from bridge.sampling.sampler import SamplingParameters
from bridge.text.models import Model
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.token_matcher import TextMatcher, TokenMatcher
from services.grammars.tokenizer import GrammarTokenizer
from services.grammars.trial import GrammarTrial, grammar_busy

# The memory that compiled grammars may take. Refused ones are kept, too, with their error.
_KEPT_BYTES = 256 << 20
# A compiled grammar takes about 64 KiB, and 200 bytes for each byte of its text.
_GRAMMAR_BYTES, _BYTES_PER_BYTE = 1 << 16, 200
# Grammars that may wait until the one before them is compiled.
_MAX_WAITING = 32

# A grammar compiled for bytes and, by a model's server, for its tokens.
_Compiled = tuple[LLMatcher, ...]


class _Store:
    """Keeps compiled grammars and errors. `compile_one` compiles a grammar that has passed the trial, and blocks.

    A thread of its own compiles one grammar after the other, so that hostile ones delay no other work.
    """

    def __init__(self, compile_one: Callable[[Grammar], _Compiled], trial: GrammarTrial) -> None:
        self._compile_one, self._trial = compile_one, trial
        self._kept: LRUCache[Grammar, tuple[_Compiled | InvalidGrammar, int]] = LRUCache(
            _KEPT_BYTES, getsizeof=lambda kept: kept[1]
        )
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[Grammar, Future[object]] = {}

    async def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar in a thread, unless it is kept or another request does. Raises `SandboxBusy`."""
        if self._found(grammar):
            return
        if (future := self._waiting.get(grammar)) is None:
            if len(self._waiting) >= _MAX_WAITING:
                raise grammar_busy(f"{len(self._waiting)} others are waiting")
            self._waiting[grammar] = future = self._thread.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self._waiting.pop(grammar))
        await asyncio.shield(asyncio.wrap_future(future))  # others may wait for it when this request is cancelled

    def matchers(self, grammar: Grammar) -> list[LLMatcher]:
        """Returns new matchers at the start of a prepared grammar. Raises `InvalidGrammar`."""
        kept = self._found(grammar) or self._compile(grammar)
        if isinstance(kept, InvalidGrammar):
            raise InvalidGrammar(grammar.field, str(kept).partition(" ")[2])
        return [matcher.deep_copy() for matcher in kept]

    def close(self) -> None:
        """Ends the thread and the trial's process."""
        self._thread.shutdown(wait=False)
        self._trial.close()

    def _found(self, grammar: Grammar) -> _Compiled | InvalidGrammar | None:
        with self._lock:
            return self._kept.get(grammar, (None, 0))[0]

    def _compile(self, grammar: Grammar) -> _Compiled | InvalidGrammar:
        if found := self._found(grammar):
            return found
        result: _Compiled | InvalidGrammar
        text_size = len(grammar.text.encode())
        try:
            self._trial.check(grammar)
            result = self._compile_one(grammar)
            size = len(result) * (_GRAMMAR_BYTES + _BYTES_PER_BYTE * text_size)
        except InvalidGrammar as error:
            result, size = error, text_size + 1000
        with self._lock:
            self._kept[grammar] = result, size
        return result


class TokenGrammars:
    """Opens matchers over the tokens of a model. Call `prepare` first, which does the work that takes time."""

    def __init__(self, model: Model, trial: GrammarTrial | None = None) -> None:
        self._model = model
        self._store = _Store(self._compile, trial or GrammarTrial())
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._byte_tokenizer = byte_tokenizer()

    async def prepare(self, sampling: SamplingParameters) -> None:
        """Compiles the grammar of the parameters, if they have one. Raises `SandboxBusy`."""
        if sampling.grammar:
            await self._store.prepare(sampling.grammar)

    def open(self, grammar: Grammar, ends: frozenset[int]) -> TokenMatcher:
        """Returns a matcher for a target, whose texts end with one of `ends`.

        Raises `InvalidGrammar`, and `InvalidField` if the model has none of `ends`.
        """
        known = frozenset(id_ for id_ in ends if self._model.has(id_))
        if not known:
            raise InvalidField("sampling.stop_token_ids", "set, because this model has no end-of-text token", "none")
        matcher, byte_matcher = self._store.matchers(grammar)
        return TokenMatcher(matcher, byte_matcher, grammar, self._made_tokenizer(), known, self._model.name)

    def open_draft(self, grammar: Grammar) -> TextMatcher:
        """Returns a matcher for a draft. Raises `InvalidGrammar`."""
        ends = frozenset(id_ for id_ in self._model.special_ids.eos if self._model.has(id_))
        matcher, _ = self._store.matchers(grammar)
        return TextMatcher(matcher, grammar, self._made_tokenizer(), ends, self._model.name)

    def close(self) -> None:
        """Ends the thread and the process that compile grammars."""
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
        """Returns a matcher at the start of a text. Raises `InvalidGrammar` or `SandboxBusy`."""
        await self._store.prepare(grammar)
        return ByteMatcher(*self._store.matchers(grammar))

    def close(self) -> None:
        """Ends the thread and the process that compile grammars."""
        self._store.close()
