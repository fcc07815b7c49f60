"""Where a text may be taken apart so that its parts have the tokens that the whole has.

A seam is a boundary between tokens over which nothing that stands on one side has any part in how the other is
encoded. What is behind a seam can be encoded again by itself, and what is before it need not be.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from bridge import tokenizer_json as spec_of
from bridge.token_table import TokenTable

# A boundary between tokens is final once this many bytes stand behind it. Pre-tokenizers look
# ahead by a few characters (a contraction, a group of digits); runs that they look at whole are treated apart.
_LOOKAHEAD_BYTES = 32
# How far back a seam is looked for before a boundary inside a word is taken.
_NEAR_TOKENS = 48
# Pre-tokenizers that find their cuts by the characters there, wherever the text began.
_CUTTING_AS_THEY_GO = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}
# How many tokens behind a boundary are looked at again, and how near to the end of what was known they may change.
_AFTER = 8
_UNSURE_BYTES = 12
# Letters that patterns keep together: they tell only large ones from the others.
_LETTERS = ("Lo", "Lm", "Ll")
# Pairs of tokens that are remembered.
_MOST_PAIRS = 1 << 14


@dataclass
class Tokens:
    """Tokens of consecutive texts.

    `ends[i]`: offset in them, in bytes, behind token i. `seams[i]`: whether that is a seam. `exact`: the tokens'
    bytes are exactly those of the texts.
    """

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    seams: list[bool] = field(default_factory=list)
    exact: bool = True

    def add(self, more: "Tokens", position: int) -> None:
        """Appends the tokens of a text that begins at `position`."""
        self.ids += more.ids
        self.ends += [position + end for end in more.ends] if position else more.ends
        self.seams += more.seams
        self.exact &= more.exact

    def cut(self, count: int) -> None:
        """Leaves the first `count`."""
        del self.ids[count:], self.ends[count:], self.seams[count:]

    def end(self, count: int, otherwise: int = 0) -> int:
        """The offset behind the first `count`."""
        return self.ends[count - 1] if count else otherwise


class Seams:
    """The seams of one tokenizer's texts. `leaves_words_alone`: it puts nothing in front of a part of a word."""

    def __init__(self, spec: Mapping[str, Any], table: TokenTable, leaves_words_alone: bool) -> None:
        self._table = table
        self._splits_by_context = spec_of.splits_by_context(spec)
        self._changes_characters = spec_of.changes_characters(spec)
        self._merges = spec["model"].get("type", "BPE") == "BPE"
        kinds = {part["type"] for part in spec_of.components(spec.get("pre_tokenizer"))}
        self._cuts_words = self._merges and kinds <= _CUTTING_AS_THEY_GO and leaves_words_alone
        # Added tokens that must stand alone, and those that a normalizer puts a space before as it does before a text:
        # where a text is cut decides which of them are found in it.
        prepends = any(part["type"] == "Prepend" for part in spec_of.components(spec.get("normalizer")))
        added = table.added.values()
        self._never = any(token.single_word or (prepends and token.normalized) for token in added)
        # Longer than any added token that a text may be about to spell.
        self._lookahead = max([_LOOKAHEAD_BYTES, *(len(token.content.encode()) for token in added)])
        # A plain dictionary, each step of which threads may take at once.
        self._pairs: dict[tuple[int, int], bool] = {}

    def of(self, ids: list[int], words: list[int | None]) -> list[bool]:
        """Whether there is one behind each of `ids`; `words`: the words that the library found them in."""
        if self._splits_by_context or not self._merges:
            # The rest of a word, taken by itself, may be split in another way, or be another one of equal score.
            seams = [left != right for left, right in pairwise(words)]
        else:
            pairs = zip(pairwise(words), pairwise(ids), strict=True)
            seams = [a != b or self._separable(left, right) for (a, b), (left, right) in pairs]
        if None in words:  # added tokens are no words
            seams = [seam or words[i] is None or words[i + 1] is None for i, seam in enumerate(seams)]
        return [*seams, True] if ids else []

    def lasting(self, before: str, after: str) -> bool:
        """Whether a seam between these two characters stays one, whatever follows the `_lookahead` bytes behind it.

        Not inside a run that pre-tokenizers look at whole, and not where a normalizer may join the two.
        """
        if not before or not after:
            return True  # a byte that is no part of a character
        if before.isspace() and after.isspace():
            return False
        if self._splits_by_context and _same_run(before, after):
            return False
        return not self._changes_characters or _stands_alone(before, after)

    def settled(self, data: bytes | bytearray, tokens: Tokens, known: int) -> int:
        """How many `tokens` of `data` are the same whatever stands behind its first `known` bytes.

        Where the last of them is inside a word, what comes must be looked at: see `follows`.
        """
        if self._never:
            return 0
        count = bisect_right(tokens.ends, known - self._lookahead)
        # A space in front of the text is by itself no beginning that could be settled.
        least = bisect_right(tokens.ends, 0)
        near = range(count, max(count - _NEAR_TOKENS, least), -1)
        for found in near:
            if tokens.seams[found - 1] and self.lasting(*_around(data, tokens.ends[found - 1])):
                return found
        for found in near if self._cuts_words else ():
            pair = tokens.ids[found - 1 : found + 1]
            if self._inside_word(data, tokens.ends[found - 1]) and len(pair) == 2 and self._joins(*pair):
                return found
        for found in range(count - len(near), least, -1):
            if tokens.seams[found - 1] and self.lasting(*_around(data, tokens.ends[found - 1])):
                return found
        return 0

    def after(self, tokens: Tokens, count: int, known: int) -> tuple[int, ...]:
        """What stands behind the first `count`, as far as `known` bytes decide it; see `follows`."""
        return tuple(tokens.ids[count : min(bisect_right(tokens.ends, known - _UNSURE_BYTES), count + _AFTER)])

    def follows(
        self, data: bytes | bytearray, position: int, last: int, ids: Sequence[int], after: Sequence[int]
    ) -> bool:
        """Whether `ids`, for what is behind `position`, may stand behind the token `last`, encoded without them.

        `after`: what stood there when `last` was settled, and must again.
        """
        if list(ids[: len(after)]) != list(after):
            return False
        if not (ids and self._cuts_words and self._inside_word(data, position)):
            return True
        return (not self._splits_by_context and self._separable(last, ids[0])) or self._joins(last, ids[0])

    def warm(self) -> None:
        """Computes now what the first use would."""
        if not self._splits_by_context:
            _ = self._neighbours

    def _joins(self, left: int, right: int) -> bool:
        """Whether two tokens may stand side by side in a text.

        What is encoded apart may be put together where the two tokens that meet come out of their own bytes. In BPE
        a sequence is a text's encoding if and only if every two neighbours in it are (van Antwerpen and Neubeck, "So
        many tokens, so little time", GitHub Blog, December 2024).
        """
        joins = self._pairs.get((left, right))
        if joins is None:
            joins = self._table.model_ids(left, right) == [left, right]
            if len(self._pairs) >= _MOST_PAIRS:
                self._pairs.clear()
            self._pairs[left, right] = joins
        return joins

    def _separable(self, left: int, right: int) -> bool:
        """Inside a word: no token holds the bytes that meet here side by side, so the two never become one."""
        if self._table.unknown in (left, right):
            return False  # unknown characters in a row can be one token
        before, after = self._table.token_bytes(left), self._table.token_bytes(right)
        return not before or not after or (before[-1] << 8 | after[0]) not in self._neighbours

    @cached_property
    def _neighbours(self) -> frozenset[int]:
        """Every two bytes that stand side by side inside some token."""
        found: set[int] = set()
        for data in self._table.tokens:
            found.update(a << 8 | b for a, b in pairwise(data or b""))
        return frozenset(found)

    def _inside_word(self, data: bytes | bytearray, offset: int) -> bool:
        """Whether pre-tokenizers take both sides of a cut here as they take the whole, as parts of one word."""
        before, after = _around(data, offset)
        if not before or not after or before.isspace() or after.isspace():
            return False
        if not self._splits_by_context:
            return True
        left, right = unicodedata.category(before), unicodedata.category(after)
        return left == right == "Lu" or (left in (*_LETTERS, "Mn", "Mc") and right in _LETTERS)


def _around(data: bytes | bytearray, offset: int) -> tuple[str, str]:
    """The characters before and behind an offset, empty where there is none; spaces where it is inside of one."""
    if 0 < offset < len(data) and data[offset] & 0xC0 == 0x80:
        return " ", " "
    before = data[max(offset - 4, 0) : offset].decode(errors="ignore")
    after = data[offset : offset + 4].decode(errors="ignore")
    return before[-1:], after[:1]


def _same_run(before: str, after: str) -> bool:
    """Two letters, or marks on them, or two digits."""
    kinds = {unicodedata.category(character)[0] for character in (before, after)}
    return kinds <= {"L", "M"} or kinds == {"N"}


def _stands_alone(before: str, after: str) -> bool:
    """Whether no Unicode normalization joins or reorders the two."""
    extends = unicodedata.combining(after) != 0 or unicodedata.category(after) in ("Mn", "Mc", "Me", "Cf")
    return not extends and unicodedata.is_normalized("NFC", before + after)
