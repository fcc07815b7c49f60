"""Tests that all occurrences of strings are found, and soon."""

import time

from hypothesis import example, given
from hypothesis import strategies as st

from bridge.text.string_matcher import StringMatcher

TEXTS = st.text("<|a>", max_size=12)


@given(st.lists(TEXTS, max_size=5), TEXTS)
@example(["<", "<<"], "<")
def test_every_occurrence_is_found(strings: list[str], text: str) -> None:
    places = [(start, end) for start in range(len(text)) for end in range(start + 1, len(text) + 1)]
    assert StringMatcher(strings).find(text) == {(start, end) for start, end in places if text[start:end] in strings}


def test_a_text_of_first_characters_takes_no_time() -> None:
    matcher = StringMatcher(f"<|{'a' * length}|>" for length in range(200))
    started = time.thread_time()
    assert not matcher.find("<" * 100_000)
    assert time.thread_time() - started < 1, "it takes 0.1 s; it took 7"


def test_parts_of_strings_are_told_from_other_texts() -> None:
    matcher = StringMatcher(["<eos>", "<turn>"])
    for text, expected in (
        ("rn>a", (True, False)),
        ("a<tur", (False, True)),
        ("\n", (False, False)),
        (">", (True, False)),
    ):
        assert matcher.may_be_cut(text) == expected
