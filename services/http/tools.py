"""Tools: their definitions, the grammar of a call that a request demands, and the call in the answer."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bridge.errors import InvalidField
from bridge.sampling.grammar import Grammar, GrammarKind
from services.http.fields import JsonObject, Strict

# How the text of a call begins, by its grammar.
_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
# Keywords of JSON Schema with values that are not schemas, and with names of the user's own for schemas.
_VALUES = {"const", "default", "enum", "examples"}
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}


class Function(Strict):
    """A function that a model may call. `parameters` is the JSON Schema of its arguments; without it there are none."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class ToolName(Strict):
    """The function that must be called."""

    name: str


class NamedTool(Strict):
    """Chooses a function that must be called."""

    type: Literal["function"]
    function: ToolName


def call_grammar(tools: Sequence[Tool], name: str | None) -> Grammar:
    """Returns the grammar of `{"name": ..., "arguments": {...}}` for any of the tools, or for the one with this name.

    Raises `InvalidField`.
    """
    functions = [tool.function for tool in tools]
    # Errors name a schema by the index, which is that of the tool in the request.
    called = [(index, one) for index, one in enumerate(functions) if name in (None, one.name)]
    if not called:
        names = ", ".join(one.name for one in functions) or "none is given"
        raise InvalidField("tool_choice", f"a function of tools ({names})", name or "required")
    calls, definitions = [], {}
    for index, one in called:
        place = f"#/$defs/{index}"
        parameters = {"additionalProperties": False} if one.parameters is None else _moved(one.parameters, place)
        # Arguments are an object, also where a schema only lists properties or would allow a string.
        types = parameters.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            raise InvalidField(f"tools[{index}].function.parameters.type", "object, as arguments are", types)
        definitions[str(index)] = {**parameters, "type": "object"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": one.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "$defs": definitions}))


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a JSON Schema whose references to itself hold where it is the part `place` of a larger one."""

    def moved(value: Any) -> Any:
        match value:
            case dict():
                return {key: inner(key, one) for key, one in value.items()}
            case list():
                return [moved(one) for one in value]
        return value

    def inner(key: str, value: Any) -> Any:
        match value:
            case str() if key == "$ref" and (value == "#" or value.startswith("#/")):
                return place + value[1:]
            case dict() if key in _NAMED:
                return {name: moved(one) for name, one in value.items()}
        return value if key in _VALUES else moved(value)

    # With a name of its own, the schema would be the root that its references begin at. The whole has no dialect.
    return {key: inner(key, one) for key, one in schema.items() if key not in ("$id", "$schema")}


@dataclass
class Call:
    """The call that a text of `call_grammar` spells, read while the text grows."""

    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    _text: str = ""
    _sent: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the text is complete."""
        try:
            json.loads(self._text)
        except (ValueError, RecursionError):  # a text that is nested too deeply to be read counts as incomplete
            return False
        return True

    def take(self, text: str, *, ended: bool) -> dict[str, Any]:
        """Returns what `text` adds to a message: its `tool_calls`, or nothing before the arguments begin.

        A text that ends earlier is the message's content, so that it is not lost and the message can be sent back.
        """
        self._text += text
        # The last character may be the brace that ends the call, and so is not one of the arguments.
        end = len(self._text) - (self.is_whole if ended else 1)
        if self._sent:
            arguments, self._sent = self._text[self._sent : end], max(self._sent, end)
            return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {}
        if not (begun := _CALL.match(self._text)):
            return {"content": self._text} if ended else {}
        self._sent = max(begun.end(), end)
        function = {"name": json.loads(begun[1]), "arguments": self._text[begun.end() : end]}
        return {"tool_calls": [{"index": 0, "id": self.id, "type": "function", "function": function}]}
