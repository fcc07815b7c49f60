"""A draft without a model: how a text went on where it said the same before.

The longest match of the text's end among its own earlier bytes, found as LZ77 compressors find theirs: a table of short
strings leads to where each stood last, and from there to where it stood before. After Saxena, "Prompt Lookup Decoding"
(2023), and Ziv and Lempel (1977); on bytes, so that it knows no tokenizer.
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

# A match has at least so many bytes; shorter ones say next to nothing.
LEAST = 4
# Longer ones are not told apart.
MOST = 64
# Bytes that a match proposes.
MOST_DATA = 256
# Entries of the smallest table; it has one for every byte at least, and two at most.
_SMALLEST = 4096
# Earlier places that are looked at for one match.
_PLACES = 8
# Places that are worth entering all at once, and the most that are, so that what it takes meanwhile is bounded.
_MANY, _BLOCK = 256, 1 << 15
# Multiplicative hashing, after Knuth: the upper bits of the product's lower half.
_HASH = 2654435761


@dataclass(frozen=True)
class Match:
    """The last `length` bytes of the text stood before; `data` is what followed there."""

    length: int
    data: bytes


def most_bytes(length: int) -> int:
    """The most memory that a drafter takes for so many bytes of text."""
    return 15 * length + (20 << 10)


class SuffixDrafter:
    """Knows a text and proposes bytes to go on with.

    Takes constant time for a byte, and for a proposal; for memory see `most_bytes`. Of a text of more than `limit`
    bytes the earlier part is forgotten, half of it at a time; the limit is taken as the power of two below.
    """

    def __init__(self, text: bytes = b"", limit: int = 1 << 20) -> None:
        self._limit = 1 << (limit.bit_length() - 1)
        # Where each of its texts begins, see `part`.
        self._starts = array("i", [0])
        self._begin(bytearray(text))

    @property
    def length(self) -> int:
        """Bytes of text that it knows."""
        return len(self._text)

    def append(self, data: bytes | bytearray) -> None:
        """Adds to the text's end."""
        if len(self._text) + len(data) > len(self._last):  # so seldom that it costs no byte more than a few others do
            self._begin(self._text + data)
        else:
            self._text += data
            self._read()

    def cut(self, length: int) -> None:
        """Takes back all but the first `length` bytes, in constant time for each."""
        for end in reversed(range(length, len(self._text))):
            self._last[self._slot(self._text, end)] = self._before.pop()
        del self._text[length:]

    def part(self) -> None:
        """Begins another text: no match is of both, and what one is followed by is not the other."""
        if len(self._text) > self._starts[-1]:
            self._starts.append(len(self._text))

    def match(self, ahead: bytes = b"") -> Match | None:
        """The longest match of the text's end with `ahead` behind it, of equals the latest; None if there is none.

        Where the text ends behind it, the text is taken to repeat itself.
        """
        found = self._longest((self.end + ahead)[-MOST:])
        if found is None:
            return None
        data = found.data if len(found.data) == MOST_DATA else found.data + ahead
        return Match(found.length, (data * (MOST_DATA // len(data) + 1))[:MOST_DATA])

    def match_of(self, end: bytes) -> Match | None:
        """The longest match of another text's end. Where what it stood in ends, so does the data."""
        return self._longest(end[-MOST:])

    @property
    def end(self) -> bytes:
        """As much of the text's end as a match can have."""
        return bytes(self._text[-MOST:])

    def _longest(self, end: bytes) -> Match | None:
        place = self._last[self._slot(end, len(end))] if len(end) >= LEAST else 0
        best, data = LEAST - 1, slice(0)
        for _ in range(_PLACES):
            if place < LEAST:
                break
            index = bisect_right(self._starts, place)
            if (length := self._common(place, end, place - self._starts[index - 1])) > best:
                stop = self._starts[index] if index < len(self._starts) else len(self._text)
                best, data = length, slice(place, min(place + MOST_DATA, stop))
            place = self._before[place]
        return Match(best, bytes(self._text[data])) if best >= LEAST else None

    def _begin(self, text: bytearray) -> None:
        # What it had goes first, so that it is never held twice.
        self._last = self._before = array("i")
        if len(text) > self._limit:
            forgotten = len(text) - self._limit // 2
            text = text[forgotten:]
            self._starts = array("i", [0, *(start - forgotten for start in self._starts if start > forgotten)])
        self._text = text
        bits = min(max(_SMALLEST, 2 * len(text)), self._limit).bit_length() - 1
        self._shift = 32 - bits
        # By a hash of a short string where it ended last, and by place where one of that hash ended before; 0 where
        # there is none.
        self._last = array("i", bytes(4 << bits))
        self._before = array("i")
        self._read()

    def _read(self) -> None:
        """Enters the places that are new. The end itself is no earlier place."""
        while len(self._text) - len(self._before) >= _MANY:
            self._read_block()
        for end in range(len(self._before), len(self._text)):
            slot = self._slot(self._text, end)
            self._before.append(self._last[slot])
            self._last[slot] = end

    def _read_block(self) -> None:
        """The same as place by place, many times faster."""
        first = len(self._before)
        places = np.arange(first, min(first + _BLOCK, len(self._text)), dtype=np.int32)
        begin = max(first - LEAST, 0)
        # A copy: a view would keep the text from growing. In front of a short text's beginning there are zeros.
        data = bytes(LEAST - (first - begin)) + self._text[begin : places[-1]]
        strings = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), LEAST)
        hashes = np.ascontiguousarray(strings).view(">u4")[:, 0].astype(np.uint32) * np.uint32(_HASH)
        slots = hashes >> np.uint32(self._shift)
        # As a stable argsort, and several times faster.
        order = np.sort(slots.astype(np.int64) << 32 | np.arange(len(slots))) & 0xFFFFFFFF
        slots, places = slots[order], places[order]
        last = np.frombuffer(self._last, np.int32)
        new = np.append(True, slots[1:] != slots[:-1])
        before = np.empty_like(places)
        before[order] = np.where(new, last[slots], np.roll(places, 1))
        last[slots] = places  # of several for one slot, the latest stays
        self._before.frombytes(before.tobytes())

    def _slot(self, text: bytes | bytearray, end: int) -> int:
        return (int.from_bytes(text[max(end - LEAST, 0) : end]) * _HASH & 0xFFFFFFFF) >> self._shift

    def _common(self, place: int, end: bytes, most: int) -> int:
        """How many bytes before a place are those of `end`, `most` at most."""
        low, high = 0, min(most, len(end))
        while low < high:
            middle = (low + high + 1) // 2
            if self._text[place - middle : place - low] == end[len(end) - middle : len(end) - low]:
                low = middle
            else:
                high = middle - 1
        return low
