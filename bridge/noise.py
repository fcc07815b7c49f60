"""Gumbel noise that anyone can recompute.

`G(seed, offset, key) = -log(-log(u))`, with u in (0, 1) from a 64-bit mix of the three. Adding it to
log probabilities and taking the largest is an exact sample of the distribution (the Gumbel-max trick:
Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014), and because nothing else goes in, a token
sampled at an offset does not depend on how the sequence was cut into forwards.

Signed 64-bit integers are used throughout, because both NumPy and torch multiply them modulo 2**64.
The mix is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", 2014). `docs/noise.md` is the specification, with test vectors.
"""

import hashlib
import math
from collections.abc import Collection
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bridge.vocabulary import Vocabulary

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
# Of NumPy or of torch: what is done with it both understand.
Array: TypeAlias = Any

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# No two draws are farther apart than this: -log(-log(u)) at the largest and the smallest u.
GUMBEL_RANGE = -math.log(2.0**-53) + math.log(53 * math.log(2.0)) + 1e-6
# What is computed at a time, so that it stays in the core's cache.
_CHUNK = 1 << 14


def signed(value: int) -> int:
    """The 64-bit two's complement number with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def token_key(data: bytes, kind: str = "bytes", ordinal: int = 0) -> int:
    """The 64-bit key of a token: BLAKE2b of its kind, its ordinal among equals, and its bytes.

    `kind` is "bytes" for text; "role" for a control token with a role, whose `data` is then the
    role's name ("eos"); "name" for any other token without bytes.
    """
    message = kind.encode() + b"\0" + ordinal.to_bytes(4, "little") + data
    return signed(int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little"))


def token_keys(vocabulary: Vocabulary, eos: Collection[int]) -> Int64:
    """Keys of all ids, shape [vocabulary.size]; ids that stand for the same are told apart by ordinal."""
    seen: dict[tuple[str, bytes], int] = {}
    keys = np.empty(vocabulary.size, np.int64)
    roles = {id_: index for index, id_ in enumerate(eos)}
    for id_, data in enumerate(vocabulary.tokens):
        if id_ in roles:
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


def _mix_int(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def position_state(seed: int, offset: int, counter: int = 0) -> int:
    """What seed and position contribute; `counter` numbers the tokens drawn at one offset."""
    state = _mix_int(seed + _GOLDEN)
    state = _mix_int((state ^ (offset & _MASK)) + _GOLDEN)
    return signed(_mix_int((state ^ (counter & _MASK)) + _GOLDEN))


def uniform(state: Any, keys: Array, xp: ModuleType = np) -> Array:
    """One number per key, strictly between 0 and 1, in steps of 2**-52, the same to the last bit everywhere.

    `keys`: int64 of the array namespace `xp` (NumPy or torch), any shape; `state`: an int, or states that broadcast.
    """
    bits = _shift_right(_mix(keys ^ state), 12)
    return (xp.asarray(bits, dtype=xp.float64) + 0.5) * 2.0**-52


def gumbel_of(state: Any, keys: Array, xp: ModuleType = np) -> Array:
    """Standard Gumbel noise, shapes as those of `uniform`; the last places are the namespace's own."""
    return -xp.log(-xp.log(uniform(state, keys, xp)))


def gumbel(seed: int, offset: int, counter: int, keys: Int64) -> Float64:
    """Standard Gumbel noise for the tokens with `keys` [n] at one position; [n]."""
    state = position_state(seed, offset, counter)
    noise = np.empty(len(keys))
    for start in range(0, len(keys), _CHUNK):
        part = slice(start, start + _CHUNK)
        noise[part] = gumbel_of(state, keys[part])
    return noise
