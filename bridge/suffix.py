"""A draft without a model: how a text went on where it said the same before.

The longest match of the text's end among its own earlier bytes, found as LZ77 compressors find theirs: a table of short
strings leads to where each stood last, and from there to where it stood before. After Saxena, "Prompt Lookup Decoding"
(2023), and Ziv and Lempel (1977); on bytes, so that it knows no tokenizer.
"""

from array import array
from dataclasses import dataclass

# A match has at least so many bytes; shorter ones say next to nothing.
LEAST = 4
# Longer ones are not told apart.
MOST = 64
# Bytes that a match proposes.
_DATA = 256
# Entries of the smallest table; it has one for every byte at least.
_SMALLEST = 4096
# Earlier places that are looked at for one match.
_PLACES = 8


@dataclass(frozen=True)
class Match:
    """The last `length` bytes of the text stood before; `data` is what followed there."""

    length: int
    data: bytes


class SuffixDrafter:
    """Knows a text and proposes bytes to go on with.

    Takes constant time for a byte, and for a proposal; at most 21 bytes of memory for a byte, and 18 KiB. Of a text of
    more than `limit` bytes the earlier part is forgotten.
    """

    def __init__(self, text: bytes = b"", limit: int = 1 << 20) -> None:
        self._limit = limit
        self._begin(bytearray(text))

    def append(self, data: bytes | bytearray) -> None:
        """Adds to the text's end."""
        if len(self._text) + len(data) > len(self._last):  # so seldom that it costs no byte more than a few others do
            self._begin(self._text + data)
        else:
            self._text += data
            self._read()

    def match(self) -> Match | None:
        """The longest match of the text's end, of equals the latest; None if there is none.

        Where the text ends behind it, the text is taken to repeat itself.
        """
        text, end = self._text, len(self._text)
        place = self._last[self._slot(end)] if end >= LEAST else 0
        best, start = LEAST - 1, 0
        for _ in range(_PLACES):
            if place < LEAST:
                break
            if (length := self._common(place, end)) > best:
                best, start = length, place
            place = self._before[place]
        if best < LEAST:
            return None
        data = bytes(text[start : start + _DATA])
        return Match(best, (data * (_DATA // len(data) + 1))[:_DATA])

    def _begin(self, text: bytearray) -> None:
        if len(text) > self._limit:
            text = text[-self._limit // 2 :]
        self._text = text
        bits = (min(max(_SMALLEST, 2 * len(text)), self._limit) - 1).bit_length()
        self._shift = 32 - bits
        # By a hash of a short string where it ended last, and by place where one of that hash ended before; 0 where
        # there is none.
        self._last = array("i", bytes(4 << bits))
        self._before = array("i")
        self._read()

    def _read(self) -> None:
        # The end itself is no earlier place.
        for end in range(len(self._before), len(self._text)):
            slot = self._slot(end)
            self._before.append(self._last[slot])
            self._last[slot] = end

    def _slot(self, end: int) -> int:
        # Multiplicative hashing, after Knuth: the upper bits of the product's lower half.
        return (int.from_bytes(self._text[max(end - LEAST, 0) : end]) * 2654435761 & 0xFFFFFFFF) >> self._shift

    def _common(self, place: int, end: int) -> int:
        """How many bytes before two places are the same, as far as they are counted."""
        low, high = 0, min(place, MOST)
        while low < high:
            middle = (low + high + 1) // 2
            if self._text[place - middle : place - low] == self._text[end - middle : end - low]:
                low = middle
            else:
                high = middle - 1
        return low
