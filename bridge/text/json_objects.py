"""Reads JSON objects that users send as text, and checks those that another parser has read."""

import json
import sys
from typing import Any

import numpy as np

from bridge.errors import InvalidField

# Levels of objects and lists. Recursive functions, also those of templates, can handle more.
MAX_DEPTH = 32

# For `count_marks`: what begins a number becomes 0, and everything but that, quotes and marks is left out.
_NUMBERS = bytes.maketrans(b"-123456789", b"0" * 10)
_OTHERS = bytes(set(range(256)) - set(b'",[{-0123456789'))


def count_marks(text: bytes) -> tuple[int, int]:
    """Returns the number of commas before a number, and of other commas, [ and {, outside of a JSON text's strings.

    Parsing lets no other thread run, and its time grows with these numbers. Counting takes milliseconds per MiB.
    """
    # A quote after a backslash does not end a string, unless a backslash before that makes it a mere character.
    left = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(_NUMBERS, _OTHERS)
    symbols = np.frombuffer(left, np.uint8)
    outside = ~np.logical_xor.accumulate(symbols == ord('"'))
    commas = outside & (symbols == ord(","))
    number_count = np.count_nonzero(commas[:-1] & (symbols[1:] == ord("0")))
    bracket_count = np.count_nonzero(outside & ((symbols == ord("[")) | (symbols == ord("{"))))
    return int(number_count), int(np.count_nonzero(commas) - number_count + bracket_count)


def read_object(field: str, text: str) -> dict[str, Any]:
    """Returns the object with its keys in order. Raises `InvalidField` if the text is not one that can be used."""
    try:
        # The time for reading an integer grows with the square of its length. What is cut is still beyond all doubles.
        value = json.loads(text, object_pairs_hook=_unique, parse_int=lambda digits: int(digits[:400]))
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        check_object(value)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates, which no text has
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, f"the text of a JSON object ({error})") from None
    return value


def check_object(value: dict[str, Any], max_depth: int = MAX_DEPTH) -> None:
    """Raises `ValueError` for an object that is nested too deeply, or has a number beyond doubles."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        if not all(abs(item) <= sys.float_info.max for item in inner if isinstance(item, int | float)):
            raise ValueError("it has a number that is not finite, or beyond 1.8e308")
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {max_depth} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object in it has a key twice")
    return value
