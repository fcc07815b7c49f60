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
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from bridge.seams import Seams, Tokens

_SHORTEST_BLOCK_BYTES = 256
_DIGEST_BYTES = 16
# Measured with tracemalloc: digest, array, block and the cache's own entry, beside the ids themselves.
_ENTRY_BYTES = 700
_NO_IDS = np.array([], np.uint32)


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


@dataclass(frozen=True)
class Known:
    """The longest beginning of a text that was found.

    `whole`: its blocks; `behind`: a tail or branch behind those. `digests` and `ends`: the keys of the beginnings that
    the text's blocks end, and where they do, the empty one first. `branch_end`: where the text parts from the last
    one that came this way, if that is worth keeping.
    """

    digests: list[bytes]
    ends: list[int]
    whole: list[Block]
    behind: Block | None
    branch_end: int | None

    @cached_property
    def ids(self) -> list[int]:
        """Those of the beginning."""
        found = [*self.whole, self.behind] if self.behind else self.whole
        ids: list[int] = np.concatenate([block.ids for block in found]).tolist() if found else []
        return ids

    @property
    def start(self) -> int:
        """What the whole blocks settle, in bytes."""
        return self.whole[-1].settled if self.whole else 0

    @property
    def position(self) -> int:
        """How many bytes `ids` stand for."""
        return self.behind.settled if self.behind else self.start

    @property
    def after(self) -> tuple[int, ...]:
        """The first of the ids that follow, or this beginning is not one of the text."""
        last = self.behind or (self.whole[-1] if self.whole else None)
        return last.after if last else ()

    def forgotten(self) -> "Known":
        """As if nothing had been found."""
        return Known(self.digests, self.ends, [], None, None)


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
        whole: list[Block] = []
        with self._lock:
            start = 0
            for digest in digests[1:]:
                block = self._blocks.get(digest)
                if block is None or block.start != start:
                    break
                whole.append(block)
                start = block.settled
            last, end = digests[len(whole)], ends[len(whole)]
            tail, branch = self._blocks.get(_tail_key(last)), self._blocks.get(_branch_key(last))
            fitting = (one for one in (tail, branch) if one and one.start == start and text.startswith(one.text, end))
            behind = next(fitting, None)
            # Touched from the end, so that the beginning, which the rest is worthless without, goes last.
            for digest in reversed(digests[1 : len(whole) + 1]):
                self._blocks.get(digest)
            branch_end = None
            if tail is not None and behind is None:
                branch_end = end + _common_length(tail.text, text[end : end + len(tail.text)])
            known = Known(digests, ends, whole, behind, branch_end)
            self._queried += len(text)
            self._hit += known.position
        return known

    def keep(self, known: Known, text: bytes, tokens: Tokens, seams: Seams) -> int:
        """Stores what `tokens`, those behind `known`, settle of the text; how many of them that is."""
        # What a tail settled, that was found, is part of the first new block.
        behind = known.behind.ids if known.behind else _NO_IDS

        def block(first: int, start: int, end: int, text_behind: bytes = b"") -> tuple[Block, int]:
            count = max(seams.settled(text, tokens, end), first)
            ids = np.array(tokens.ids[first:count], np.uint32)
            if start == known.start:
                ids = np.concatenate([behind, ids])
            after = seams.after(tokens, count, end)
            return Block(ids, start, tokens.end(count, known.position), after, text_behind), count

        keyed: list[tuple[bytes, Block]] = []
        found = len(known.whole)
        done, start = 0, known.start
        for digest, end in zip(known.digests[found + 1 :], known.ends[found + 1 :], strict=True):
            new, done = block(done, start, end)
            keyed.append((digest, new))
            start = new.settled
        tail, done = block(done, start, len(text), text[known.ends[-1] :])
        keyed.append((_tail_key(known.digests[-1]), tail))
        if known.branch_end is not None:
            branch, _ = block(0, known.start, known.branch_end, text[known.ends[found] : known.branch_end])
            keyed.append((_branch_key(known.digests[found]), branch))
        with self._lock:
            for key, new in reversed(keyed):
                if new.byte_count <= self._blocks.maxsize:
                    self._blocks[key] = new
        return done

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
