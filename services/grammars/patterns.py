"""Narrows patterns of JSON Schemas for which the library would allow characters that they exclude.

In a class with all control characters, the library (llguidance 1.9.1) allows the JSON escapes of `"` and of the
backslash, whether the class contains these or not. It compares the class with the 32 control characters, with or
without the line feed, after it has united classes that are alternatives. A pattern for which this may happen loses
U+0000, so that no class has all of them; the library then allows the right escapes.
"""

import json
import re
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer

from services.grammars.byte_matcher import byte_tokenizer
from services.grammars.usage import STEP_LIMITS

# What matches one character, the beginning of a class, a group with flags, and other characters.
_PIECE = re.compile(
    r"(?P<atom>\\[pP](?:\{[^}]*\}|.)|\\[xuU]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}"
    r"|\\[DSWsafnrtv]|[\x00-\x1f])|(?P<class>\[)|\(\?(?P<flags>[A-Za-z]*)[A-Za-z-]*[:)]|\\.|.",
    re.DOTALL,
)
# A bracket that is the first character of a class belongs to it.
_CLASS_PIECE = re.compile(r"\\.|(?P<begin>\[\^?\]?)|(?P<end>\])|.", re.DOTALL)
# A class of printable characters, without a control character.
_PRINTABLE = re.compile(r"\[[^\^\\\[\]\x00-\x1f][^\\\[\]\x00-\x1f]*\]")
_ESCAPED = '"\\\\'
_CONTROLS = r"\x00-\x09\x0b-\x1f"
# The number of patterns that are remembered, and the length of the longest of them in characters.
_KNOWN_PATTERNS, _KNOWN_CHARACTERS = 1000, 200
# Different classes of a pattern, each of which takes half a millisecond.
_MAX_CLASSES = 200


def narrowed(pattern: str) -> str:
    """Returns a pattern that the library follows: the same one, or one with classes that lack U+0000.

    A pattern that the library refuses stays as it is. Raises `ValueError` for one that cannot be narrowed.
    """
    return _known(pattern) if len(pattern) <= _KNOWN_CHARACTERS else _narrowed(pattern)


class _NotRead(Exception):
    """The library does not read a class."""


def _narrowed(pattern: str) -> str:
    atoms = _atoms(pattern)
    texts = {pattern[begin:end] for begin, end in atoms}
    if len(texts) > _MAX_CLASSES:
        raise ValueError("it has too many classes: write a simpler one")
    try:
        affected = _affected(texts)
    except _NotRead:
        affected = None
    if affected != set() and "regex parse error" in _refusal(pattern):
        return pattern
    if affected is None:
        raise ValueError("its classes are too complex: write simpler ones")
    for begin, end in reversed(atoms):
        if (atom := pattern[begin:end]) in affected:
            pattern = f"{pattern[:begin]}[{atom}--\\x00]{pattern[end:]}"
    return pattern


def _affected(atoms: set[str]) -> set[str]:
    """Returns the atoms that lack `"` or the backslash, if they together match all control characters."""
    if not atoms or not _are_within(_CONTROLS, atoms):
        return set()
    affected = {one for one in atoms if not _are_within(_ESCAPED, {one})}
    return affected if affected == atoms or (affected and _are_within(_CONTROLS, affected)) else set()


_known = lru_cache(_KNOWN_PATTERNS)(_narrowed)


def _atoms(pattern: str) -> list[tuple[int, int]]:
    """Returns the places of what may match a control character, except for the dot, which excludes no other one."""
    found, position = [], 0
    while piece := _PIECE.match(pattern, position):
        begin, position = position, piece.end()
        if "x" in (piece["flags"] or ""):
            raise ValueError("the flag x is not supported: write the pattern without it")
        if piece["class"]:
            position = _class_end(pattern, begin)
        if piece["atom"] or (piece["class"] and not _PRINTABLE.fullmatch(pattern, begin, position)):
            found.append((begin, position))
    return found


def _class_end(pattern: str, position: int) -> int:
    """Returns the end of the class that begins at a position; that of the pattern, which is refused, if it has none."""
    depth = 0
    while piece := _CLASS_PIECE.match(pattern, position):
        position = piece.end()
        depth += bool(piece["begin"]) - bool(piece["end"])
        if not depth:
            break
    return position


def _are_within(characters: str, atoms: set[str]) -> bool:
    """Returns whether each of some characters, as in a class, matches one of the atoms. Raises `_NotRead`."""
    refusal = _refusal(f"^[[{characters}]--[{''.join(sorted(atoms))}]]$")
    if refusal and "Regex is empty" not in refusal:
        raise _NotRead
    return bool(refusal)


def _refusal(pattern: str) -> str:
    source = LLMatcher.grammar_from_lark(f"start: %json {json.dumps({'type': 'string', 'pattern': pattern})}")
    matcher = LLMatcher(_tokenizer(), source, log_level=0, limits=STEP_LIMITS)
    return matcher.get_error() if matcher.is_error() else ""


@cache
def _tokenizer() -> LLTokenizer:
    return byte_tokenizer()
