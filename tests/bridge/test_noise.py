"""The noise follows its specification, is never 0 or 1, never repeats, and gives exact samples."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import EngineFailure
from bridge.sampling.noise import GUMBEL_RANGE, gumbel, position_state, reaching, signed, token_key, token_keys, uniform
from bridge.sampling.sampler import Sampler, SamplingParameters
from tests.support import tiny

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "noise-vectors.json").read_text())


def test_the_code_gives_the_vectors_of_the_specification() -> None:
    for one in VECTORS["keys"]:
        assert token_key(bytes.fromhex(one["data"]), one["kind"], one["ordinal"]) == signed(int(one["key"], 16))
    for one in VECTORS["noise"]:
        keys = np.array([signed(int(one["key"], 16))])
        place = int(one["seed"], 16), one["offset"], one["counter"]
        assert uniform(*place, keys)[0] == float.fromhex(one["uniform"])
        assert gumbel(*place, keys)[0] == pytest.approx(one["gumbel"], rel=1e-12)


def test_the_specification_in_torch_gives_the_same_uniforms_bit_for_bit_and_nearly_the_same_noise() -> None:
    """torch has no unsigned integers of 64 bits to compute with, so it follows the specification in its own way."""
    import torch

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mix(x: torch.Tensor) -> torch.Tensor:
        x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
        x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
        return x ^ shifted(x, 31)

    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 100_000)
    for seed, offset, counter in ((3, 0, 2), (3, 1, 2), (2**64 - 1, 1 << 40, 0)):
        state = torch.tensor(0)
        for value in (seed, offset, counter):
            state = mix((state ^ signed(value)) + signed(0x9E3779B97F4A7C15))
        u = (shifted(mix(state ^ torch.from_numpy(keys)), 12).double() + 0.5) * 2.0**-52
        assert np.array_equal(u.numpy(), uniform(seed, offset, counter, keys))
        # The two logarithms may round differently, by a few units in the last place.
        noise = -torch.log(-torch.log(u))
        np.testing.assert_allclose(noise.numpy(), gumbel(seed, offset, counter, keys), rtol=4e-15, atol=4e-15)


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000)
    u = uniform(1, 2, 3, keys)
    assert u.min() > 0.0
    assert u.max() < 1.0
    counts, _ = np.histogram(u, 64, (0.0, 1.0))
    expected = len(keys) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi square of 63 degrees: 1e-5 beyond 118
    # The ends of the range of 64-bit words give the ends of the range of numbers.
    state = signed(position_state(5, 6, 7))
    extremes = uniform(5, 6, 7, np.array([state, ~state]))
    assert np.all((extremes > 0) & (extremes < 1))


def test_all_keys_with_enough_noise_are_found_and_hardly_any_other() -> None:
    keys = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 40_000)
    for least in (-1e3, -3.0, -0.5, 0.0, 1.0, 4.0, 9.0, 12.0, 36.7, 45.0, 1e9):
        for offset in range(5):
            found, noise = reaching(3, offset, 1, keys, least), gumbel(3, offset, 1, keys)
            assert set(np.flatnonzero(noise >= least)) <= set(found)
            assert np.all(noise[found] >= least - 1e-6)
            assert np.all(np.diff(found) > 0)
    # The key with the least noise of all is found at its own level.
    least_key = np.array([signed(position_state(5, 6, 7))])
    assert len(reaching(5, 6, 7, least_key, gumbel(5, 6, 7, least_key)[0])) == 1
    assert len(reaching(5, 6, 7, np.empty(0, np.int64), 0.0)) == 0


def test_no_two_draws_differ_by_more_than_the_range() -> None:
    """Ids whose score is lower by more than the range are never considered."""
    most, least = -math.log(-math.log1p(-(2.0**-53))), -math.log(-math.log(2.0**-53))
    assert most - least <= GUMBEL_RANGE < most - least + 1e-5


def test_every_argument_matters() -> None:
    keys = np.arange(5)
    draws = [gumbel(seed, offset, counter, keys) for seed in (0, 1) for offset in (0, 1) for counter in (0, 1)]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_no_two_tokens_share_a_key(kind: str) -> None:
    keys = token_keys(tiny.vocabulary(kind), (2,))
    assert len(set(keys.tolist())) == len(keys)
    assert keys[2] == token_key(b"eos", "role")


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_token_has_the_key_that_the_specification_gives_for_its_bytes_or_its_name(kind: str) -> None:
    words = tiny.vocabulary(kind)
    keys, seen = token_keys(words, (2,)), list[bytes]()
    for id_, data in enumerate(words.tokens):
        if data:
            assert keys[id_] == token_key(data, "bytes", seen.count(data))
            seen.append(data)
        elif id_ != 2:
            assert keys[id_] == token_key(words.name(id_).encode(), "name")


def test_tokens_with_the_same_bytes_have_the_same_key_in_every_vocabulary() -> None:
    one, other = tiny.vocabulary("byte_level"), tiny.vocabulary("unigram")
    id_, twin = one.tokens.index(b"e"), other.tokens.index(b"e")
    assert token_keys(one, (2,))[id_] == token_keys(other, (2,))[twin]


def test_samples_follow_the_softmax_and_the_test_would_notice_if_not() -> None:
    """Tests chi square over 20,000 offsets. A biased scheme must fail the same test."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    sampler = Sampler(SamplingParameters(temperature=1.0), 9, np.arange(5) * 7919, np.empty(0, np.int64))
    counts = np.zeros(5)
    biased = np.zeros(5)
    for offset in range(20_000):
        counts[sampler.choose(logits, offset, 0).token_id] += 1
        # A biased scheme: its noise has a resolution of only a few bits.
        coarse = np.round(gumbel(9, offset, 0, sampler.keys))
        biased[int((logits + coarse).argmax())] += 1
    expected = np.exp(logits) * 20_000

    def chi_square(found: np.ndarray) -> float:
        return float(((found - expected) ** 2 / expected).sum())

    assert chi_square(counts) < 25  # 4 degrees: 5e-5 beyond
    assert chi_square(biased) > 25


def test_extreme_temperatures_and_broken_logits() -> None:
    logits = np.array([1.0, 5.0, 3.0, -80.0, 4.9], np.float32)
    for temperature in (1e-308, 1e-9):
        sampler = Sampler(
            SamplingParameters(temperature=temperature), 1, np.arange(5), np.empty(0, np.int64), confident=True
        )
        choice = sampler.choose(logits, 0, 0)
        assert (choice.token_id, choice.probability) == (1, 1.0)
    for broken in (np.full(5, np.nan, np.float32), np.full(5, np.inf, np.float32)):
        with pytest.raises(EngineFailure, match="float32"):
            sampler.choose(broken, 0, 0)
