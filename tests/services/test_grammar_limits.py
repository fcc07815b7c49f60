"""The time and the memory of one text that follows a grammar are bounded, in each step and in the sum."""

import json
from contextlib import nullcontext
from itertools import count
from time import process_time
from unittest.mock import Mock

import pytest

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.usage import resident_bytes
from tests.support import grammars as support
from tests.support import tiny


@pytest.mark.parametrize(
    ("kind", "text", "start"),
    [
        (GrammarKind.LARK, "start: /[xy]{99}/ b{4000}\nb: B\nB: /a{16000}/", b"x" * 99),
        (GrammarKind.LARK, 'start: a\na: "(" a B | "x"\nB: /b{16000}/', b"(" * 99 + b"x"),
        (GrammarKind.REGEX, "[xy]{99}(((a{100}){100}){100}){100}", b"y" * 99),
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": {"title": "a" * 250_000}}), b'{"title": "'),
        (GrammarKind.LARK, '%llguidance {"no_forcing": false}\nstart: /[xy]/ A{9000}\nA: /a{9000}/', b"x"),
    ],
)
def test_a_step_is_short_where_a_grammar_forces_millions_of_bytes(kind: GrammarKind, text: str, start: bytes) -> None:
    model, grammar = tiny.model("byte_level"), Grammar(kind, text)
    byte_matcher = ByteMatcher(compile_grammar(byte_tokenizer(), grammar))
    matcher = support.Grammars(model).open(grammar, frozenset({2}))
    matcher.advance(model.vocabulary.pieces(start).ids)
    byte_matcher.commit(start)
    started = process_time()
    data, ends = byte_matcher.forced(b"", 512)
    ids = model.vocabulary.pieces(data).ids[:12]
    assert 0 < len(data) <= 512 and not ends
    count, rest_may = matcher.certain(ids)
    assert count and rest_may
    assert matcher.allowed().sum() == 1
    assert process_time() - started < 0.5  # milliseconds; bytes without a limit took seconds


def test_forced_bytes_that_cost_much_are_found_in_small_parts() -> None:
    names = [f"A{place}" for place in range(900)]
    rules = [f"{name}: /a{{{600 + place}}}[b-j]*{place}/" for place, name in enumerate(names)]
    matcher = compile_grammar(
        byte_tokenizer(), Grammar(GrammarKind.LARK, f"start: ({'|'.join(names)})\n" + "\n".join(rules))
    )
    byte_matcher = ByteMatcher(matcher)
    started = process_time()
    data, ends = byte_matcher.forced(b"", 512)
    assert 0 < len(data) < 512 and set(data) == {ord("a")} and not ends
    assert process_time() - started < 0.1  # all 512 took most of a second
    byte_matcher.commit(data)
    assert byte_matcher.forced(b"", 512)[0], "and it goes on"


def test_a_text_that_costs_ever_more_is_no_longer_followed() -> None:
    matcher = compile_grammar(byte_tokenizer(), Grammar(GrammarKind.LARK, 'start: s\ns: s s | "a" | "aa"'))
    byte_matcher = ByteMatcher(matcher)
    started = process_time()
    for _ in range(100):
        byte_matcher.commit(b"aaaa")
        byte_matcher.accepted(b"", b"a" * 250)
    assert process_time() - started < 1.0  # one look at 250 bytes took seconds
    assert byte_matcher.accepted(b"", b"x") == (1, True) and byte_matcher.forced(b"", 512) == (b"", False)


def test_a_grammar_does_not_wear_out() -> None:
    """Copies of a matcher share an automaton, in which each text leaves states."""
    model = tiny.model("byte_level")
    store = support.Grammars(model)
    grammar = support.schema({"type": "string", "maxLength": 6000})
    texts = [("the quick brown " * 400)[: 5900 - place] for place in range(4)]
    for text in (*texts, "short"):
        matcher = store.open(grammar, frozenset({2}))
        for id_ in model.vocabulary.pieces(json.dumps(text).encode()).ids:
            assert matcher.allowed()[id_]
            matcher.advance((id_,))
        assert matcher.allowed()[2]


def test_the_memory_of_a_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count(0, 6 << 20)
    monkeypatch.setattr("services.grammars.usage.resident_bytes", lambda: next(sizes))
    model, grammar = tiny.model("byte_level"), Grammar(GrammarKind.REGEX, "(abc)*")
    ids = [model.vocabulary.byte_ids[byte] for byte in b"abc" * 10]
    store = support.Grammars(model)
    for matcher in (store.open(grammar, frozenset({2})), store.open_draft(grammar)):
        with pytest.raises(InvalidGrammar, match=r"is too complex: it takes more than 128 MiB after b'abc.*: use the"):
            for id_ in ids:
                matcher.allowed()
                matcher.advance((id_,))
    byte_matcher = ByteMatcher(compile_grammar(byte_tokenizer(), grammar))
    assert byte_matcher.forced(b"a", 512) == (b"bc", False) and byte_matcher.accepted(b"", b"x") == (0, False)
    for _ in range(7):
        byte_matcher.commit(b"abc")
    assert byte_matcher.forced(b"a", 512) == (b"", False) and byte_matcher.accepted(b"", b"x") == (1, True)


class Clock:
    """A thread's processor time, of which each measured step takes `seconds`, and the next one `more` seconds more."""

    def __init__(self, seconds: float, more: float = 0.0) -> None:
        self._seconds, self._more, self._now = seconds, more, 0.0

    def __call__(self) -> float:
        self._now += self._seconds
        self._seconds += self._more
        return self._now


def test_a_text_whose_masks_take_ever_longer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, grammar = tiny.model("byte_level"), Grammar(GrammarKind.LARK, 'start: s\ns: s s | "a" | "b"')
    store, id_ = support.Grammars(model), model.vocabulary.byte_ids[ord("a")]
    for opened in (lambda: store.open(grammar, frozenset({2})), lambda: store.open_draft(grammar)):
        for clock, refused in ((Clock(0.0045), False), (Clock(0.0045, 0.0005), True)):  # a slow machine; ambiguity
            matcher = opened()
            monkeypatch.setattr("services.grammars.usage.thread_time", clock)
            message = r"too complex or ambiguous: .* more than 10 ms on average after b'a+': correct the grammar"
            with pytest.raises(InvalidGrammar, match=message) if refused else nullcontext():
                for _ in range(100):
                    matcher.allowed()
                    matcher.advance((id_,))


def test_a_bridge_gives_up_a_text_whose_bytes_take_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(GrammarKind.REGEX, "(abc)*")
    for clock, lost in ((Clock(0.0003), False), (Clock(0.0003, 0.00001), True)):
        matcher = ByteMatcher(compile_grammar(byte_tokenizer(), grammar))
        monkeypatch.setattr("services.grammars.usage.thread_time", clock)
        for _ in range(300):
            matcher.commit(b"abc")
        assert matcher.forced(b"a", 512) == (b"" if lost else b"bc", False)
        assert matcher.accepted(b"", b"x") == ((1, True) if lost else (0, False))


def test_memory_is_measured_also_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    present = resident_bytes()
    monkeypatch.setattr("services.grammars.usage.open", Mock(side_effect=FileNotFoundError), raising=False)
    assert 1 << 20 < 0.8 * present < resident_bytes() < 1 << 40  # the highest so far
