"""Caches encoded prompts, so that a prompt that begins like an earlier one is encoded only from where it differs.

The prompts are sorted, so the one with the longest common prefix is next to the position of the text that is looked up.
"""

import sys
import threading
from array import array
from bisect import bisect_left, insort

from cachetools import LRUCache

from bridge.text.common_prefix import common_prefix_length
from bridge.text.seams import Tokens

# The memory of an entry without its text and tokens, measured with tracemalloc.
_ENTRY_BYTES = 500


class PrefixCache:
    """Holds the most recently used prompts, in at most `limit_bytes` of memory. It is thread-safe.

    `query_byte_count` counts the bytes of text looked up, `hit_byte_count` those of them that an earlier prompt shared.
    """

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._prompts: LRUCache[bytes, tuple[int, Tokens]] = LRUCache(limit_bytes, lambda entry: entry[0])
        self._sorted: list[bytes] = []
        self._lock = threading.Lock()
        self.query_byte_count = self.hit_byte_count = 0

    def find(self, text: bytes, salt: bytes) -> tuple[Tokens, int]:
        """Returns the tokens of the prompt with the longest common prefix with `text`, and its length in bytes.

        `salt` distinguishes ways to encode the same text; no salt may be a prefix of another.
        """
        key = salt + text
        with self._lock:
            place = bisect_left(self._sorted, key)
            neighbours = self._sorted[max(place - 1, 0) : place + 1]
            common, nearest = max(((common_prefix_length(key, other), other) for other in neighbours), default=(0, b""))
            common = max(common - len(salt), 0)
            self.query_byte_count += len(text)
            self.hit_byte_count += common
            return (self._prompts[nearest][1], common) if common else (Tokens(), 0)

    def keep(self, text: bytes, salt: bytes, known: Tokens, count: int, tokens: Tokens) -> None:
        """Stores a prompt, whose tokens are the first `count` of `known`, followed by `tokens`."""
        key = salt + text
        # Arrays take an eighth of the memory of lists.
        head = array("I", known.ids[:count]), array("I", known.ends[:count]), bytearray(known.boundaries[:count])
        packed = Tokens(*head, known.end(count))
        packed.add(tokens)
        size = _ENTRY_BYTES + sum(map(sys.getsizeof, (key, packed.ids, packed.ends, packed.boundaries)))
        with self._lock:
            if key in self._prompts or size > self._prompts.maxsize:
                return
            place = bisect_left(self._sorted, key)
            if place and key.startswith(self._sorted[place - 1]):  # the new prompt makes its own prefix superfluous
                del self._prompts[self._sorted.pop(place - 1)]
            while self._prompts.currsize + size > self._prompts.maxsize:
                oldest, _ = self._prompts.popitem()
                del self._sorted[bisect_left(self._sorted, oldest)]
            insort(self._sorted, key)
            self._prompts[key] = size, packed

    @property
    def prompt_count(self) -> int:
        """Returns the number of prompts held."""
        return len(self._prompts)

    @property
    def held_byte_count(self) -> int:
        """Returns the bytes of memory that the prompts take."""
        return int(self._prompts.currsize)
