"""Bounds the bytes that one terminal of a grammar may force.

The library computes all bytes that follow without an alternative at once, and has no limit for those of one terminal:
in `[xy]{99}(a{1000}){1000}` a million bytes follow one byte.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from bridge.sampling.grammar import Grammar, GrammarKind

MAX_TERMINAL_BYTES = 1 << 14

_REGEX = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*(?P<count>\d+)[^}]*\}|[()|]|.", re.DOTALL)
_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|\{\s*(?P<count>\d+)[^}]*\}'
    r"|~\s*(?P<times>\d+)|[()|]|\s|.",
    re.DOTALL,
)
# Keywords of a schema whose texts are not generated.
_REMARKS = ("description", "title", "$comment")
_DEFINITION = re.compile(r"^\s*\??(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\.\d+)?(?:\[[^\]]*\])?\s*:", re.MULTILINE)


def longest_terminal(grammar: Grammar) -> int:
    """Returns an upper bound of the bytes that one terminal must have, in bytes."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return _length(_atoms_of_regex(grammar.text))
        case GrammarKind.CHOICE:
            return max(len(text.encode()) for text in json.loads(grammar.text))
        case GrammarKind.LARK:
            return _longest_in_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            return max(_in_schema(json.loads(grammar.text)), default=0)
    return 0


def _length(atoms: Iterator[int | str]) -> int:
    """Returns the length of a sequence of lengths, `(`, `)`, `|`, and `*N`, which repeats what stands before it."""
    done: list[list[int]] = [[0, 0, 0]]  # for each open group: the longest alternative, the present one, its last atom
    for atom in atoms:
        longest, total, last = done[-1]
        match atom:
            case int():
                done[-1] = [longest, total + last, atom]
            case "(":
                done.append([0, 0, 0])
            case ")" if len(done) > 1:
                done.pop()
                outer = done[-1]
                done[-1] = [outer[0], outer[1] + outer[2], max(longest, total + last)]
            case "|":
                done[-1] = [max(longest, total + last), 0, 0]
            case ")":
                pass
            case count:
                done[-1] = [longest, total, last * max(int(count[1:]), 1)]
    return max(max(longest, total + last) for longest, total, last in done)


def _atoms_of_regex(text: str) -> Iterator[int | str]:
    for found in _REGEX.finditer(text):
        if found["count"]:
            yield f"*{found['count']}"
        elif found[0] in "()|":
            yield found[0]
        elif found[0] not in "*+?^$":
            yield len(found[0].encode()) if len(found[0]) == 1 else 1


def _longest_in_lark(text: str) -> int:
    starts = list(_DEFINITION.finditer(text))
    ends = [one.start() for one in starts[1:]] + [len(text)]
    bodies = {one["name"]: text[one.end() : end] for one, end in zip(starts, ends, strict=True)}
    known: dict[str, int] = {}

    def terminal(name: str) -> int:
        if name not in known:
            known[name] = 1  # for one that refers to itself, which the library refuses
            known[name] = _length(atoms(bodies.get(name, "")))
        return known[name]

    def atoms(body: str) -> Iterator[int | str]:
        for found in _LARK.finditer(body):
            if count := found["count"] or found["times"]:
                yield f"*{count}"
            elif found["name"]:
                yield terminal(found["name"]) if found["name"].isupper() else 0
            elif found[0] in ("(", ")", "|"):
                yield found[0]
            elif found[0].startswith("/") and not found[0].startswith("//") and len(found[0]) > 1:
                yield _length(_atoms_of_regex(found[0][1:-1]))
            elif found[0].startswith('"'):
                yield len(found[0].encode())

    def single(body: str) -> int:
        # In a rule, each terminal is one of its own.
        return max((one for one in atoms(body) if isinstance(one, int)), default=0)

    return max((terminal(name) if name.isupper() else single(body) for name, body in bodies.items()), default=0)


def _in_schema(value: Any, key: str = "") -> Iterator[int]:
    """Yields the lengths of all patterns and texts in a schema."""
    match value:
        case str():
            yield _length(_atoms_of_regex(value)) if key == "pattern" else len(value.encode())
        case dict():
            for name, one in value.items():
                yield _length(_atoms_of_regex(name)) if key == "patternProperties" else len(name.encode())
                if name not in _REMARKS or not isinstance(one, str):
                    yield from _in_schema(one, name)
        case list():
            for one in value:
                yield from _in_schema(one)
