"""JSON schemas: what is generated satisfies them, and is the target's own text, or they are refused at once."""

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import InvalidGrammar
from bridge.planning.planner import Mode
from bridge.ports import FinishReason
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.lark import complete_schemas
from services.grammars.trial import try_grammar
from tests.services.test_grammars import alone, follow, together
from tests.support import grammars as support
from tests.support import tiny
from tests.support.depth import examples

NAMES = ("a", "é", 'b"c', "$ref", "the")
MAX_TOKENS = 60
VALUES = st.sampled_from([None, True, 0, -7, 1.5, "", "the\n", 'ö"l\\', "🎉", [1, "a"], {"a": {"é": []}}])
# Unsupported in this form, but for one that an annotation makes harmless.
REFUSED: list[dict[str, Any]] = [
    {"not": {"type": "string"}}, {"type": "array", "uniqueItems": True}, {"if": {}, "then": {}}, {"maxlength": 1},
    {"type": "object", "dependentRequired": {}}, {"type": "array", "contains": {}}, {"propertyNames": {}},
]  # fmt: skip


def _ranges(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={low: values, high: values})


def _merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {key: value for one in found for key, value in one.items()})


def _of(type_: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.just({"type": type_})


BOUNDS = st.one_of(
    _ranges("minimum", "maximum", st.integers(-200, 200)),
    _ranges("exclusiveMinimum", "exclusiveMaximum", st.integers(-200, 200)),
    _ranges("minimum", "exclusiveMaximum", st.sampled_from([-1.5, -0.1, 0, 0.25, 1, 2.5, 100])),
)
SCALARS = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 5}]),
    _merged(_of("integer"), BOUNDS, st.sampled_from([{}, {"multipleOf": 3}])),
    _merged(_of("number"), BOUNDS, st.sampled_from([{}, {"multipleOf": 0.25}])),
    _merged(_of("string"), _ranges("minLength", "maxLength", st.integers(0, 6))),
    st.sampled_from(["^[a-c]{2,3}$", "é|🎉", "^$", "^\\d+\\.\\d$", "a"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 5}
    ),
    st.sampled_from(["ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value, "title": "a value"}),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3)
    listed = st.tuples(properties, st.sets(st.sampled_from(NAMES)), st.sampled_from([{}, {"minProperties": 1}])).map(
        lambda found: {
            "type": "object",
            "properties": found[0],
            "required": sorted(found[1] & found[0].keys()),
            "additionalProperties": False,
            **found[2],
        }
    )
    free = st.tuples(st.sampled_from(["^[a-c]{1,2}$", "^é", "^[^\\s\\S]"]), inner, st.integers(0, 1)).map(
        lambda found: {
            "type": "object",
            "patternProperties": {found[0]: found[1]},
            "additionalProperties": False,
            "minProperties": found[2],
            "maxProperties": 2,
        }
    )
    arrays = _merged(
        _of("array"), inner.map(lambda one: {"items": one}), _ranges("minItems", "maxItems", st.integers(0, 3))
    )
    tuples = lists.map(lambda found: {"type": "array", "prefixItems": found, "items": False, "minItems": len(found)})
    choices = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), lists).map(lambda found: {found[0]: found[1]})
    recursive = inner.map(lambda one: {"type": "array", "items": {"anyOf": [one, {"$ref": "#"}]}, "maxItems": 2})
    return st.one_of(listed, listed, free, arrays, tuples, choices, recursive)


SCHEMAS = st.recursive(SCALARS, _containers, max_leaves=5)

NO_NAME = {
    "type": "object",
    "patternProperties": {r"[^\s\S]": {"type": "integer"}},
    "additionalProperties": False,
    "minProperties": 1,
}
# More bytes than a trial follows.
LATE = {"type": "string", "pattern": "^[xy]{99}$"}
EMPTY = [
    ({"properties": {"a": LATE, "é": NO_NAME}, "required": ["a", "é"]}, "#/properties/é"),
    ({"properties": {"b%41": {"allOf": [NO_NAME | {"minProperties": 0}, {"minProperties": 1}]}}}, "#/properties/b%41"),
    ({"prefixItems": [LATE, {"$ref": "#/$defs/m"}], "$defs": {"m": NO_NAME}}, "#/prefixItems/1"),
    ({"x-guidance": {"whitespace_flexible": True}, **NO_NAME}, "#"),
]
# Patterns of one character, with Python's form if that is another. `.` and a line feed differ: see `_matches`.
CLASSES: list[str | tuple[str, str]] = [
    r'[^"]', r'[^"\\]', r"[^\\/:]", "[^a]", r"\D", r"\W", r"\S", r"\s", r"\w", ".", r"(?:.|\n)", r"[\s\S]", r'[^\w"]',
    r'[^\s"]', r'[^\n"]', r'[^\r\n"]', r"[\x00-!]", "[\x00-!]", r"[\x00-\x1f]", r"[\x01-!]", r"[ !#-~]", '[a-z"]', '"',
    r"\\", r"[\\]", r"\x00", r"\u0000", r"(?:\x00|[\x01-!])", "(?:\x00|[\x01-!])", r"(?:\u0000|[\u0001-!])",
    r"(?:[\x00-\x0f]|[\x10-!])", r'(?:[\x00-\x0f]|[\x10-!]|")', r'(?:[^"]|\\)', r'(?:[^"]|[^\\])', r'[^\S"]',
    r"(?:\s|[\x00-\x08\x0e-!])", r"(?:\n|[\x00-\x09\x0b-!])", r'[^]"]', r'[^\]"]', r'[^"\\\x00-\x1f]', r'(?i:[^"])',
    ("[^[:punct:]]", r"[^!-/:-@\[-`{-~]"), (r'[[^"]&&[^\x00-\x1f]]', r'[^"\x00-\x1f]'), (r"\p{Cc}", r"[\x00-\x1f\x7f]"),
    (r"\x{0}|[\x01-!]", r"[\x00-!]"), ('[[^"]--[b]]', '[^"b]'), ('[]"[^\\\\]]', r"[^\\]"),
]  # fmt: skip
# A host name of the greatest length, 253 characters.
LONG_NAME = ".".join(["0" * 62] * 4) + ".0"


@settings(max_examples=examples(60))
@given(
    schema=SCHEMAS,
    kind=st.sampled_from(tiny.EXACT_KINDS),
    draft_kind=st.sampled_from([None, *tiny.KINDS]),
    mode=st.sampled_from(list(Mode)),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)
def test_a_text_satisfies_its_schema_or_the_schema_is_refused_at_once(
    schema: dict[str, Any], kind: str, draft_kind: str | None, mode: Mode, temperature: float, seed: int
) -> None:
    grammar = support.schema(schema)
    try:
        try_grammar(grammar)
    except InvalidGrammar as error:
        assert str(error).startswith("sampling.json_schema cannot be ")
        return
    expected = alone(kind, grammar, temperature, seed, MAX_TOKENS)
    text, ids, finished = asyncio.run(together(kind, draft_kind, grammar, mode, temperature, seed, MAX_TOKENS))
    assert ids == expected
    if finished.finish_reason is FinishReason.STOP:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize("part", REFUSED, ids=lambda part: "-".join(part))
@settings(max_examples=examples(4))
@given(inner=SCALARS)
def test_a_schema_with_an_unsupported_keyword_is_refused_by_its_name(
    part: dict[str, Any], inner: dict[str, Any]
) -> None:
    keyword = list(part)[-1] if "then" not in part else "if"
    schema = {"type": "object", "properties": {"a": inner, "b/c": {"items": part}}}
    with pytest.raises(InvalidGrammar, match=rf'at #/properties/b~1c/items: the keyword "{keyword}" is not supported'):
        try_grammar(support.schema(schema))


@pytest.mark.parametrize(("schema", "place"), EMPTY)
def test_an_object_without_a_possible_property_is_refused_wherever_it_is(schema: dict[str, Any], place: str) -> None:
    message = rf"cannot be satisfied at {re.escape(place)}: no text matches it"
    with pytest.raises(InvalidGrammar, match=message):
        try_grammar(support.schema(schema))


@pytest.mark.parametrize(
    ("format_", "right", "wrong"),
    [
        ("date", ["2000-02-29", "2020-02-29", "2021-02-28", "2021-10-31"], ["1900-02-29", "2021-02-29", "2021-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["22:59:60Z", "24:00:00Z"]),
        ("date-time", ["2020-02-29T23:59:59Z"], ["2021-02-29T23:59:59Z", "2020-02-29T22:59:60Z"]),
        ("hostname", [LONG_NAME], [LONG_NAME + "0", "0" * 64]),
    ],
)
@pytest.mark.parametrize("own", [{}, {"pattern": "[0-9]"}], ids=["", "with a pattern"])
def test_a_format_holds_where_the_library_allows_more(
    format_: str, right: list[str], wrong: list[str], own: dict[str, str]
) -> None:
    schema = json.dumps({"type": "string", "format": format_, **own})
    inside = Grammar(GrammarKind.LARK, f"start: %json {schema}")
    for grammar in (Grammar(GrammarKind.JSON_SCHEMA, schema), inside):
        matcher = compile_grammar(byte_tokenizer(), grammar)
        for text in (*right, *wrong):
            data = json.dumps(text).encode()
            assert (ByteMatcher(matcher).accepted(b"", data) == (len(data), True)) is (text in right), text


def test_names_and_references_may_have_any_characters() -> None:
    with pytest.raises(InvalidGrammar, match=r"at #/properties/ö %41 \"#/items: .*unclosed group"):
        try_grammar(support.schema({"properties": {'ö %41 "#': {"items": {"pattern": "("}}}}))
    for reference in ("#/$defs/ö ß", "#/$defs/%C3%B6%20%C3%9F"):
        schema = {"$ref": reference, "$defs": {"ö ß": {"const": [1]}}}
        assert follow(support.schema(schema)).forced(b"", 9) == (b"[1]", True)
        lines = f'start: %json {json.dumps(schema, indent=1)} "x"'
        assert follow(Grammar(GrammarKind.LARK, lines)).accepted(b"", b"[1]x") == (4, True)
        assert complete_schemas(lines).count("\n") == lines.count("\n"), "errors name lines"


def _spellings(character: str) -> list[str]:
    """Returns the forms in which JSON may have a character of a text."""
    code = f"{ord(character):04x}"
    own = [json.dumps(character, ensure_ascii=False)[1:-1], f"\\u{code}", f"\\u{code.upper()}"]
    return [*own, character] if character >= " " and character not in '"\\' else own


def _allowed(grammar: Grammar, texts: list[str]) -> list[str]:
    """Returns the texts that the grammar allows."""
    matcher, allowed = compile_grammar(byte_tokenizer(), grammar), []
    for text in texts:
        data = list(text.encode())
        matcher.reset()
        if matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting():
            allowed.append(text)
    return allowed


@pytest.mark.parametrize("form", ["^(?:%s)$", "^(?:(?:%s)y|(?:%s)z)$"])
def test_no_escape_stands_for_a_character_that_a_pattern_excludes(form: str) -> None:
    spellings = [(one, _spellings(one)) for one in '\0\1\b\t\n\v\r\x1c\x1f !"#ab\\]\x7fé']
    end = "y" if "y" in form else ""
    for one in CLASSES:
        pattern, reference = one if isinstance(one, tuple) else (one, one)
        grammar = support.schema({"type": "string", "pattern": form.replace("%s", pattern)})
        texts = _allowed(grammar, [f'"{spelling}{end}"' for _, forms in spellings for spelling in forms])
        allowed = {json.loads(text)[0] for text in texts}
        matching = {one for one, _ in spellings if re.fullmatch(reference, one, re.ASCII)}
        assert allowed <= matching and matching - allowed <= {"\0"}, pattern


NAMES_WITHOUT_QUOTES = {"patternProperties": {'^[^"]+$': {"type": "null"}}, "additionalProperties": False}
INTEGERS_BY_NAME = {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"allOf": [{"pattern": '^[^"]{2}$'}, {"pattern": r"^[^\x00-\x1f]*$"}]}, [r'"\\a"'], [r'"\"a"', r'"\na"']),
        ({"allOf": [{"pattern": '^[^"]*$'}, {"pattern": r"^[^\\]*$"}]}, [r'"\na"'], [r'"\"a"', r'"\\a"']),
        ({"pattern": r'^[^"\\]+$', "maxLength": 2}, [r'"\n\t"'], [r'"\""', r'"\\"', r'"\n\n\n"']),
        ({"pattern": '[^"]'}, [r'"\"a"', r'"\u0000a"'], [r'"\"\""']),
        ({"format": "time", "pattern": '^[^"]*$'}, ['"23:59:59Z"'], []),
        (NAMES_WITHOUT_QUOTES, [r'{"\\\n": null}'], [r'{"\"": null}']),
        (INTEGERS_BY_NAME, ['{"xy": 1}'], [r'{"\u0078\u0079": "s"}', r'{"\u0078y": 1}']),
        ({"properties": {"a": {"pattern": '^[^"]$'}}}, [r'{"a": "\n"}'], [r'{"a": "\""}']),
    ],
)
def test_a_pattern_holds_wherever_it_is(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    schema = {"type": "object" if "{" in right[0] else "string"} | schema
    for grammar in (support.schema(schema), Grammar(GrammarKind.LARK, f"start: %json {json.dumps(schema)}")):
        assert _allowed(grammar, right + wrong) == right


@pytest.mark.parametrize(
    ("pattern", "in_schema", "in_regex"),
    [(r"\w", "a1", "aé1٣"), (r"\W", "é٣ ", " "), (r"\d", "1", "1٣"), (r"\D", "aé٣ ", "aé "), (r"[^\W\d]", "a", "aé")],
)
def test_classes_of_characters_are_ascii_in_schemas_and_unicode_in_regular_expressions(
    pattern: str, in_schema: str, in_regex: str
) -> None:
    texts = list("aé1٣ ")
    schema = support.schema({"type": "string", "pattern": f"^{pattern}$"})
    assert _allowed(schema, [f'"{one}"' for one in texts]) == [f'"{one}"' for one in in_schema]
    assert _allowed(Grammar(GrammarKind.REGEX, pattern), texts) == list(in_regex)
