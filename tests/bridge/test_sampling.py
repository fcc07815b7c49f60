"""Penalties and truncation equal those of Hugging Face, and samples follow the softmax."""

import math
from collections import Counter
from dataclasses import replace
from time import thread_time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bridge.errors import EngineFailure, InvalidField
from bridge.sampling.noise import gumbel
from bridge.sampling.sampler import History, Sampler, SamplingParameters, _truncate
from tests.support.depth import DEEP

SIZE = 40
ENDS = frozenset((2, 5))


def sampler(seed: int = 0, size: int = SIZE, **parameters: object) -> Sampler:
    keys = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, size)
    return Sampler(SamplingParameters(**parameters), seed, keys, np.empty(0, np.int64), ENDS, confident=True)  # type: ignore[arg-type]


def distribution(one: Sampler, logits: np.ndarray, history: History) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids that may be chosen and their log probabilities."""
    kept, scaled = _truncate(one._adjusted(logits, history), one.parameters)
    return kept, scaled - np.log(np.exp(scaled).sum())


@settings(max_examples=300)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=SIZE, max_size=SIZE),
    prompt=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=10),
    generated=st.lists(st.integers(0, SIZE - 1), max_size=10),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([None, 1, 5, 30]),
    top_p=st.sampled_from([None, 0.1, 0.5, 0.95]),
    min_p=st.sampled_from([None, 0.02, 0.3]),
    penalty=st.sampled_from([None, 0.5, 1.3]),
    min_tokens=st.sampled_from([0, 6]),
    bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-5, 5, width=32), max_size=3),
)
def test_each_parameter_means_what_it_means_to_hugging_face(
    logits: list[float],
    prompt: list[int],
    generated: list[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float | None,
    min_tokens: int,
    bias: dict[int, float],
) -> None:
    processors = LogitsProcessorList()
    if bias:
        processors.append(SequenceBiasLogitsProcessor([[[id_], float(value)] for id_, value in bias.items()]))
    if penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, sorted(ENDS)))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        processors.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        processors.append(MinPLogitsWarper(min_p))
    # Equal logits are cut at the border of top_p in whatever order a sort leaves them.
    scores = np.array(logits, np.float32) + np.linspace(0, 1e-3, SIZE, dtype=np.float32)
    theirs = processors(torch.tensor([prompt + generated]), torch.tensor(scores)[None].clone())[0].double()
    expected = torch.softmax(theirs, 0).numpy()
    one = sampler(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    kept, logp = distribution(one, scores, History(prompt, generated))
    mine = np.zeros(SIZE)
    mine[kept] = np.exp(logp)
    border = top_p and np.isclose(np.cumsum(np.sort(expected)), 1 - top_p, atol=1e-5).any()
    if not border:  # there, rounding decides in both
        np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_presence_and_frequency_count_what_was_generated() -> None:
    one = sampler(presence_penalty=1.5, frequency_penalty=0.25)
    beyond_the_vocabulary = SIZE + 1
    history = History([3, 3, 4], [4, 6, 6, 6, beyond_the_vocabulary])
    adjusted = one._adjusted(np.zeros(SIZE, np.float32), history)
    assert adjusted[[3, 4, 6, 7]].tolist() == [0.0, -1.75, -2.25, 0.0]


def test_a_penalty_looks_at_every_token_of_a_block_as_if_decoded_one_by_one() -> None:
    """Changes of a copy do not affect the original."""
    history = History([1], [2])
    ahead = history.copy()
    ahead.extend([3, 3])
    assert sorted(history.seen()) == [1, 2]
    assert dict(zip(*(part.tolist() for part in ahead.generated()), strict=True)) == {2: 1, 3: 2}
    assert (history.generated_token_count, ahead.generated_token_count) == (1, 3)


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 8.0])
def test_a_large_vocabulary_is_cut_as_if_it_had_been_sorted(top_p: float, sharpness: float) -> None:
    scores = np.random.default_rng(3).standard_normal(50_000).astype(np.float32) * np.float32(sharpness)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), torch.tensor(scores).double()[None])[0]
    kept, _ = _truncate(scores, SamplingParameters(temperature=1.0, top_p=top_p))
    expected = np.flatnonzero(np.isfinite(theirs.numpy()))
    # The sum of fifty thousand probabilities is rounded in another order.
    assert len(np.setxor1d(kept, expected)) <= max(1, len(expected) // 10_000)


def test_each_truncation_works_on_what_the_one_before_has_left() -> None:
    """Of 40%, 30%, 20% and 10%, two are left with 57% and 43%: the first alone has half, the other 0.75 times it."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for truncation, kept in (({"top_p": 0.5}, [0]), ({"top_p": 0.6, "min_p": 0.8}, [0]), ({"min_p": 0.7}, [0, 1])):
        parameters = SamplingParameters(temperature=1.0, top_k=2, **truncation)  # type: ignore[arg-type]
        assert _truncate(logits, parameters)[0].tolist() == kept


def chi_square(counts: Counter[int], expected: dict[int, float]) -> tuple[float, int]:
    """Returns the statistic and its degrees of freedom; rare ids are counted together."""
    cells = sorted(expected.items(), key=lambda item: -item[1])
    statistic, rest_found, rest_expected, degrees = 0.0, 0, 0.0, -1
    for id_, mean in cells:
        if mean >= 10:
            statistic += (counts[id_] - mean) ** 2 / mean
            degrees += 1
        else:
            rest_found, rest_expected = rest_found + counts[id_], rest_expected + mean
    if rest_expected >= 5:
        statistic += (rest_found - rest_expected) ** 2 / rest_expected
        degrees += 1
    assert sum(counts.values()) == sum(counts[id_] for id_ in expected), "only possible ids are chosen"
    return statistic, degrees


def beyond(statistic: float, degrees: int) -> bool:
    """Returns whether chance exceeds the statistic less than once in about 10,000 times (Wilson and Hilferty, 1931)."""
    cube = (statistic / degrees) ** (1 / 3)
    spread = 2 / (9 * degrees)
    return (cube - (1 - spread)) / math.sqrt(spread) > 3.9


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {3: 2.0}, "top_k": 20},
]


@pytest.mark.parametrize("case", CASES if DEEP else CASES[::2])
def test_twenty_thousand_samples_follow_the_exact_softmax(case: dict[str, object]) -> None:
    logits = np.random.default_rng(11).standard_normal(SIZE).astype(np.float32) * 2
    history = History([1, 2], [3, 3, 9])
    one = sampler(seed=5, **case)
    kept, logp = distribution(one, logits, history)
    expected = {int(id_): 20_000 * math.exp(p) for id_, p in zip(kept, logp, strict=True)}
    counts = Counter(one.choose(logits, offset, 0, history).token_id for offset in range(20_000))
    assert not beyond(*chi_square(counts, expected))


@pytest.mark.parametrize("size", [1, 2, 40, 5_000])
@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 0.3, 1.0, 4.0, 100.0])
def test_sampling_needs_the_noise_of_few_ids_but_chooses_as_if_it_had_that_of_all(
    size: int, temperature: float
) -> None:
    random = np.random.default_rng(size)
    keys = random.integers(-(2**63), 2**63 - 1, size)
    one = Sampler(SamplingParameters(temperature), 5, keys, np.empty(0, np.int64), tolerance=0.05, confident=True)
    for offset in range(60):
        logits = (random.standard_normal(size) * 10 ** random.uniform(-1, 1.3)).astype(np.float32)
        if offset % 3 == 1:
            logits = np.round(logits)  # ties
        if offset % 4 == 2:
            logits[random.random(size) < 0.9] = -np.inf
            logits[random.integers(size)] = 1.0
        with np.errstate(over="ignore"):
            scaled = (logits.astype(np.float64) - logits.max()) / temperature
        sums = scaled + gumbel(5, offset, 0, keys)
        best, next_ = int(sums.argmax()), float(np.sort(sums)[-2]) if size > 1 else -np.inf
        choice = one.choose(logits, offset, 0)
        assert choice.token_id == best
        assert choice.near_tie == ((float(sums[best]) - next_) * temperature < 0.05)
        assert choice.probability == pytest.approx(np.exp(scaled[best]) / np.exp(scaled).sum(), rel=1e-4, abs=1e-12)


def test_a_temperature_that_is_hardly_a_number_gives_the_best_id() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal(5000).astype(np.float32)
    logits[:80] = logits.max() + 1 + random.random(80) / 4  # many are near the best
    keys = np.arange(5000, dtype=np.int64)
    one = Sampler(SamplingParameters(1e-312), 5, keys, np.empty(0, np.int64), tolerance=0.75)
    with np.errstate(over="ignore"):
        assert one.choose(logits, 0, 0).token_id == int(logits.argmax())


def test_the_test_would_notice_every_biased_scheme() -> None:
    """Tests schemes of other systems, each of which is biased."""
    logits = np.random.default_rng(11).standard_normal(SIZE) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum()
    draft = np.roll(probabilities, 1)
    expected = {id_: 20_000 * p for id_, p in enumerate(probabilities)}
    keys = sampler().keys
    chance = np.random.default_rng(2)
    schemes: dict[str, Counter[int]] = {"coarse": Counter(), "noise and then u < p/q": Counter(), "wrong q": Counter()}
    for offset in range(20_000):
        noise = gumbel(5, offset, 0, keys)
        # The noise has only a few bits.
        schemes["coarse"][int((logits + np.round(noise)).argmax())] += 1
        # The draft uses the same noise, rejection sampling verifies it, and the residual uses the noise once more.
        proposed = int((np.log(draft) + noise).argmax())
        accepted = chance.random() < probabilities[proposed] / draft[proposed]
        residual = np.maximum(probabilities - draft, 0)
        again = int(chance.choice(SIZE, p=residual / residual.sum()))
        with np.errstate(divide="ignore"):
            same = int((np.log(residual) + noise).argmax())
        schemes["noise and then u < p/q"][proposed if accepted else same] += 1
        # The draft was sampled at another temperature than its reported probabilities.
        sharp = draft**2 / (draft**2).sum()
        proposed = int(chance.choice(SIZE, p=sharp))
        accepted = chance.random() < probabilities[proposed] / draft[proposed]
        schemes["wrong q"][proposed if accepted else again] += 1
    for name, counts in schemes.items():
        assert beyond(*chi_square(counts, expected)), name


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 100.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"repetition_penalty": 101.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"presence_penalty": -101.0}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"frequency_penalty": 101.0}, "frequency_penalty"),
        ({"logit_bias": {SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 1e5}}, "logit_bias"),
        ({"logit_bias": {1: -2e9}}, "logit_bias"),
        ({"stop_token_ids": (1, SIZE)}, "stop_token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_with_its_range(parameters: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField, match=rf"sampling\.{field}.* must be "):
        SamplingParameters(**parameters).checked(lambda ids: max(ids, default=0) < SIZE)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_of_each_range_are_allowed(end: int) -> None:
    ranges = {
        "temperature": (0.0, 100.0),
        "top_p": (math.ulp(0.0), 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.001, 100.0),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
    }
    SamplingParameters(**{name: ends[end] for name, ends in ranges.items()}).checked()


@pytest.mark.parametrize(("temperature", "chosen", "drafts"), [(1.0, None, 0.85), (0.0, None, 0.0), (1.0, 1.0, 1.0)])
def test_a_draft_samples_at_a_lower_temperature_unless_one_is_chosen(
    temperature: float, chosen: float | None, drafts: float
) -> None:
    sampling = SamplingParameters(temperature, top_k=5, min_tokens=3, logit_bias={1: 2.0})
    assert sampling.for_draft(chosen) == SamplingParameters(drafts, top_k=5)


def test_a_top_k_of_0_is_off() -> None:
    logits = np.zeros(SIZE, np.float32)
    one, off = sampler(temperature=1.0), sampler(temperature=1.0, top_k=0)
    assert [one.choose(logits, i, 0) for i in range(50)] == [off.choose(logits, i, 0) for i in range(50)]


def test_where_nothing_may_be_chosen_nothing_is() -> None:
    one = sampler(min_tokens=3, stop_token_ids=tuple(range(SIZE)))
    one = replace(one, ends=frozenset(range(SIZE)))
    with pytest.raises(EngineFailure, match="every id ends the text"):
        one.choose(np.zeros(SIZE, np.float32), 0, 0, History([1]))


def test_by_default_the_first_token_may_end_the_text() -> None:
    logits = np.zeros(SIZE, np.float32)
    logits[2] = 1.0
    assert sampler().choose(logits, 0, 0, History([1])).token_id == 2


def test_a_tie_is_near_only_for_a_model_that_rounds() -> None:
    """Without rounding, equal logits are equal, and every run chooses the same one of them."""
    logits = np.zeros(SIZE, np.float32)
    assert not sampler().choose(logits, 0, 0).near_tie
    assert replace(sampler(), tolerance=1e-6).choose(logits, 0, 0).near_tie


def test_an_end_that_the_model_cannot_produce_is_no_matter() -> None:
    one, logits = sampler(min_tokens=3), np.zeros(5, np.float32)
    logits[2] = 1.0
    assert one.choose(logits, 0, 0, History([1])).token_id not in ENDS


def test_extremes_of_what_is_allowed_stay_numbers() -> None:
    for penalty in (0.001, 100.0):
        for bias in (-1e9, 1e4):
            for temperature in (0.0, 1.0):
                one = sampler(repetition_penalty=penalty, logit_bias={4: bias, 5: bias}, temperature=temperature)
                choice = one.choose(np.full(SIZE, -3e3, np.float32), 0, 0, History([4, 99_999], [6]))
                assert 0.0 <= choice.probability <= 1.0


def test_of_two_ids_with_the_largest_bias_the_likelier_one_is_chosen() -> None:
    logits = np.zeros(SIZE, np.float32)
    logits[4], logits[5] = 3.0, 3.01
    assert sampler(logit_bias={4: 1e4, 5: 1e4}).choose(logits, 0, 0).token_id == 5


def test_ids_that_cannot_be_chosen_are_no_alternatives() -> None:
    one = replace(sampler(), missing=np.arange(3, SIZE), logprobs=10)
    assert [id_ for id_, _ in one.choose(np.zeros(SIZE, np.float32), 0, 0).top_logprobs] == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 5, SIZE, 100])
def test_the_best_alternatives_are_those_of_a_sorted_vocabulary(count: int) -> None:
    """Of equal logits those with the smaller ids come first; without an alternative nothing is sorted."""
    logits = np.random.default_rng(count).integers(-3, 4, SIZE).astype(np.float32)
    one = replace(sampler(), missing=np.array([7, 8]), logprobs=count)
    allowed = [id_ for id_ in range(SIZE) if id_ not in (7, 8)]
    expected = sorted(allowed, key=lambda id_: (-logits[id_], id_))[:count]
    choice = one.choose(logits, 0, 0)
    assert [id_ for id_, _ in choice.top_logprobs] == expected
    total = np.log(np.exp(logits[allowed].astype(np.float64)).sum())
    np.testing.assert_allclose([value for _, value in choice.top_logprobs], logits[expected] - total, rtol=1e-9)


def test_a_bias_for_each_id_takes_little_time_and_one_that_the_model_cannot_produce_is_no_matter() -> None:
    size, many = 100_000, 90_000
    bias = {id_: float(id_ % 7) for id_ in range(many)} | {size + 3: 1e4}
    one = sampler(size=size + 10, logit_bias=bias, min_tokens=2)
    logits = np.random.default_rng(3).standard_normal(size, np.float32)
    expected = logits.copy()
    for id_ in range(many):
        expected[id_] += np.float32(bias[id_])
    expected[list(ENDS)] = -np.inf
    history = History([1])
    assert one.choose(logits, 0, 0, history).token_id == expected.argmax()
    began = thread_time()
    for place in range(10):
        one.choose(logits, place, 0, history)
    assert thread_time() - began < 10 * 0.01, "one id after the other takes 30 ms"
