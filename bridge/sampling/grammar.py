"""Defines what a request may demand of the generated text, independent of any vocabulary."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bridge.errors import InvalidField, InvalidGrammar

# The longest text of a grammar, in bytes.
MAX_GRAMMAR_BYTES = 256 << 10


class GrammarKind(StrEnum):
    """The languages of grammars. The values are the names of the request's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"


@dataclass(frozen=True)
class Grammar:
    """A grammar that the generated text must satisfy. `text`: its source; for CHOICE, a JSON array of the texts.

    >>> Grammar.choice(["red", "green"]).text
    '["red", "green"]'
    """

    kind: GrammarKind
    text: str = ""

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Returns the grammar that allows these texts only."""
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @property
    def field(self) -> str:
        """Returns the name of the request's field, for errors."""
        return f"sampling.{self.kind.value}"

    def checked(self) -> "Grammar":
        """Returns itself. Raises `InvalidField` or `InvalidGrammar` for what is found without compiling it."""
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidField(self.field, "Unicode text", "a lone surrogate") from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidField(self.field, f"at most {MAX_GRAMMAR_BYTES} bytes long", size)
        if self.kind is GrammarKind.CHOICE and (not (texts := json.loads(self.text)) or "" in texts):
            raise InvalidGrammar(self.field, "needs at least one text, and none of them may be empty")
        return self
