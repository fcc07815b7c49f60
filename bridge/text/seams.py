"""Finds where a text can be split so that its parts, encoded separately, give the same tokens as the whole.

A text that grows, or that begins like an earlier one, is encoded only from the last such place before its new part.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field
from enum import IntEnum

from bridge.text.token_table import TokenTable
from bridge.text.tokenizer_json import Spec, changes_characters, components, splits_by_context

# A boundary is final once this many bytes follow it. Pre-tokenizers look ahead by a few characters (a contraction, a
# group of digits); `lasts` rules out boundaries inside runs that they match as a whole.
_LOOKAHEAD_BYTES = 32
# After a boundary, this many tokens must be the same as before, except those that end this close to the new bytes.
_COMPARED_TOKENS = 8
_UNDECIDED_BYTES = 12
# Pre-tokenizers whose splits depend on the characters around them, not on where the text began.
_LOCAL_PRE_TOKENIZERS = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}
# Letters that split patterns keep together: the patterns distinguish only capital letters from others.
_LETTERS = ("Lo", "Lm", "Ll")


class Boundary(IntEnum):
    """States whether a text may be split between two tokens."""

    CLOSED = 0  # the text must not be split here, because nothing is known of the boundary
    SEAM = 1  # the encoding of either side does not depend on the other
    IN_WORD = 2  # both tokens belong to one word


@dataclass
class Tokens:
    """The tokens of a text: `ends[i]` is the offset in bytes after token i, `boundaries[i]` the `Boundary` there.

    `consumed` is the number of bytes that were encoded.
    """

    ids: MutableSequence[int] = field(default_factory=list)
    ends: MutableSequence[int] = field(default_factory=list)
    boundaries: MutableSequence[int] = field(default_factory=list)
    consumed: int = 0

    def add(self, more: "Tokens") -> None:
        """Appends the tokens of the text that follows this one."""
        self.ids.extend(more.ids)
        self.ends.extend([self.consumed + end for end in more.ends] if self.consumed else more.ends)
        self.boundaries.extend(more.boundaries)
        self.consumed += more.consumed

    def end(self, count: int) -> int:
        """Returns the offset in bytes after the first `count` tokens."""
        return self.ends[count - 1] if count else 0

    def cut(self, count: int) -> None:
        """Drops all but the first `count` tokens."""
        self.consumed = self.end(count)
        del self.ids[count:], self.ends[count:], self.boundaries[count:]


class Seams:
    """Finds where texts can be split for one tokenizer.

    `adds_to_words`: the tokenizer adds bytes to a part of a word that is encoded separately.
    """

    def __init__(self, spec: Spec, table: TokenTable, adds_to_words: bool) -> None:
        self._splits_by_context = splits_by_context(spec)
        self._changes_characters = changes_characters(spec)
        pre_tokenizers = {part["type"] for part in components(spec.get("pre_tokenizer"))}
        is_bpe = spec["model"].get("type", "BPE") == "BPE"
        self._cuts_words = is_bpe and pre_tokenizers <= _LOCAL_PRE_TOKENIZERS and not adds_to_words
        # Some added tokens are found or not depending on where a text begins: those that must stand alone as words, and
        # those that a normalizer puts the same space before as before a text. With these, no boundary is ever final.
        prepends = any(part["type"] == "Prepend" for part in components(spec.get("normalizer")))
        added = table.added.values()
        self.never_final = any(token.single_word or (prepends and token.normalized) for token in added)
        # At least the length of the longest added token, which may begin at the end of a text.
        self._lookahead = max([_LOOKAHEAD_BYTES, *(len(token.content.encode()) for token in added)])

    def reuse(
        self, data: bytes | bytearray, known: Tokens, common: int, encode: Callable[[int], Tokens]
    ) -> tuple[int, Tokens]:
        """Returns the number of `known` tokens to keep, and the tokens of `data` that follow them.

        The first `common` bytes of `data` are those of a text with the tokens `known`. `encode` encodes `data` from an
        offset to the end.
        """
        count = self.settled(data, known, common)
        tokens = encode(known.end(count))
        # The next tokens must be the same as before, except those that new bytes may change (in a word, at least one).
        in_word = count > 0 and known.boundaries[count - 1] == Boundary.IN_WORD
        decided = min(bisect_right(known.ends, common - _UNDECIDED_BYTES), count + _COMPARED_TOKENS)
        expected = list(known.ids[count : max(decided, count + in_word)])
        if count and tokens.ids[: len(expected)] != expected:
            return 0, encode(0)
        return count, tokens

    def settled(self, data: bytes | bytearray, tokens: Tokens, known: int) -> int:
        """Returns how many of the tokens of `data` remain the same whatever follows its first `known` bytes."""
        if self.never_final:
            return 0
        ends = tokens.ends
        count = min(bisect_right(ends, known - self._lookahead), bisect_right(ends, known) - _COMPARED_TOKENS)
        # The tokens of a dummy space, which end at offset 0, are settled only together with text.
        first = bisect_right(ends, 0)
        return next((found for found in range(count, first, -1) if self._may_split(data, tokens, found)), 0)

    def _may_split(self, data: bytes | bytearray, tokens: Tokens, count: int) -> bool:
        """Returns whether the text may be encoded in two parts, of which the first has `count` tokens.

        In BPE, a sequence of tokens is the encoding of a word if and only if each pair of neighbours is the encoding of
        the pair's text (van Antwerpen and Neubeck, "So many tokens, so little time", GitHub Blog, December 2024). So a
        word may be split between two tokens that both reappear, if pre-tokenizers treat each part as a word.
        """
        boundary = tokens.boundaries[count - 1]
        before, after = _characters_around(data, tokens.ends[count - 1])
        if boundary == Boundary.SEAM:
            return self.lasts(before, after)
        if boundary == Boundary.CLOSED or not self._cuts_words:
            return False
        if not self._splits_by_context:
            return self.lasts(before, after)
        left, right = unicodedata.category(before), unicodedata.category(after)
        return left == right == "Lu" or (left in (*_LETTERS, "Mn", "Mc") and right in _LETTERS)

    def lasts(self, before: str, after: str) -> bool:
        """Returns whether a seam between two characters remains a seam whatever follows the lookahead.

        It does not inside a run that pre-tokenizers match as a whole, or where a normalizer may join the two.
        """
        if not before or not after:
            return True  # there is no character on one side
        if before.isspace() and after.isspace():
            return False
        if self._splits_by_context and _same_run(before, after):
            return False
        return not self._changes_characters or _stands_alone(before, after)


def _characters_around(data: bytes | bytearray, offset: int) -> tuple[str, str]:
    """Returns the characters before and after an offset: empty if there is none, two spaces inside a character."""
    if 0 < offset < len(data) and data[offset] & 0xC0 == 0x80:
        return " ", " "
    before = data[max(offset - 4, 0) : offset].decode(errors="ignore")
    after = data[offset : offset + 4].decode(errors="ignore")
    return before[-1:], after[:1]


def _same_run(before: str, after: str) -> bool:
    """Returns whether both are letters or marks, or both are numbers."""
    kinds = {unicodedata.category(character)[0] for character in (before, after)}
    return kinds <= {"L", "M"} or kinds == {"N"}


def _stands_alone(before: str, after: str) -> bool:
    """Returns whether no Unicode normalization joins or reorders the two characters."""
    extends = unicodedata.combining(after) != 0 or unicodedata.category(after) in ("Mn", "Mc", "Me", "Cf")
    return not extends and unicodedata.is_normalized("NFC", before + after)
