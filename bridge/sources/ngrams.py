"""Learns from outputs which token mostly follows each few tokens, in a fixed amount of memory.

Compression by partial matching keeps such counts, too: Cleary and Witten, "Data Compression Using Adaptive Coding and
Partial String Matching" (1984).
"""

from array import array
from collections.abc import Hashable, Sequence

from cachetools import LRUCache

# The numbers of tokens that a next token is learned for. Long ones tell repeated outputs apart, in which short ones
# often recur.
_LENGTHS = (1, 2, 4, 8)
MAX_LENGTH = _LENGTHS[-1]
# The entries of a table, a power of two, and the bytes of each: a hash, a token and two counts.
_ENTRIES, _ENTRY_BYTES = 1 << 15, 14
TABLE_BYTES = _ENTRIES * _ENTRY_BYTES
_MAX_COUNT = 255


def confidence(length: int, right: int, wrong: int) -> float:
    """Returns the chance of the token that followed `length` tokens `right` times, and others `wrong` times.

    Fitted to 29,000 tokens of Gemma-3-270M and Qwen2.5-Coder-1.5B, and rounded.
    """
    odds: float = 0.22 * right * (length / (wrong + 1)) ** 1.5
    return odds / (1 + odds)


class NgramTable:
    """Holds the token that mostly follows each n-gram, and how often it and others did, in `TABLE_BYTES` of memory.

    Where two n-grams need the same entry, the one that occurs more often keeps it.
    """

    def __init__(self) -> None:
        self._hashes = array("q", [0]) * _ENTRIES
        self._tokens = array("i", [0]) * _ENTRIES
        self._right, self._wrong = bytearray(_ENTRIES), bytearray(_ENTRIES)

    def learn(self, token_ids: Sequence[int], begin: int) -> None:
        """Learns the tokens from index `begin` on, each after those before it."""
        for index in range(begin, len(token_ids)):
            for length in _LENGTHS:
                if length > index:
                    break
                self._learn(hash(tuple(token_ids[index - length : index])), token_ids[index])

    def following(self, token_ids: Sequence[int]) -> tuple[int, float] | None:
        """Returns the token that followed the longest known end of `token_ids`, and its chance; None if none did."""
        for length in reversed(_LENGTHS):
            if length <= len(token_ids):
                hash_ = hash(tuple(token_ids[-length:]))
                at = hash_ % _ENTRIES
                if self._hashes[at] == hash_ and self._right[at]:
                    return self._tokens[at], confidence(length, self._right[at], self._wrong[at])
        return None

    def _learn(self, hash_: int, id_: int) -> None:
        at = hash_ % _ENTRIES
        right, wrong = self._right[at], self._wrong[at]
        if self._hashes[at] != hash_:
            if right > 1:  # another n-gram's entry, which is lost only after some time
                self._right[at] = right - 1
                return
            self._hashes[at], self._tokens[at], self._right[at], self._wrong[at] = hash_, id_, 1, 0
        elif self._tokens[at] == id_:
            self._right[at] = min(right + 1, _MAX_COUNT)
        elif wrong < right:
            self._wrong[at] = wrong + 1
        else:
            self._tokens[at], self._right[at], self._wrong[at] = id_, 1, right


class NgramMemory:
    """Keeps a table for each tenant and tokenizer, in at most `byte_limit` bytes altogether.

    The least recently used is forgotten first. Not thread-safe: all requests must use it from one thread.
    """

    def __init__(self, byte_limit: int) -> None:
        self.byte_limit = byte_limit
        self._tables: LRUCache[tuple[Hashable, str], NgramTable] = LRUCache(byte_limit // TABLE_BYTES)

    @property
    def byte_count(self) -> int:
        """Returns the memory of all tables."""
        return len(self._tables) * TABLE_BYTES

    @property
    def tenant_count(self) -> int:
        """Returns the number of tenants with tables."""
        return len({tenant for tenant, _ in self._tables})

    def open(self, tenant: Hashable, tokenizer: str) -> NgramTable:
        """Returns a tenant's table for a tokenizer, named by its checksum. Another may be forgotten for a new one."""
        found = self._tables.get((tenant, tokenizer))
        if found is None:
            self._tables[tenant, tokenizer] = found = NgramTable()
        return found
