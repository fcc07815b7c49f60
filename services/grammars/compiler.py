"""Compiles one grammar for one set of tokens, within limits.

The limits bound every step of a compiled grammar, but not the first: see `trial`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.repetition import MAX_TERMINAL_BYTES, longest_terminal

# JSON is written on one line, like most JSON in training data. So nearly all of it but the values is forced.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A step of a grammar within these takes up to about ten milliseconds, and the automaton up to 40 MB.
_LIMITS = LLParserLimits(
    max_lexer_states=20_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_grammar_size=60_000,
    verbose_errors=False,
    precompute_large_lexemes=False,
)
_UNFORCED = '%llguidance {"no_forcing": true}\n'
_MAX_DETAIL_CHARACTERS = 300
_REMEDIES = {
    GrammarKind.JSON_SCHEMA: "change the schema there; docs/guides/structured.md lists the supported keywords",
    GrammarKind.JSON_OBJECT: "send a json_schema",
    GrammarKind.REGEX: "use the syntax of Rust's regex, without look-around and back references",
    GrammarKind.CHOICE: "send fewer or shorter texts",
    GrammarKind.LARK: "correct the Lark grammar there",
}


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar, *, forcing: bool = True) -> LLMatcher:
    """Returns a matcher at the start of the grammar. Raises `InvalidGrammar`.

    `forcing`: bytes without an alternative are written in the tokens that the tokenizer gives for them.
    """
    try:
        text = _source(grammar, forcing)
    except ValueError as error:
        raise invalid(grammar, f"is not a JSON Schema ({error})") from None
    if (length := longest_terminal(grammar)) > MAX_TERMINAL_BYTES:
        raise invalid(
            grammar, f"is too complex: a part of it has {length} bytes or more, of {MAX_TERMINAL_BYTES} allowed"
        )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise refused(grammar, matcher.get_error())
    return matcher


def refused(grammar: Grammar, reason: str, place: str = "") -> InvalidGrammar:
    """Returns the error for a grammar that the library refuses for a reason, or at a place of the text."""
    reason = " ".join(reason.removesuffix("<non-verbose/>").replace("<backtrace>", "").split())
    if "NoExtension" in reason:
        return invalid(grammar, f"cannot be satisfied{place}: no text matches it")
    if place := place or _place(grammar, reason):
        return invalid(grammar, f"cannot be used{place}: {reason}")
    return invalid(grammar, f"cannot be used: {reason}")


def invalid(grammar: Grammar, problem: str) -> InvalidGrammar:
    """Returns the error with the remedy for grammars of this kind."""
    if len(problem) > _MAX_DETAIL_CHARACTERS:
        problem = problem[:_MAX_DETAIL_CHARACTERS] + "..."
    return InvalidGrammar(grammar.field, f"{problem}: {_REMEDIES[grammar.kind]}")


def _source(grammar: Grammar, forcing: bool) -> str:
    """Returns the grammar in the library's form. Raises `ValueError` for text that is not a JSON object."""
    match grammar.kind:
        case GrammarKind.LARK:
            lark = grammar.text
        case GrammarKind.CHOICE:
            lark = "start: " + " | ".join(map(json.dumps, json.loads(grammar.text)))
        case GrammarKind.REGEX:
            lark = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
        case _:
            schema = grammar.text if grammar.kind is GrammarKind.JSON_SCHEMA else '{"type": "object"}'
            source = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE, overrides={"lenient": False})  # type: ignore[arg-type]
            if forcing:
                return source
            lark = f"start: %json {json.dumps(json.loads(source)['grammars'][0]['json_schema'])}"
    return LLMatcher.grammar_from_lark(lark if forcing else _UNFORCED + lark)


def _place(grammar: Grammar, reason: str) -> str:
    """Returns where in a schema the part is that the library refuses by name; empty if it is not found."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return ""  # the reason itself has the line and column
    schema = json.loads(grammar.text)
    if found := re.match(r"Unimplemented keys: (\[.*?\])", reason):
        keys = set(json.loads(found[1]))
        return next((f" at {path}" for path, part in _parts(schema, "#") if keys <= part.keys()), "")
    for pattern, key in ((r"Unknown format: (.*)", "format"), (r"Invalid type: (.*)", "type")):
        if found := re.match(pattern, reason):
            parts = _parts(schema, "#")
            return next((f" at {path}/{key}" for path, part in parts if found[1] in str(part.get(key))), "")
    return ""


def _parts(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields all JSON objects in a value with their JSON pointers."""
    if isinstance(value, dict):
        yield path, value
        for key, one in value.items():
            yield from _parts(one, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _parts(one, f"{path}/{index}")
