"""Finds the longest earlier match of a text's end, and proposes the bytes that followed it.

Matches are found as in LZ77 compressors: a table leads from each 4-byte string to its last occurrence, and a second
one from each occurrence to the one before. The method follows Saxena, "Prompt Lookup Decoding" (2023), and Ziv and
Lempel (1977), but works on bytes, so that it needs no tokenizer.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Shorter matches predict almost nothing, and longer ones predict no better.
MIN_MATCH_BYTES = 4
MAX_MATCH_BYTES = 64
MAX_PROPOSAL_BYTES = 256
# The entries of the smallest table. Larger tables have one to two entries for each byte of text.
_MIN_TABLE_ENTRIES = 4096
# The most earlier places that are compared for one match.
_MAX_COMPARED_PLACES = 8
# At least this many new places are indexed as a block; the maximum limits the memory that indexing needs.
_MIN_BLOCK_PLACES, _MAX_BLOCK_PLACES = 256, 1 << 15
# Multiplicative hashing, after Knuth: a hash is the upper bits of the product's lower half.
_HASH_FACTOR = 2654435761


@dataclass(frozen=True)
class Match:
    """States that the last `length` bytes of a text occurred before, and that `data` followed them there."""

    length: int
    data: bytes


class SuffixMatcher:
    """Holds a text and proposes bytes that continue it.

    Time is constant per byte and per proposal; memory is 20 KiB, and 15 bytes for each byte of text, at most. If the
    text exceeds `limit`, rounded down to a power of two, only its last `limit / 2` bytes are kept.
    """

    def __init__(self, text: bytes = b"", limit: int = 1 << 20) -> None:
        self._limit = 1 << (limit.bit_length() - 1)
        self._rebuild(bytearray(text))

    def __len__(self) -> int:
        return len(self._text)

    def append(self, data: bytes | bytearray) -> None:
        """Adds to the end of the text."""
        if len(self._text) + len(data) > len(self._last):  # so rare that the average time per byte stays constant
            self._rebuild(self._text + data)
        else:
            self._text += data
            self._index()

    def cut(self, length: int) -> None:
        """Removes all but the first `length` bytes, in constant time per byte."""
        if length < len(self._text):
            slots = self._slots(length, len(self._text))
            # Of the places removed from a slot, the first one comes last here, and its assignment wins.
            before = np.array(self._before[length:], np.int32)
            np.frombuffer(self._last, np.int32)[slots[::-1]] = before[::-1]
            del self._before[length:], self._text[length:]

    def match(self, ahead: bytes = b"") -> Match | None:
        """Returns the longest match of the text's end followed by `ahead`; a tie goes to the latest.

        If the text ends soon after the match, the proposal is extended by repetition.
        """
        end = (bytes(self._text[-MAX_MATCH_BYTES:]) + ahead)[-MAX_MATCH_BYTES:]
        place = self._last[self._slot(end, len(end))] if len(end) >= MIN_MATCH_BYTES else 0
        length, begin = MIN_MATCH_BYTES - 1, 0
        for _ in range(_MAX_COMPARED_PLACES):
            if place < MIN_MATCH_BYTES:
                break
            limit = min(place, len(end))
            if limit > length and self._text[place - length - 1 : place] == end[-length - 1 :]:
                begin = place
                while length < limit and self._text[place - length - 1] == end[-length - 1]:
                    length += 1
            place = self._before[place]
        if not begin:
            return None
        data = bytes(self._text[begin : begin + MAX_PROPOSAL_BYTES])
        if len(data) < MAX_PROPOSAL_BYTES:
            data += ahead
            data = (data * (MAX_PROPOSAL_BYTES // len(data) + 1))[:MAX_PROPOSAL_BYTES]
        return Match(length, data)

    def _rebuild(self, text: bytearray) -> None:
        # The old tables are freed first, so that memory never holds both.
        self._last = self._before = array("i")
        if len(text) > self._limit:
            forgotten = len(text) - self._limit // 2
            text = text[forgotten:]
        self._text = text
        bits = min(max(_MIN_TABLE_ENTRIES, 2 * len(text)), self._limit).bit_length() - 1
        self._shift = 32 - bits
        # A place is the offset after a 4-byte string. `_last` maps a hash to the last place of a string with that hash,
        # and `_before` maps a place to the one before it; 0 means that there is no such place.
        self._last = array("i", bytes(4 << bits))
        self._before = array("i")
        self._index()

    def _index(self) -> None:
        """Adds the new places to the tables. The end of the text is not a place yet."""
        while len(self._text) - len(self._before) >= _MIN_BLOCK_PLACES:
            self._index_block(len(self._before))
        for end in range(len(self._before), len(self._text)):
            slot = self._slot(self._text, end)
            self._before.append(self._last[slot])
            self._last[slot] = end

    def _index_block(self, first: int) -> None:
        """Adds many places, starting at `first`, with the same result as one by one but many times faster."""
        places = np.arange(first, min(first + _MAX_BLOCK_PLACES, len(self._text)), dtype=np.int32)
        slots = self._slots(first, first + len(places))
        # A stable argsort by slot, several times faster than NumPy's.
        order = np.sort(slots.astype(np.int64) << 32 | np.arange(len(slots))) & 0xFFFFFFFF
        slots, places = slots[order], places[order]
        last = np.frombuffer(self._last, np.int32)
        is_first = np.append(True, slots[1:] != slots[:-1])
        before = np.empty_like(places)
        before[order] = np.where(is_first, last[slots], np.roll(places, 1))
        last[slots] = places  # the last assignment to each slot, its latest place, wins
        self._before.frombytes(before.tobytes())

    def _slots(self, first: int, end: int) -> NDArray[np.uint32]:
        """Returns the slots of the places from `first` to `end`, as `_slot` gives them."""
        # A copy, because a bytearray with a view cannot grow. Zeros fill in for bytes before the start of the text.
        data = self._text[max(first - MIN_MATCH_BYTES, 0) : end - 1]
        padded = np.frombuffer(data.rjust(end - first + MIN_MATCH_BYTES - 1, b"\0"), np.uint8).astype(np.uint32)
        strings = padded[:-3] << 24 | padded[1:-2] << 16 | padded[2:-1] << 8 | padded[3:]
        slots: NDArray[np.uint32] = np.right_shift(strings * np.uint32(_HASH_FACTOR), np.uint32(self._shift))
        return slots

    def _slot(self, text: bytes | bytearray, end: int) -> int:
        string = int.from_bytes(text[max(end - MIN_MATCH_BYTES, 0) : end])
        return (string * _HASH_FACTOR & 0xFFFFFFFF) >> self._shift
