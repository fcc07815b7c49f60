"""Refuses, with their place, the parts of a Lark grammar that the library reads otherwise or cannot finish."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from services.grammars.schema import UnsupportedPart, check_schema, complete_formats, encode_references, narrow_patterns

_TOKEN = re.compile(
    r'(?P<terminal>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\])+/[imslux]*)|(?P<skip>(?://|#)[^\n]*|\s+)'
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<special><[^<>\s]+>)|(?P<directive>%[a-z]+)"
    r"|(?P<optional>[?*]|\{\s*0*\s*(?:,[^}]*)?\}|~\s*0+\b)|(?P<many>\{[^}]*\}|~\s*\d+)|->\s*[a-z_][a-z0-9_-]*|::|.",
    re.DOTALL,
)
_INLINE = ("%json", "%regex")
_REFUSED_DIRECTIVES = {"%lark": "write its rules in the grammar itself", "%if": "write the rules out"}
_REFUSED_OPTIONS = {"temperature": "leave it out", "max_tokens": "use {0,N}", "stop": "use suffix or lazy"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: str
    begin: int


# The place and the body of each rule and terminal by its name.
_Rules = dict[str, tuple[str, list[_Token]]]


def check_lark(text: str) -> None:
    """Raises `UnsupportedPart` for a construct that is not supported, or a rule whose text never ends."""
    tokens = list(_tokens(text))
    for one, following in zip_longest(tokens, tokens[1:]):
        refused = ""
        if one.kind == "special":
            refused = "tokens by name or number differ between models: leave it out"
        elif one.text == "::":
            refused = "parameters of rules are not supported: write the rules out"
        elif one.text in _REFUSED_DIRECTIVES:
            refused = f"it is not supported: {_REFUSED_DIRECTIVES[one.text]}"
        elif one.text in _REFUSED_OPTIONS and following and following.text == "=":
            refused = f"the option is not supported: {_REFUSED_OPTIONS[one.text]}"
        if refused:
            raise UnsupportedPart(f"at {one.place}: {one.text}: {refused}")
    rules = _rules(tokens)
    finite: set[str] = set()
    reached = _reached(rules)
    while found := [name for name in rules.keys() - finite if _is_finite(rules[name][1], rules, finite)]:
        finite.update(found)
    for name, (place, _) in rules.items():
        if name in reached and name not in finite:
            raise UnsupportedPart(f"at {place}: no text matches {name}, because each one contains another one")


def complete_schemas(text: str) -> str:
    """Returns a grammar with what the library leaves out of its JSON schemas. Lines keep their numbers.

    Raises `UnsupportedPart`.
    """
    for one in reversed([one for one in _tokens(text) if one.text == "%json"]):
        begin = _value_begin(text, one.begin + len(one.text))
        value, end = json.JSONDecoder().raw_decode(text, begin)
        before = json.dumps(value)
        try:
            narrow_patterns(value)
        except UnsupportedPart as error:
            raise UnsupportedPart(f"at {one.place}: %json: {error}") from None
        complete_formats(value)
        encode_references(value)
        if (source := json.dumps(value)) != before:
            lines = "\n" * text.count("\n", begin, end)
            text = f"{text[:begin]}{source[0]}{lines}{source[1:]}{text[end:]}"
    return text


def check_terminals(text: str, is_empty: Callable[[str], bool]) -> None:
    """Raises `UnsupportedPart` for a terminal or a regular expression in a rule that no text matches.

    `is_empty` returns whether no text matches a grammar.
    """
    tokens = list(_tokens(text))
    place, source, new = 0, "", "start"
    while new in text:
        new += "0"
    for one in tokens:  # the checked grammar has another start, and ignores nothing
        if one.text in ("start", "%ignore"):
            source += text[place : one.begin] + (new if one.text == "start" else f"{new.upper()}{one.begin}:")
            place = one.begin + len(one.text)
    source += text[place:] + f"\nstart: {new.upper()}\n{new.upper()}: "
    suspects = [one for one in _reached(_rules(tokens)).values() if one.text.isupper() or one.text.startswith("/")]
    if not suspects or not is_empty(source + " ".join(one.text for one in suspects)):
        return
    while len(suspects) > 1:
        first = suspects[: len(suspects) // 2]
        suspects = first if is_empty(source + " ".join(one.text for one in first)) else suspects[len(first) :]
    raise UnsupportedPart(f"at {suspects[0].place}: no text matches {suspects[0].text}")


def _tokens(text: str) -> Iterator[_Token]:
    """Yields the tokens of a grammar, without white space and comments. The library reports what is not one."""
    position, line, line_start = 0, 1, 0
    while found := _TOKEN.match(text, position):
        token = _Token(found.lastgroup or "", found[0], f"{line}({position - line_start + 1})", position)
        end = found.end()
        if token.text in _INLINE:
            try:
                value, end = json.JSONDecoder().raw_decode(text, _value_begin(text, end))
                if token.text == "%json":
                    check_schema(value, embedded=True)
            except UnsupportedPart as error:
                raise UnsupportedPart(f"at {token.place}: %json: {error}") from None
            except (json.JSONDecodeError, RecursionError):
                raise UnsupportedPart(f"at {token.place}: {token.text} is not followed by JSON") from None
            token = _Token("terminal", token.text, token.place, token.begin)
        if token.kind != "skip":
            yield token
        line += text.count("\n", position, end)
        line_start = max(line_start, text.rfind("\n", position, end) + 1)
        position = end


def _value_begin(text: str, end: int) -> int:
    """Returns where the value after the end of a directive begins."""
    return len(text) - len(text[end:].lstrip())


def _rules(tokens: list[_Token]) -> _Rules:
    rules: _Rules = {}
    body: list[_Token] = []
    for one in tokens:
        if one.text == ":":
            if body and body[-1].text == "]":  # options stand between the name and the colon
                while body and body.pop().text != "[":
                    pass
            if body and body[-1].kind == "name":
                name = body.pop()
                begin = name.begin
                while body and body[-1].text in ("?", "!") and body[-1].begin == begin - 1:  # modifiers of the name
                    begin = body.pop().begin
                body = []
                rules[name.text] = name.place, body
        elif one.kind == "directive":
            body = []
        else:
            body.append(one)
    return rules


def _reached(rules: _Rules) -> dict[str, _Token]:
    """Returns, by their texts, the tokens of the rules that `start` leads to: not what its terminals consist of."""
    reached: dict[str, _Token] = {}
    waiting = [_Token("name", "start", "", 0)]
    while waiting:
        one = waiting.pop()
        if one.text not in reached:
            reached[one.text] = one
            waiting += [] if one.text.isupper() else rules.get(one.text, ("", []))[1]
    return reached


def _is_finite(body: list[_Token], rules: _Rules, finite: set[str]) -> bool:
    """Returns whether a body has a text that ends, as far as known: the rules in `finite` have one."""
    # For each open group: whether an alternative ends, whether the present one does up to its last part, and that part.
    groups = [[False, True, True]]
    for one in body:
        any_ends, before, last = groups[-1]
        if one.text in ("(", "["):
            groups[-1] = [any_ends, before and last, True]
            groups.append([False, True, True])
        elif one.text in (")", "]") and len(groups) > 1:
            groups.pop()
            groups[-1][2] = one.text == "]" or any_ends or (before and last)
        elif one.text == "|":
            groups[-1] = [any_ends or (before and last), True, True]
        elif one.kind == "optional":
            groups[-1][2] = True
        elif one.kind in ("name", "terminal"):
            groups[-1] = [any_ends, before and last, one.text in finite or one.text not in rules]
    any_ends, before, last = groups[0]
    return any_ends or (before and last)
