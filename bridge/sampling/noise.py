"""Computes Gumbel noise that anyone can recompute.

`G(seed, offset, key) = -log(-log(u))`, with u in (0, 1) from a 64-bit mix of the three. The token with the largest sum
of log probability and noise is an exact sample of the distribution (the Gumbel-max trick: Gumbel 1954; Maddison,
Tarlow, Minka, "A* Sampling", 2014). The noise depends on nothing else, so the token sampled at an offset does not
depend on how the sequence was divided into forwards.

The mix is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014), in
64-bit integers. Keys are signed ones, because few other languages and libraries have unsigned ones.
`docs/reference/noise.md` is the specification, with test vectors.
"""

import hashlib
import math
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from bridge.text.vocabulary import Vocabulary

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Float64 = NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The finalizer: two shifts, each with a factor, and the last shift. Of the result, a uniform number has 52 bits.
_MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LAST_SHIFT, _UNUSED_BITS = 31, 12
# The largest difference between two draws: -log(-log(u)) at the largest u minus that at the smallest.
GUMBEL_RANGE = -math.log(2.0**-53) + math.log(53 * math.log(2.0)) + 1e-6
# Noise is computed in chunks of this many keys, which fit in a core's cache.
_CHUNK_KEYS = 1 << 15


def signed(value: int) -> int:
    """Returns the signed number with the same lowest 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def token_key(data: bytes, kind: str = "bytes", ordinal: int = 0) -> int:
    """Returns the 64-bit key of a token: BLAKE2b of its kind, its ordinal among tokens with equal data, and its data.

    `kind` is "bytes" if `data` is the token's bytes, "role" if it names a control token's role ("eos"), and "name" if
    it is the written form of any other token without bytes.
    """
    message = kind.encode() + b"\0" + ordinal.to_bytes(4, "little") + data
    return signed(int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little"))


def token_keys(vocabulary: Vocabulary, eos: Collection[int]) -> Int64:
    """Returns the keys of all ids, shape [vocabulary.size]. Ids with the same bytes have different ordinals."""
    seen: dict[tuple[str, bytes], int] = {}
    keys = np.empty(vocabulary.size, np.int64)
    ends = frozenset(eos)
    for id_, data in enumerate(vocabulary.tokens):
        if id_ in ends:
            kind, data = "role", b"eos"
        elif not data:
            kind, data = "name", vocabulary.name(id_).encode()
        else:
            kind = "bytes"
        ordinal = seen.get((kind, data), 0)
        seen[kind, data] = ordinal + 1
        keys[id_] = token_key(data, kind, ordinal)
    return keys


def position_state(seed: int, offset: int, counter: int = 0) -> int:
    """Returns a 64-bit mix of seed and position. `counter` numbers the tokens drawn at the same byte offset."""
    state = 0
    for value in (seed, offset, counter):
        state = ((state ^ value) + _GOLDEN) & _MASK
        for bits, factor in _MIX:
            state = (state ^ (state >> bits)) * factor & _MASK
        state ^= state >> _LAST_SHIFT
    return state


def _mixed(state: int, keys: Int64) -> Iterator[tuple[slice, UInt64]]:
    """Yields parts of `keys`, as slices, and the mix of each of their keys and the state, but for its last shift.

    The next part overwrites it. The last shift changes only the lower bits, which hardly ever matter to `reaching`.
    """
    scratch = np.empty((2, min(len(keys), _CHUNK_KEYS)), np.uint64)
    for start in range(0, len(keys), _CHUNK_KEYS):
        part = slice(start, min(start + _CHUNK_KEYS, len(keys)))
        mixed, shifted = scratch[:, : part.stop - start]
        np.bitwise_xor(keys[part].view(np.uint64), np.uint64(state), out=mixed)
        for bits, factor in _MIX:
            mixed ^= np.right_shift(mixed, np.uint64(bits), out=shifted)
            mixed *= np.uint64(factor)
        yield part, mixed


def uniform(seed: int, offset: int, counter: int, keys: Int64) -> Float64:
    """Returns a number for each of `keys`, shape [n], strictly between 0 and 1, in steps of 2**-52.

    It is bit for bit the same on every machine.
    """
    found = np.empty(len(keys))
    for part, mixed in _mixed(position_state(seed, offset, counter), keys):
        found[part] = (mixed ^ (mixed >> np.uint64(_LAST_SHIFT))) >> np.uint64(_UNUSED_BITS)
    return (found + 0.5) * 2.0**-52


def gumbel(seed: int, offset: int, counter: int, keys: Int64) -> Float64:
    """Returns standard Gumbel noise, shape [n], for tokens with `keys`, shape [n], at one position."""
    return -np.log(-np.log(uniform(seed, offset, counter, keys)))


def reaching(seed: int, offset: int, counter: int, keys: Int64, least: float) -> Int64:
    """Returns the indices, ascending, of all `keys` whose noise is at least `least`; a few may have a little less.

    It compares the integers that the noise is made of, so no logarithm is needed.
    """
    # -log(-log(u)) grows with u. The margins are far above the rounding of logarithms, and below any use.
    share = math.exp(-math.exp(min(-(least - 1e-9), 700.0)))
    least_bits = max(int(share * 2.0**52) - 8, 0) << _UNUSED_BITS
    least_bits -= least_bits % (1 << 64 - _LAST_SHIFT)  # the bits that the last shift leaves alone
    parts = _mixed(position_state(seed, offset, counter), keys)
    found = [np.flatnonzero(mixed >= np.uint64(least_bits)) + part.start for part, mixed in parts]
    return np.concatenate(found) if found else np.empty(0, np.int64)
