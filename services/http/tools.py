"""The grammar of a call that a request demands: a tool's name, and arguments that satisfy its parameters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import InvalidField
from bridge.sampling.grammar import Grammar, GrammarKind


def call_grammar(tools: Sequence[Mapping[str, Any]], name: str | None) -> Grammar:
    """Returns the grammar of `{"name": ..., "arguments": {...}}` for any of the tools, or for the one with this name.

    Raises `InvalidField`.
    """
    functions = [tool.get("function") for tool in tools]
    known = [one for one in functions if isinstance(one, Mapping) and isinstance(one.get("name"), str)]
    called = [one for one in known if name in (None, one["name"])]
    if not called:
        names = ", ".join(one["name"] for one in known) or "none is given"
        raise InvalidField("tool_choice", f"a function of tools ({names})", name or "required")
    calls, definitions = [], {}
    for one in called:
        # Arguments are an object, also where a schema only lists properties and would allow a string, too.
        parameters = {"type": "object"} | dict(one.get("parameters") or {})
        for key in ("$defs", "definitions"):
            if len(called) > 1 and key in parameters:
                raise InvalidField("tools", f"without {key} if one of several must be called", key)
            if key in parameters:
                definitions[key] = parameters.pop(key)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": one["name"]}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema | definitions))
