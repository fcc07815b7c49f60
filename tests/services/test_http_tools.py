"""The grammar of a tool's call demands the arguments that the tool's own schema describes."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from services.grammars.trial import try_grammar
from services.http.tools import Call, Tool, call_grammar
from tests.support.doors import tool

TREE = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["label", "children"],
    "additionalProperties": False,
}
POINTING = {
    "properties": {"a": {"$ref": "#/$defs/item"}, "b": {"$ref": "#/properties/a"}, "$ref": {"const": {"$ref": "#"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"item": {"enum": [1, 2]}},
    "$id": "https://example.com/pointing",
}


def allows(name: str | None, call: dict[str, Any]) -> bool:
    tools = [
        Tool.model_validate(one)
        for one in (tool("tree", parameters=TREE), tool("point", parameters=POINTING), tool("stop"))
    ]
    return bool(Draft202012Validator(json.loads(call_grammar(tools, name).text)).is_valid(call))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("tree", {"label": "a", "children": [{"label": "b", "children": []}]},
         {"label": "a", "children": [{"name": "tree", "arguments": {}}]}),
        ("point", {"a": 1, "b": 2, "$ref": {"$ref": "#"}}, {"a": 1, "b": 3}),
        ("stop", {}, {"a": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alone", [True, False])
def test_references_of_a_schema_hold_inside_the_call(
    name: str, right: dict[str, Any], wrong: dict[str, Any], alone: bool
) -> None:
    chosen = name if alone else None
    assert allows(chosen, {"name": name, "arguments": right})
    assert not allows(chosen, {"name": name, "arguments": wrong})


def test_tools_may_name_the_dialect_of_their_schema() -> None:
    named = {"$schema": "http://json-schema.org/draft-07/schema#", **TREE}
    try_grammar(call_grammar([Tool.model_validate(tool("tree", parameters=named))], None))


def test_a_call_that_is_nested_too_deeply_is_incomplete() -> None:
    call = Call()
    call.take('{"name": "a", "arguments": {"b": ' + "[" * 100_000, ended=False)
    assert not call.is_whole


def test_a_schema_is_named_by_the_index_of_its_tool() -> None:
    tools = [Tool.model_validate(tool(name, parameters=TREE)) for name in ("first", "second")]
    assert list(json.loads(call_grammar(tools, "second").text)["$defs"]) == ["1"]
