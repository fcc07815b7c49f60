"""Which JSON texts of users are read, and that their keys keep their order and their numbers their values."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import InvalidField
from bridge.text.json_objects import MAX_DEPTH, count_marks, read_object
from tests.support.depth import examples

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9)


@settings(max_examples=examples(300))
@given(st.dictionaries(st.text(), VALUES), st.booleans())
def test_an_object_is_read_as_it_was_written(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert json.dumps(read_object("x", text), ensure_ascii=ascii_only) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
        ("[{}]", "not an object"),
        ('{"a": NaN}', "not finite"),
        ('{"a": [-1e400]}', "not finite"),
        ('{"a": 1' + "0" * 400 + "}", "beyond 1.8e308"),
        ('{"a": -1' + "0" * 1_000_000 + "}", "beyond 1.8e308"),
        ('{"a": "\\ud800"}', "surrogates"),
        ('{"\\udfff": 1}', "surrogates"),
        ('{"x": {"a": 1, "b": 2, "a": 3}}', "a key twice"),
        ('{"x":' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1), "more than 32 levels"),
        ('{"x":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "more than 32 levels"),
        ('{"x":' * 200_000, "recursion depth"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_object_that_templates_cannot_use_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidField, match=problem):
        read_object("x", text)


def marks(value: Any) -> tuple[int, int]:
    """Counts by the value what `count_marks` counts in its text."""
    if not isinstance(value, list | dict):
        return 0, 0
    items = list(value.values() if isinstance(value, dict) else value)
    numbers = sum(type(one) in (int, float) for one in items[1:]) if isinstance(value, list) else 0
    inner = [marks(one) for one in items]
    return numbers + sum(one for one, _ in inner), max(len(items), 1) - numbers + sum(one for _, one in inner)


TRICKY = st.lists(st.sampled_from(['"', "\\", ",", "[", "{", "1", " ", "n"])).map("".join)
TRICKY_VALUES = st.recursive(LEAVES | TRICKY, lambda one: st.lists(one) | st.dictionaries(TRICKY, one), max_leaves=9)


@settings(max_examples=examples(60))
@given(TRICKY_VALUES, st.booleans())
def test_marks_in_strings_do_not_count(value: Any, compact: bool) -> None:
    text = json.dumps(value, separators=(",", ":") if compact else None, indent=None if compact else 1)
    assert count_marks(text.encode()) == marks(value)


def test_the_deepest_object() -> None:
    assert read_object("x", '{"x":' * MAX_DEPTH + "0" + "}" * MAX_DEPTH)
