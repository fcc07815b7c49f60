"""Compiles one grammar for one set of tokens, within limits.

The limits bound every step of a compiled grammar, but not the first: see `trial`.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.lark import check_lark, check_terminals, complete_schemas
from services.grammars.schema import (
    UnsupportedPart,
    check_parts,
    check_schema,
    complete_formats,
    encode_references,
    narrow_patterns,
    refused_part,
)
from services.grammars.usage import STEP_LIMITS

# JSON is written on one line, like most JSON in training data. So nearly all of it except the values is forced.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The library must not force bytes, because it has no limit for them: see `forced_bytes`. The last option applies.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
_MAX_DETAIL_CHARACTERS = 300
# The lines of the grammar that the library quotes, and the place of a schema in the Lark grammar made from it.
_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_OUTER_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
# An option that is refused, and a place in the schema by which a part is tried.
_NOISE = re.compile(r"\.? Enable 'coerce_one_of' option.*| while processing json-schema:\S*")
_REMEDIES = {
    GrammarKind.JSON_SCHEMA: "change the schema; docs/guides/structured.md lists the supported keywords",
    GrammarKind.JSON_OBJECT: "send a json_schema",
    GrammarKind.REGEX: "use the syntax of Rust's regex, without look-around and back references",
    GrammarKind.CHOICE: "send fewer or shorter texts",
    GrammarKind.LARK: "correct the grammar",
}


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Returns a matcher at the start of the grammar. Raises `InvalidGrammar`."""
    try:
        text = _source(grammar)
    except UnsupportedPart as error:
        raise invalid(grammar, f"cannot be used {error}") from None
    except ValueError as error:
        raise invalid(grammar, f"is not a JSON Schema ({error})") from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=STEP_LIMITS)
    if matcher.is_error():
        raise _refused_at(tokenizer, grammar, matcher.get_error())
    return matcher


def check_satisfiable(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Raises `InvalidGrammar` for a part of a compiled grammar that no text matches, wherever it is.

    In regular expressions and choices the library finds such parts.
    """

    def is_empty(source: str, begin: bytes = b"") -> bool:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=STEP_LIMITS)
        if matcher.try_consume_tokens(list(begin)) == len(begin):
            matcher.compute_bitmask()
        return "NoExtension" in matcher.get_error()

    try:
        if grammar.kind is GrammarKind.LARK:
            check_terminals(grammar.text, lambda lark: is_empty(LLMatcher.grammar_from_lark(lark)))
        elif grammar.kind is GrammarKind.JSON_SCHEMA:
            # Otherwise white space may follow without an end.
            style = {"x-guidance": _JSON_STYLE}
            check_parts(json.loads(grammar.text), lambda schema: is_empty(_lark_of(schema | style), b"{"))
    except UnsupportedPart as error:
        raise invalid(grammar, f"cannot be satisfied {error}") from None


def _refused_at(tokenizer: LLTokenizer, grammar: Grammar, reason: str) -> InvalidGrammar:
    """Returns the error with the place in a JSON Schema, which the library does not tell."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return refused(grammar, reason)

    def refusal(schema: Any) -> str:
        matcher = LLMatcher(tokenizer, _lark_of(schema), log_level=0, limits=STEP_LIMITS)
        return _OUTER_PLACE.sub("", matcher.get_error()) if matcher.is_error() else ""

    schema = json.loads(grammar.text)
    narrow_patterns(schema)
    complete_formats(schema)
    path, reason = refused_part(schema, refusal)
    return refused(grammar, reason, f" at {path}")


def refused(grammar: Grammar, reason: str, place: str = "") -> InvalidGrammar:
    """Returns the error for a grammar that the library refuses for a reason, or at a place of the text."""
    reason = reason.removesuffix("<non-verbose/>").replace("<backtrace>", "")
    reason = _EXCERPT.sub("", reason)
    if grammar.kind is not GrammarKind.LARK:
        reason = _OUTER_PLACE.sub("", reason)
    reason = _NOISE.sub("", " ".join(reason.split()))
    if "NoExtension" in reason:
        return invalid(grammar, f"cannot be satisfied{place}: no text matches it")
    return invalid(grammar, f"cannot be used{place}: {reason}")


def invalid(grammar: Grammar, problem: str) -> InvalidGrammar:
    """Returns the error with the remedy for grammars of this kind."""
    if len(problem) > _MAX_DETAIL_CHARACTERS:
        problem = problem[:_MAX_DETAIL_CHARACTERS] + "..."
    return InvalidGrammar(grammar.field, f"{problem}: {_REMEDIES[grammar.kind]}")


def _source(grammar: Grammar) -> str:
    """Returns the grammar in the library's form.

    Raises `UnsupportedPart`, and `ValueError` for text that is not a JSON object.
    """
    match grammar.kind:
        case GrammarKind.LARK:
            check_lark(grammar.text)
            lark = complete_schemas(grammar.text)
        case GrammarKind.CHOICE:
            lark = "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, json.loads(grammar.text)))
        case GrammarKind.REGEX:
            lark = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
        case _:
            schema = grammar.text if grammar.kind is GrammarKind.JSON_SCHEMA else '{"type": "object"}'
            source = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE, overrides={"lenient": False})  # type: ignore[arg-type]
            check_schema(json.loads(schema))  # the library's copy has rounded large integers
            value = json.loads(source)["grammars"][0]["json_schema"]
            value.pop("$schema", None)  # under older ones, the library ignores some keywords
            narrow_patterns(value)
            complete_formats(value)
            encode_references(value)
            return _lark_of(value)
    return LLMatcher.grammar_from_lark(lark + _UNFORCED)


def _lark_of(schema: Any) -> str:
    return LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}{_UNFORCED}")
