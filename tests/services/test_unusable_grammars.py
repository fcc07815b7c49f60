"""What cannot be a grammar is refused by name, in bounded time."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from bridge.errors import InvalidField, InvalidGrammar, SandboxBusy
from bridge.sampling.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from services.grammars.repetition import longest_terminal
from services.grammars.trial import GrammarTrial
from tests.support import grammars as support
from tests.support import tiny
from tests.support.waiting import eventually

NEVER_ENDS = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}}}
BAD = [
    (GrammarKind.JSON_SCHEMA, "{", r"is not a JSON Schema .*line 1 column 1"),
    (GrammarKind.JSON_SCHEMA, "[" * 200_000, r"is not a JSON Schema .*recursion limit"),
    (GrammarKind.JSON_SCHEMA, "false", r"is not a JSON Schema"),
    (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', r"at #/type: Invalid type: strin"),
    (GrammarKind.JSON_SCHEMA, '{"properties": {"a/b": {"not": {}}}}', r'at #/properties/a~1b: Unimpl.*"not"'),
    (GrammarKind.JSON_SCHEMA, '{"items": {"format": "tea"}}', r"at #/items/format: Unknown format: tea"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}', r"does not fetch resources"),
    (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', r"at #: Unimplemented"),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', r"Unsatisfiable"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', r"no text matches it"),
    (GrammarKind.JSON_SCHEMA, json.dumps(NEVER_ENDS | {"$ref": "#/$defs/n"}), r"after b'{'.*Too many items"),
    (GrammarKind.REGEX, "(a", r"unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", r"look-around"),
    (GrammarKind.REGEX, "(" * 5000 + ")" * 5000, r"cannot be used"),
    (GrammarKind.REGEX, r"[^\s\S]", r"no text matches it"),
    (GrammarKind.REGEX, "(((a{100}){100}){100}){100}", r"too complex: a part of it has 100000000 bytes"),
    (GrammarKind.REGEX, "[xy]{99}(a{1000}){1000}", r"too complex: a part of it has 1000099 bytes"),
    (GrammarKind.JSON_SCHEMA, '{"pattern": "^[xy]{99}(a{1000}){1000}$"}', r"too complex: a part"),
    (GrammarKind.LARK, 'start: /[xy]+/ B\nB: C{1000}\nC: "a"{1000}', r"too complex: a part"),
    (GrammarKind.LARK, "start: foo", r'at 1\(8\): unknown name: "foo"'),
    (GrammarKind.LARK, 'start: "a" start', r"after b'a'.*Too many items"),
    (GrammarKind.LARK, "start: <|im_end|>", r"unknown special token"),
    (GrammarKind.LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, r"too deeply nested"),
]


def test_what_is_not_a_usable_grammar_is_refused_in_bounded_time() -> None:
    with support.tried() as trial:
        for kind, text, message in BAD:
            with pytest.raises(InvalidGrammar) as caught:
                trial.check(Grammar(kind, text).checked())
            assert re.search(message, str(caught.value)), (text[:80], str(caught.value))
            assert str(caught.value).startswith(f"sampling.{kind.value} ") and len(str(caught.value)) < 600
            assert not re.search(r"\n|<non-verbose", str(caught.value))
        trial.check(support.schema(support.PERSON))  # and goes on with what is valid


def test_the_length_of_a_terminal_is_bounded_from_above() -> None:
    for text, length in (("ab|(cd){3}e", 7), (r"[a-z\]]{4}\d{2,9}", 6), ("(a|bcd){2}(e{3}){5}x*", 22), ("é{2}", 4)):
        assert longest_terminal(Grammar(GrammarKind.REGEX, text)) == length
    lark = 'start: a{1000} B // "comment"\na: "xyz" | B\nB: C ("de"){2} | /f{9}/\nC: "g"{3}'
    assert 9 <= longest_terminal(Grammar(GrammarKind.LARK, lark)) < 30
    for grammar in support.GRAMMARS.values():
        assert longest_terminal(grammar) < 100


def test_a_process_that_ends_between_two_grammars_is_replaced() -> None:
    with support.tried() as trial:
        trial.check(support.GRAMMARS["regex"])
        assert trial._process is not None
        trial._process.kill()
        trial._process.wait()
        trial.check(support.GRAMMARS["regex"])


def test_a_trial_that_is_killed_says_nothing_of_its_grammar() -> None:
    hangs = Grammar(GrammarKind.LARK, "start: A\nA: ~/(.*a.{30}b.*)/ & /[ab]{100}/")
    trial = GrammarTrial(cpu_limit=60)
    with closing(trial), ThreadPoolExecutor(1) as thread:
        tried = thread.submit(trial.check, hangs)
        eventually(lambda: trial._process is not None)
        assert trial._process is not None
        trial._process.kill()
        with pytest.raises(SandboxBusy, match="try the grammar now"):
            tried.result()
        trial.check(support.GRAMMARS["regex"])


def test_limits_on_time_hold_where_the_library_has_none() -> None:
    hangs = Grammar(GrammarKind.LARK, "start: A\nA: ~/(.*a.{30}b.*)/ & /[ab]{100}/")
    trial = GrammarTrial(cpu_limit=0.3)
    with closing(trial), pytest.raises(InvalidGrammar, match=r"takes more than 0.3 s"):
        trial.check(hangs)


async def test_a_grammar_is_compiled_once_and_an_error_kept() -> None:
    tried = []

    class Counting(support.Untried):
        def check(self, grammar: Grammar) -> None:
            tried.append(grammar)
            if grammar.text == "bad":
                raise InvalidGrammar(grammar.field, "is bad")

    from services.grammars.store import TokenGrammars

    store = TokenGrammars(tiny.model("byte_level"), Counting())
    good, bad = Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.REGEX, "bad")
    for _ in range(3):
        await store.prepare(SamplingParameters(grammar=good))
        store.open(good, frozenset({2}))
        await store.prepare(SamplingParameters(grammar=bad))
        with pytest.raises(InvalidGrammar, match=r"^sampling.regex is bad$"):
            store.open(bad, frozenset({2}))
    assert tried == [good, bad]


def test_parameters_that_contradict_a_grammar_are_refused() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    with pytest.raises(InvalidField, match="ignore_eos"):
        SamplingParameters(grammar=grammar, ignore_eos=True).checked()
    with pytest.raises(InvalidField, match="at most"):
        SamplingParameters(grammar=Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1))).checked()
    with pytest.raises(InvalidGrammar, match="at least one text"):
        SamplingParameters(grammar=Grammar.choice([])).checked()
    with pytest.raises(InvalidField, match="lone surrogate"):
        SamplingParameters(grammar=Grammar.choice(["\ud800"])).checked()
    with pytest.raises(InvalidField, match="end-of-text"):
        support.grammars(tiny.model("byte_level")).open(grammar, frozenset())
