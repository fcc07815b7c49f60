"""Computes Gumbel noise that anyone can recompute.

`G(seed, offset, key) = -log(-log(u))`, with u in (0, 1) from a 64-bit mix of the three. The token with the largest sum
of log probability and noise is an exact sample of the distribution (the Gumbel-max trick: Gumbel 1954; Maddison,
Tarlow, Minka, "A* Sampling", 2014). The noise depends on nothing else, so the token sampled at an offset does not
depend on how the sequence was divided into forwards.

All integers are signed 64-bit, because both NumPy and torch multiply these modulo 2**64. The mix is the finalizer of
SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014). `docs/reference/noise.md` is
the specification, with test vectors.
"""

import hashlib
import math
from collections.abc import Collection
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bridge.text.vocabulary import Vocabulary

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
# A NumPy array or a torch tensor, used only in ways that both support.
Array: TypeAlias = Any

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# The largest difference between two draws: -log(-log(u)) at the largest u minus that at the smallest.
GUMBEL_RANGE = -math.log(2.0**-53) + math.log(53 * math.log(2.0)) + 1e-6
# Noise is computed in chunks of this many keys, which fit in a core's cache.
_CHUNK_KEYS = 1 << 14


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


def _shift_right(x: Array, bits: int) -> Array:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Array) -> Array:
    x = (x ^ _shift_right(x, 30)) * signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def position_state(seed: int, offset: int, counter: int = 0) -> int:
    """Returns a 64-bit mix of seed and position. `counter` numbers the tokens drawn at the same byte offset."""
    state = 0
    for value in (seed, offset, counter):
        state = ((state ^ value) + _GOLDEN) & _MASK
        state = (state ^ (state >> 30)) * _MIX_1 & _MASK
        state = (state ^ (state >> 27)) * _MIX_2 & _MASK
        state ^= state >> 31
    return signed(state)


def uniform(state: Any, keys: Array, xp: ModuleType = np) -> Array:
    """Returns a number for each key, strictly between 0 and 1, in steps of 2**-52, bit for bit the same everywhere.

    `keys`: an int64 array of `xp` (NumPy or torch), any shape; `state`: an int, or one that broadcasts with `keys`.
    """
    bits = _shift_right(_mix(keys ^ state), 12)
    return (xp.asarray(bits, dtype=xp.float64) + 0.5) * 2.0**-52


def gumbel_of(state: Any, keys: Array, xp: ModuleType = np) -> Array:
    """Returns standard Gumbel noise, with shapes as in `uniform`. The last digits depend on the logarithm of `xp`."""
    return -xp.log(-xp.log(uniform(state, keys, xp)))


def gumbel(seed: int, offset: int, counter: int, keys: Int64) -> Float64:
    """Returns standard Gumbel noise, shape [n], for tokens with `keys`, shape [n], at one position."""
    state = position_state(seed, offset, counter)
    noise = np.empty(len(keys))
    for start in range(0, len(keys), _CHUNK_KEYS):
        part = slice(start, start + _CHUNK_KEYS)
        noise[part] = gumbel_of(state, keys[part])
    return noise


def reaching(seed: int, offset: int, counter: int, keys: Int64, least: float) -> Int64:
    """Returns the indices, ascending, of all `keys` whose noise is at least `least`; a few may have a little less.

    It compares the integers that the noise is made of, so no logarithm is needed.
    """
    state = position_state(seed, offset, counter) & _MASK
    # -log(-log(u)) grows with u. The margins are far above the rounding of logarithms, and below any use.
    share = math.exp(-math.exp(min(-(least - 1e-9), 700.0)))
    least_bits = np.uint64(max(int(share * 2.0**52) - 8, 0) << 12)
    found = []
    unsigned, scratch = keys.view(np.uint64), np.empty((2, min(len(keys), _CHUNK_KEYS)), np.uint64)
    for start in range(0, len(keys), _CHUNK_KEYS):
        part = unsigned[start : start + _CHUNK_KEYS]
        mixed, shifted = scratch[:, : len(part)]
        np.bitwise_xor(part, np.uint64(state), out=mixed)
        for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
            np.right_shift(mixed, np.uint64(bits), out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, np.uint64(factor), out=mixed)
        mixed ^= mixed >> np.uint64(31)
        found.append(np.flatnonzero(mixed >= least_bits) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)
