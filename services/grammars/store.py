"""Compiles each grammar once for a vocabulary or for bytes, and keeps the latest."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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

# A compiled grammar takes about its text's size; refused ones are kept, too, with their error.
_KEPT_GRAMMARS = 128
# Grammars that may wait until the one before them is compiled.
_MAX_WAITING = 32


class _Store:
    """Keeps compiled grammars and errors. `compile_one` compiles a grammar that has passed the trial, and blocks.

    A thread of its own compiles one grammar after the other, so that hostile ones delay no other work.
    """

    def __init__(self, compile_one: Callable[[Grammar], LLMatcher], trial: GrammarTrial) -> None:
        self._compile_one, self._trial = compile_one, trial
        self._kept: LRUCache[Grammar, LLMatcher | InvalidGrammar] = LRUCache(_KEPT_GRAMMARS)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting = 0

    async def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar in a thread, unless it is kept. Raises `SandboxBusy`."""
        if self._found(grammar):
            return
        if self._waiting >= _MAX_WAITING:
            raise grammar_busy(f"{self._waiting} others are waiting")
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
        finally:
            self._waiting -= 1

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a new matcher at the start of a prepared grammar. Raises `InvalidGrammar`."""
        kept = self._found(grammar) or self._compile(grammar)
        if isinstance(kept, InvalidGrammar):
            raise InvalidGrammar(grammar.field, str(kept).partition(" ")[2])
        return kept.deep_copy()

    def close(self) -> None:
        """Ends the thread and the trial's process."""
        self._thread.shutdown(wait=False)
        self._trial.close()

    def _found(self, grammar: Grammar) -> LLMatcher | InvalidGrammar | None:
        with self._lock:
            return self._kept.get(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher | InvalidGrammar:
        if found := self._found(grammar):
            return found
        result: LLMatcher | InvalidGrammar
        try:
            self._trial.check(grammar)
            result = self._compile_one(grammar)
        except InvalidGrammar as error:
            result = error
        with self._lock:
            self._kept[grammar] = result
        return result


class TokenGrammars:
    """Opens matchers over the tokens of a model. Call `prepare` first, which does the work that takes time."""

    def __init__(self, model: Model, trial: GrammarTrial | None = None) -> None:
        self._model = model
        self._store = _Store(self._compile, trial or GrammarTrial())
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None

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
        return TokenMatcher(*self._opened(grammar), known, self._model.name)

    def open_draft(self, grammar: Grammar) -> TextMatcher:
        """Returns a matcher for a draft. Raises `InvalidGrammar`."""
        ends = frozenset(id_ for id_ in self._model.special_ids.eos if self._model.has(id_))
        return TextMatcher(*self._opened(grammar), ends, self._model.name)

    def close(self) -> None:
        """Ends the thread and the process that compile grammars."""
        self._store.close()

    def _opened(self, grammar: Grammar) -> tuple[LLMatcher, Grammar, GrammarTokenizer]:
        matcher = self._store.matcher(grammar)
        assert self._tokenizer is not None
        return matcher, grammar, self._tokenizer

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:  # a large vocabulary takes about a second
            self._tokenizer = self._tokenizer or GrammarTokenizer(self._model.vocabulary)
        return compile_grammar(self._tokenizer.library, grammar, forcing=self._tokenizer.forcing)


class ByteGrammars:
    """Opens matchers over bytes, for bridges."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        self._store = _Store(lambda grammar: compile_grammar(tokenizer, grammar), GrammarTrial())

    async def open(self, grammar: Grammar) -> ByteMatcher:
        """Returns a matcher at the start of a text. Raises `InvalidGrammar` or `SandboxBusy`."""
        await self._store.prepare(grammar)
        return ByteMatcher(self._store.matcher(grammar))

    def close(self) -> None:
        """Ends the thread and the process that compile grammars."""
        self._store.close()
