"""Grammars for tests, and the slow oracle: the target alone, with a new matcher at every position."""

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import History, Sampler
from bridge.text.models import Model
from services.grammars.store import TokenGrammars
from services.grammars.token_matcher import TextMatcher, TokenMatcher
from services.grammars.trial import GrammarTrial
from tests.support import tiny

T = TypeVar("T")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["öl", "red", "green", "a\nb"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    """Returns the grammar of a JSON Schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


GRAMMARS = {
    "schema": schema(PERSON),
    "regex": Grammar(GrammarKind.REGEX, r"(the|a) [0-9]{2,3}( \u00e9+| 東京| 🎉){1,3}!?"),
    "choice": Grammar.choice(["the quick brown fox", "the quick", "the lazy dog", "naïve 🎉 café"]),
    "lark": Grammar(GrammarKind.LARK, 'start: item ("," item)*\nitem: "[" start "]" | /[a-z]{1,3}/'),
    "words": Grammar(GrammarKind.REGEX, "(the|dog|again){1,4}"),
}


class Untried(GrammarTrial):
    """Tries nothing, so that tests of what comes later start no process."""

    def check(self, grammar: Grammar) -> None:
        """See `GrammarTrial`."""


class Grammars:
    """Opens matchers as `TokenGrammars` does, without trials, and without an event loop."""

    def __init__(self, model: Model) -> None:
        self._grammars = TokenGrammars(model, Untried())

    def open(self, grammar: Grammar, ends: frozenset[int]) -> TokenMatcher:
        """See `TokenGrammars.open`."""
        return _awaited(self._grammars.open(grammar, ends))

    def open_draft(self, grammar: Grammar) -> TextMatcher:
        """See `TokenGrammars.open_draft`."""
        return _awaited(self._grammars.open_draft(grammar))


def _awaited(opened: Coroutine[Any, Any, T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, opened).result()


@contextmanager
def tried() -> Iterator[GrammarTrial]:
    """Yields a trial and closes it."""
    trial = GrammarTrial()
    try:
        yield trial
    finally:
        trial.close()


def decode_alone(
    of: Model, engine: tiny.HashEngine, choose: Sampler, prompt: Sequence[int], count: int, grammar: Grammar
) -> list[int]:
    """Returns the generated ids by plain decoding with masks of a matcher that is new at every position."""
    store = Grammars(of)
    ids, offset, history = list(prompt), 0, History(prompt)
    while len(ids) - len(prompt) < count and len(ids) < of.context_length:
        matcher = store.open(grammar, choose.ends)
        matcher.advance(ids[len(prompt) :])
        id_ = choose.choose(engine.logits(ids), offset, 0, history, matcher.allowed()).token_id
        ids.append(id_)
        history.extend((id_,))
        if id_ in choose.ends:
            break
        offset += len(of.vocabulary.token_bytes(id_))
    return ids[len(prompt) :]
