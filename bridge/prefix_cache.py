"""What a tokenizer made of the beginnings of texts, so that a beginning seen before is not encoded again.

Texts are cut into blocks, short ones first, long ones far behind: never more than an eighth of what is before
them, so that little of a common beginning is missed and few of them cover a long text. A block's key is a
digest of the text up to its end, so that it is found only behind the very same beginning (as vLLM's automatic
prefix caching does with KV blocks). Its value are the tokens that the text up to there settles for good,
whatever follows. What came last behind a block, less than a block long, is kept as its tail: a conversation
goes on from there. What two such had in common is kept as its branch: requests with one system prompt do.
"""

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

_SHORTEST_BLOCK_BYTES = 256
_DIGEST_BYTES = 16
# Measured with tracemalloc: digest, array, block and the cache's own entry, beside the ids themselves.
_ENTRY_BYTES = 700


@dataclass(frozen=True)
class Block:
    """Ids that stand for the text from `start` to `settled`, in bytes, and are the same whatever follows.

    It goes with the blocks before it only if those end where it starts: one that was lost and made again may end
    elsewhere. `after`: ids that followed, which must come out again where a text goes on from here. `text`: for a
    tail or a branch, what is behind the last whole block, by which it was settled.
    """

    ids: NDArray[np.uint32]
    start: int
    settled: int
    after: tuple[int, ...] = ()
    text: bytes = b""

    @property
    def byte_count(self) -> int:
        """Bytes of memory, near enough."""
        return _ENTRY_BYTES + self.ids.nbytes + len(self.text) + 40 * len(self.after)


@dataclass
class Known:
    """The longest beginning of a text that was found, and where to go on from.

    `ids` stand for the first `position` bytes; `token_count` of them, for the first `start`, are of whole blocks, the
    others of a tail or a branch. `after` must be the first of those that follow. `block_end`: where those whole
    blocks end; `ends`: where those end that were not found; `last_end`: where the text's last block ends.
    `branch_end`: where the text parts from the last one that came this way, if that is worth keeping.
    """

    ids: list[int]
    token_count: int
    start: int
    position: int
    block_end: int
    ends: list[int]
    last_end: int
    branch_end: int | None
    after: tuple[int, ...]
    _digests: list[bytes] = field(repr=False)


@dataclass(frozen=True)
class PrefixStatistics:
    """Bytes of text that were looked up and found, blocks that are held and the memory that they take."""

    query_byte_count: int
    hit_byte_count: int
    block_count: int
    held_byte_count: int


class PrefixCache:
    """A store of blocks, bounded in bytes, that all threads may use."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._blocks: LRUCache[bytes, Block] = LRUCache(limit_bytes, lambda block: block.byte_count)
        self._lock = threading.Lock()
        self._queried = self._hit = 0

    def find(self, text: bytes, salt: bytes) -> Known:
        """The longest beginning of `text` that is known. `salt` tells apart ways to read the same text."""
        ends = list(_block_ends(len(text)))
        digests = list(_digests(text, salt, ends))
        found: list[Block] = []
        with self._lock:
            for digest in digests[1:]:
                block = self._blocks.get(digest)
                if block is None or block.start != (found[-1].settled if found else 0):
                    break
                found.append(block)
            whole = len(found)
            tail = self._blocks.get(_tail_key(digests[whole]))
            branch = self._blocks.get(_branch_key(digests[whole]))
            start = found[-1].settled if found else 0
            behind = [
                one for one in (tail, branch) if one and one.start == start and text.startswith(one.text, ends[whole])
            ]
            found += behind[:1]
            # Touched from the end, so that the beginning, which the rest is worthless without, goes last.
            for digest in reversed(digests[1 : whole + 1]):
                self._blocks.get(digest)
            self._queried += len(text)
            self._hit += found[-1].settled if found else 0
        ids = np.concatenate([block.ids for block in found]).tolist() if found else []
        branch_end = None
        if tail and not behind:
            branch_end = ends[whole] + _common_length(tail.text, text[ends[whole] : ends[whole] + len(tail.text)])
        token_count = sum(len(block.ids) for block in found[:whole])
        position = found[-1].settled if found else 0
        after = found[-1].after if found else ()
        rest = ends[whole + 1 :]
        return Known(ids, token_count, start, position, ends[whole], rest, ends[-1], branch_end, after, digests)

    def nothing(self, text: bytes, salt: bytes) -> Known:
        """As if nothing of the text had been found."""
        ends = list(_block_ends(len(text)))
        return Known([], 0, 0, 0, 0, ends[1:], ends[-1], None, (), list(_digests(text, salt, ends)))

    def keep(self, known: Known, blocks: list[Block], tail: Block, branch: Block | None) -> None:
        """Stores the whole blocks that were not found, and what is behind the last and behind the first of them."""
        first = len(known._digests) - len(known.ends)
        keyed = [*zip(known._digests[first:], blocks, strict=True), (_tail_key(known._digests[-1]), tail)]
        if branch is not None:
            keyed.append((_branch_key(known._digests[first - 1]), branch))
        with self._lock:
            for key, block in reversed(keyed):
                if block.byte_count <= self._blocks.maxsize:
                    self._blocks[key] = block

    @property
    def statistics(self) -> PrefixStatistics:
        """As of now."""
        with self._lock:
            return PrefixStatistics(self._queried, self._hit, len(self._blocks), int(self._blocks.currsize))


def _block_ends(length: int) -> Iterator[int]:
    """0, and where each whole block of a text ends."""
    end = 0
    while end <= length:
        yield end
        end += _SHORTEST_BLOCK_BYTES << (end // (16 * _SHORTEST_BLOCK_BYTES)).bit_length()


def _digests(text: bytes, salt: bytes, ends: list[int]) -> Iterator[bytes]:
    """One for the beginning up to each of `ends`."""
    digest = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    yield digest
    for start, end in pairwise(ends):
        digest = hashlib.blake2b(digest + text[start:end], digest_size=_DIGEST_BYTES).digest()
        yield digest


def _tail_key(digest: bytes) -> bytes:
    return digest + b"tail"


def _branch_key(digest: bytes) -> bytes:
    return digest + b"branch"


def _common_length(left: bytes, right: bytes) -> int:
    """How many bytes two strings begin with alike."""
    return bisect_left(range(min(len(left), len(right))), True, key=lambda end: left[: end + 1] != right[: end + 1])
