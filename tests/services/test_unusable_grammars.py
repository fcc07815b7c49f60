"""What cannot be a grammar is refused by name, in bounded time."""

import json
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from bridge.errors import InvalidField, InvalidGrammar
from bridge.sampling.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from services.errors import SandboxBusy
from services.grammars.trial import GrammarTrial, try_grammar
from services.sandbox import answering_process
from tests.support import grammars as support
from tests.support import tiny
from tests.support.waiting import eventually

NEVER_ENDS = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}}}
LINKED = {"type": "object", "properties": {"v": {"type": "integer"}, "c": {"$ref": "#"}}, "required": ["v", "c"]}
# Only `prefixItems`, which older dialects do not have, makes it satisfiable.
ONE_LISTED_ITEM = {"type": "array", "items": False, "minItems": 1}
IMPOSSIBLE = {"type": "string", "minLength": 3, "maxLength": 2}
# What the library refuses without a place, ignores, rounds or counts wrongly, in a schema, with the place.
SCHEMAS = [
    ({"type": "integer", "divisibleBy": 2}, r'at #: the keyword "divisibleBy"'),
    ({"items": {"maxlength": 2}}, r'at #/items: the keyword "maxlength"'),
    ({"properties": {"a": {"required": True}}}, r"at #/properties/a/required: it is not an array"),
    ({"prefixItems": [{}], "additionalItems": False}, r'at #: beside "prefixItems"'),
    ({"prefixItems": [{"type": "integer"}], "items": [{"type": "string"}]}, r'at #: beside "prefixItems"'),
    ({"items": {"enum": ["a", {"id": 2**53 + 1}]}}, r"at #/items/enum: an integer exceeds 2\^53"),
    ({"const": -(2**70)}, r"at #/const: an integer exceeds 2\^53"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, r"at #/exclusiveMinimum: it is not a number"),
    ({"items": {"multipleOf": -2}}, r"at #/items/multipleOf: it is not above 0"),
    ({"type": "integer", "minimum": 2**65 + 1}, r"at #/minimum: an integer exceeds 2\^53"),
    ({"type": "integer", "minimum": 1e20, "maximum": 1e21}, r"at #/minimum: an integer exceeds 2\^53"),
    ({"items": {"maximum": -1e20}}, r"at #/items/maximum: an integer exceeds 2\^53"),
    ({"type": ["integer", "null"], "enum": [1e20, 2.5]}, r"at #/enum: an integer exceeds 2\^53"),
    ({"allOf": [{"type": "integer"}, {"const": -1e16}]}, r"at #/allOf/1/const: an integer exceeds 2\^53"),
    ({"type": "integer", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1e20}}}, r"at #/\$defs/a/const: an integer"),
    ({"properties": {"a": {"type": "integer"}}, "const": {"a": 1e20}}, r"at #/const: an integer exceeds 2\^53"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, r"at #/exclusiveMinimum: less than 1"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, r"at #/exclusiveMinimum: less than 1"),
    ({"minimum": -1.5, "exclusiveMaximum": -1}, r"at #/exclusiveMaximum: less than 1"),
    ({"allOf": [{"exclusiveMinimum": 1}, {"exclusiveMaximum": 1.5}]}, r"at #/allOf/0/exclusiveMinimum: less than 1"),
    (
        {"items": {"$ref": "#/$defs/a", "maximum": 0.5}, "$defs": {"a": {"exclusiveMinimum": 0}}},
        r"at #/\$defs/a/exclusiveMinimum: less than 1",
    ),
    ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {}]}, r"at #/x-guidance/coerce_one_of: only"),
    ({"x-guidance": {"key_separator": ":="}}, r"at #/x-guidance/key_separator: only"),
    ({"x-guidance": {"whitespace_flexible": "True"}}, r"at #/x-guidance/whitespace_flexible: only"),
    ({"x-guidance": {"item_separator": [","]}}, r"at #/x-guidance/item_separator: only"),
    ({"x-guidance": 5}, r"at #/x-guidance: it is not an object"),
    ({"items": {"x-guidance": {}}}, r'at #/items: the keyword "x-guidance"'),
    ({"required": ["a", "a"], "minProperties": 2}, r"at #/minProperties: above 1"),
    (
        {"patternProperties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
        r"at #/minProperties: above 1",
    ),
    ({"properties": {"a~b": {"not": {}}}}, r'at #/properties/a~0b: the keyword "not"'),
    (
        {
            "properties": {"b": {"properties": {"c": IMPOSSIBLE}, "required": ["c"], "type": "object"}},
            "required": ["b"],
            "type": "object",
        },
        r"at #/properties/b/properties/c: Unsatisfiable",
    ),
    (
        {"type": "array", "minItems": 1, "items": {"type": "string", "format": "date", "enum": ["2021-02-29"]}},
        r"at #/items: Unsatisfiable",
    ),
    ({"properties": {"a": 5}}, r"at #/properties/a: schema must be an object"),
    ({"patternProperties": {"(": {}}, "additionalProperties": False}, r"at #: regex parse error"),
    (
        {"properties": {f"{place:04}": {"pattern": "(" * (place == 377)} for place in range(500)}},
        r"at #/properties/0377",
    ),
    (
        {"properties": {"a": {"properties": {"b": {"properties": {"c": {"oneOf": [{}, {}]}}}}}}},
        r"at #/properties/a/properties/b/properties/c: oneOf constraints are not supported: change",
    ),
    (
        {"type": "object", "properties": {"a": IMPOSSIBLE, "b": IMPOSSIBLE}, "required": ["b"]},
        r"at #/properties/b: Unsatisfiable schema: minLength \(3\) is greater than maxLength \(2\): change",
    ),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "propertyNames": {}}, r'keyword "propertyNames"'),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}, r'keyword "dependentRequired"'),
    ({"$schema": "http://example.com/mine"}, r"at #/\$schema: Unknown dialect"),
    ({"$defs": {"a": {"$id": "b"}}}, r'at #/\$defs/a: the keyword "\$id"'),
    ({"properties": {"a": {"type": "string"}, "b": {"type": "str"}}}, r"at #/properties/b/type: Invalid type: str:"),
    ({"properties": {"not": {"type": "string"}, "b": {"not": {}}}}, r'at #/properties/b: the keyword "not"'),
    ({"items": {"$ref": "#/$defs/a"}}, r"at #/items/\$ref: there is no schema at #/\$defs/a"),
    ({"type": "array", "required": [[]], "minItems": 1}, r"at #/required: it contains something else"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, r"at #/\$ref: only #/\.\.\. is supported"),
    ({"type": "object", "minProperties": 2}, r"at #/minProperties: above 1"),
    ({"type": "integer", "maximum": 2**53 + 1}, r"at #/maximum: an integer exceeds 2\^53"),
    ({"anyOf": {"type": "string"}}, r"at #/anyOf: it is not an array"),
    (LINKED, r"at #: no text matches it"),
    ({"type": "array", "minItems": 1, "items": {"allOf": [{"$ref": "#"}]}}, r"at #: no text matches it"),
    ({"anyOf": [{"oneOf": [{"$ref": "#"}]}, {"$ref": "#/anyOf/0"}]}, r"at #: no text matches it"),
    ({"properties": {"a": IMPOSSIBLE, "b": {"items": {"pattern": "("}}}}, r"at #/properties/b/items: .*unclosed group"),
    ({"properties": {"a": IMPOSSIBLE, "b/c": {"oneOf": [{}, {}]}}}, r"at #/properties/b~1c: oneOf .*not supported"),
    ({"items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"items": {"pattern": "["}}}}, r"at #/\$defs/n/items: regex"),
    ({"type": "array", "items": {"enum": [1], "type": "string"}, "minItems": 1}, r"at #/items: Unsatisfiable"),
    ({"items": {"pattern": "(?ix)a b"}}, r"at #/items/pattern: the flag x is not supported: write"),
    ({"pattern": '^[^"(]('}, r'at #: regex parse error: \^\[\^"\(\]\( .*unclosed group'),
    ({"pattern": "[" * 248 + '^"' + "]" * 248}, r"at #/pattern: its classes are too complex: write simpler ones"),
    (
        {"items": {"patternProperties": {"^x": {}}}},
        r"at #/items/patternProperties: it needs additionalProperties false",
    ),
    ({"patternProperties": {"^x": {}}, "additionalProperties": {"type": "null"}}, r"at #/patternProperties: it needs"),
    (
        {"patternProperties": {'[^"]': {}}, "additionalProperties": False, "properties": {"\0": {}}},
        r"at #/patternProperties: a class without .*names in properties without U\+0000",
    ),
    (
        {
            "patternProperties": {'[^"]': {}},
            "additionalProperties": False,
            "properties": {"a": {"$ref": '#/patternProperties/[^"]'}},
        },
        r"at #/patternProperties: a class without .*no \$ref",
    ),
]
BAD = [
    (GrammarKind.JSON_SCHEMA, "{", r"is not a JSON Schema .*line 1 column 1"),
    (GrammarKind.JSON_SCHEMA, "[" * 200_000, r"is not a JSON Schema .*recursion limit"),
    (GrammarKind.JSON_SCHEMA, "false", r"is not a JSON Schema"),
    (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', r"at #/type: Invalid type: strin"),
    (GrammarKind.JSON_SCHEMA, '{"properties": {"a/b": {"not": {}}}}', r'at #/properties/a~1b: the keyword "not"'),
    (GrammarKind.JSON_SCHEMA, '{"items": {"format": "tea"}}', r"at #/items/format: Unknown format: tea"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}', r"at #/\$ref: .*does not fetch resources"),
    (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}}', r"at #/x-guidance/lenient: only"),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', r"Unsatisfiable"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', r"no text matches it"),
    (GrammarKind.JSON_SCHEMA, json.dumps(NEVER_ENDS | {"$ref": "#/$defs/n"}), r"at #/\$defs/n: no text matches it"),
    (GrammarKind.REGEX, "(a", r"unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", r"look-around"),
    (GrammarKind.REGEX, "(" * 5000 + ")" * 5000, r"cannot be used"),
    (GrammarKind.REGEX, r"[^\s\S]", r"no text matches it"),
    (GrammarKind.LARK, "", r"cannot be used: no start rule"),
    (GrammarKind.LARK, "start: foo", r'at 1\(8\): unknown name: "foo"'),
    (GrammarKind.LARK, 'start: "a" start', r"at 1\(1\): no text matches start"),
    (GrammarKind.LARK, "// x: y\nstart: /[ab]/ x\n?x[lazy]: (start | x)+", r"at 2\(1\): no text matches start"),
    (GrammarKind.LARK, "start: /[xy]{99}/ A\nA: B & C\nB: /a/\nC: /b/", r"satisfied at 1\(19\): no text matches A:"),
    (
        GrammarKind.LARK,
        '%ignore / /\nstart: "s" st start?\nst: a b\na: "x"{99} (C|"d")\nb: /x[^\\s\\S]/\nC: "x" "y" // start',
        r"satisfied at 5\(4\): no text matches /x\[\^",
    ),
    (GrammarKind.LARK, "start: <|im_end|>", r"at 1\(8\): <\|im_end\|>: tokens by name"),
    (GrammarKind.LARK, 'start: "a"\n | <[65]>', r"at 2\(4\): <\[65\]>: tokens by name or number"),
    (GrammarKind.LARK, "start: a\na[temperature=0.5]: /b/", r"at 2\(3\): temperature: the option"),
    (GrammarKind.LARK, "start: a\na[max_tokens=5]: /b/", r"max_tokens: .*use \{0,N\}"),
    (
        GrammarKind.LARK,
        'start: %json {"$schema": "http://json-schema.org/draft-04/schema#"}',
        r"%json: at #: .*part of a",
    ),
    (
        GrammarKind.LARK,
        'start: %json {"x-guidance": {"whitespace_flexible": true}}',
        r"%json: at #: .*part of a",
    ),
    (GrammarKind.LARK, r'start: %json {"type": "\ud800"}', r"at 1\(8\): %json: at #/type: Invalid type: \?"),
    (GrammarKind.LARK, 'start: %json {"a": 1}', r'at 1\(8\): %json: at #: the keyword "a"'),
    (GrammarKind.LARK, 'start: "a"\n | %json {"pattern": "(?x)a"}', r"at 2\(4\): %json: at #/pattern: the flag x"),
    (GrammarKind.LARK, 'start: %lark { start: "a" }', r"at 1\(8\): %lark: it is not supported"),
    (GrammarKind.LARK, "start: a::_\na::_: /b/", r"at 1\(9\): ::: parameters"),
    (GrammarKind.LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, r"too deeply nested"),
    *((GrammarKind.JSON_SCHEMA, json.dumps(schema), message) for schema, message in SCHEMAS),
]
# Ends of recursions, names of properties that are keywords, annotations, and texts that are not grammars.
GOOD = [
    support.schema({"const": 1e20}),
    support.schema({"properties": {"a": {"type": "integer"}, "b": {"enum": [1e20, 2.0**53]}}}),
    support.schema({"type": "integer", "enum": [float(2**53)], "minimum": -(2.0**53)}),
    Grammar.choice([f"text {place}" for place in range(3000)]),
    support.schema({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    support.schema({"allOf": [{"type": "integer", "exclusiveMinimum": 0}, {"maximum": 1.5}, {"enum": [1, 2**53]}]}),
    support.schema({**LINKED, "required": ["v"]}),
    support.schema({**NEVER_ENDS, "type": "string"}),
    support.schema(
        {
            "properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}, "c": {"$ref": "#/$defs/d"}},
            "$defs": {"d": {}},
        }
    ),
    support.schema({**LINKED, "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
    support.schema({"type": "array", "items": {"$ref": "#"}}),
    support.schema({"type": "object", "properties": {"not": {"title": "if", "x-a": 1}}, "const": {"if": 1}}),
    support.schema(
        {"$schema": "http://json-schema.org/draft-04/schema#", "prefixItems": [{"const": 1}], **ONE_LISTED_ITEM}
    ),
    support.schema({"type": "object", "additionalProperties": False, "properties": {"a": {}}, "minProperties": 1}),
    Grammar(GrammarKind.LARK, 'start: "x" | "(" start ")" // a: a\n%ignore /[ :]+/\nB: "<a>" "temperature="'),
    Grammar(GrammarKind.LARK, 'start: a{0,1} "b"{2} [start] a~0..1 -> a\n | start\n?a: (start start)* "c"'),
    Grammar(
        GrammarKind.LARK, 'start[lazy]: /x+y/\n%llguidance {"no_forcing": false}\nA: %regex {"substring_chars": ":"}'
    ),
    Grammar(GrammarKind.LARK, 'start: "x" start?\nunused: "y" unused A\nA: "b" & "c"\nb: B\nB: A | "b"'),
    Grammar(GrammarKind.LARK, 'start: "start " B start?\nA: "b" & "c"\nB: A | "x" // start\n%ignore / start/'),
    Grammar(GrammarKind.LARK, 'start: a | %json {"type": "integer"}\na: b\nb: "x" a | "y"'),
    Grammar(GrammarKind.REGEX, r"\x{20000}\u{10000}"),
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


def test_what_only_looks_unusable_is_accepted() -> None:
    for grammar in GOOD:
        try_grammar(grammar)


def test_a_process_that_ends_between_two_grammars_is_replaced() -> None:
    with support.tried() as trial:
        trial.check(support.GRAMMARS["regex"])
        assert trial._process is not None
        trial._process.kill()
        eventually(lambda: trial._process is not None and trial._process.status is not None)
        trial.check(support.GRAMMARS["regex"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_that_is_killed_says_nothing_of_its_grammar(number: int) -> None:
    hangs = Grammar(GrammarKind.LARK, "start: A\nA: ~/(.*a.{30}b.*)/ & /[ab]{100}/")
    trial = GrammarTrial(cpu_limit=60)
    with closing(trial), ThreadPoolExecutor(1) as thread:
        tried = thread.submit(trial.check, hangs)
        eventually(lambda: trial._process is not None)
        assert trial._process is not None
        trial._process._popen.send_signal(number)
        with pytest.raises(SandboxBusy, match="try the grammar now"):
            tried.result()
        trial.check(support.GRAMMARS["regex"])


def test_a_trial_that_cannot_start_says_nothing_of_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering_process, "command", lambda *_: [sys.executable, "-c", "import no_such_module"])
    with support.tried() as trial, pytest.raises(SandboxBusy, match="ended with status 1"):
        trial.check(support.GRAMMARS["regex"])


def test_limits_on_time_hold_where_the_library_has_none() -> None:
    hangs = Grammar(GrammarKind.LARK, "start: A\nA: ~/(.*a.{30}b.*)/ & /[ab]{100}/")
    trial = GrammarTrial(cpu_limit=0.3)
    with closing(trial), pytest.raises(InvalidGrammar, match=r"takes more than 0.3 s"):
        trial.check(hangs)


def test_rules_that_are_nested_deeply_are_refused_before_they_overflow_a_thread() -> None:
    def chain(count: int) -> Grammar:
        rules = "".join(f'r{place}: "k" r{place + 1}?\n' for place in range(count))
        return Grammar(GrammarKind.LARK, f'start: r0\n{rules}r{count}: "z"\n')

    trial = GrammarTrial()
    trial.check(chain(100))
    with pytest.raises(InvalidGrammar):
        trial.check(chain(1000))
    trial.close()


def test_parameters_that_contradict_a_grammar_are_refused() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    with pytest.raises(InvalidField, match="ignore_eos"):
        SamplingParameters(grammar=grammar, ignore_eos=True).checked()
    with pytest.raises(InvalidField, match="at most"):
        SamplingParameters(grammar=Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1))).checked()
    longest = "ж" * (MAX_GRAMMAR_BYTES // 2 - 2)
    SamplingParameters(grammar=Grammar.choice([longest])).checked()
    with pytest.raises(InvalidField, match="at most"):
        SamplingParameters(grammar=Grammar.choice([longest + "x"])).checked()
    with pytest.raises(InvalidGrammar, match="at least one text"):
        SamplingParameters(grammar=Grammar.choice([])).checked()
    with pytest.raises(InvalidField, match="lone surrogate"):
        SamplingParameters(grammar=Grammar.choice(["\ud800"])).checked()
    with pytest.raises(InvalidField, match="end-of-text"):
        support.Grammars(tiny.model("byte_level")).open(grammar, frozenset())
