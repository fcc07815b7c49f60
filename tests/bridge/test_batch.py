"""The distribution of candidates over the sequences of a forward is the best that a full search finds."""

from itertools import accumulate, product
from operator import mul
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.planning.batch import BatchCosts, share

CHANCES = st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=3)
TIMES = st.lists(st.floats(0.0, 1.5), min_size=16, max_size=16).map(lambda steps: list(accumulate(steps, initial=1.0)))


def costs_of(times: list[float]) -> BatchCosts:
    """Returns costs that have seen forwards of 1, 2, 3 ... tokens."""
    costs = BatchCosts()
    for _ in range(100):
        for number, time in enumerate(times):
            costs.observe(1, number, 1e7 * time)
    return costs


def speed(chances: list[list[float]], widths: tuple[int, ...], count: int, costs: BatchCosts) -> float:
    tokens = count + sum(sum(accumulate(one[:width], mul)) for one, width in zip(chances, widths, strict=True))
    return tokens / float(costs.of_all(np.array([float(count + sum(widths))]))[0])


@given(CHANCES, TIMES, st.integers(0, 3))
def test_no_other_way_to_share_is_faster(chances: list[list[float]], times: list[float], others: int) -> None:
    costs, count = costs_of(times), len(chances) + others
    found = tuple(share(chances, count, costs))
    best = max(speed(chances, ways, count, costs) for ways in product(*(range(len(one) + 1) for one in chances)))
    if any(found):
        assert speed(chances, found, count, costs) == pytest.approx(best)
    else:
        assert speed(chances, found, count, costs) * 1.031 >= best


def test_a_loaded_engine_gets_fewer_candidates_and_the_most_certain() -> None:
    chances = [[0.9] * 8, [0.4] * 8]
    cheap, dear = (costs_of([1 + slope * number for number in range(20)]) for slope in (0.02, 0.25))
    assert share(chances, 2, cheap)[0] >= 6
    few = share(chances, 2, dear)
    assert few[0] > few[1] == 0
    assert sum(few) < sum(share(chances, 2, cheap))
    assert share([], 5, dear) == [] and share([[], []], 5, dear) == [0, 0]


def test_the_number_of_sequences_does_not_disturb_what_candidates_cost() -> None:
    """An engine that computes all the time, whose requests end one after the other: no candidate is worth its time."""
    costs, random = BatchCosts(), Random(1)
    for number in range(60):
        count = 64 - number // 2
        candidates = random.randrange(count) if number % 3 else 0
        costs.observe(count, candidates, 3e6 * (count + candidates + 4) * random.uniform(0.95, 1.05))
    for count in (64, 50, 36):
        assert share([[0.6] * 4] * count, count, costs) == [0] * count


def test_an_engine_that_waits_for_memory_verifies_many() -> None:
    costs, random = BatchCosts(), Random(1)
    for _ in range(60):
        count, candidates = random.randrange(2, 9), random.randrange(30)
        costs.observe(count, candidates, 2e7 * (1 + 0.004 * (count + candidates)) * random.uniform(0.95, 1.05))
    assert sum(share([[0.6] * 4] * 6, 6, costs)) >= 18


def test_what_the_engine_has_measured_itself_is_known_at_once_and_nonsense_is_left_out() -> None:
    costs = BatchCosts([(0, 5), (4, -1), (4, 0), (1, 10_000_000), (8, 40_000_000)])
    one, eight = costs.of_all(np.array([1.0, 8.0]))
    assert eight / one == pytest.approx(4.0)


def test_numbers_of_tokens_not_seen_are_extrapolated() -> None:
    costs = BatchCosts()
    unknown = costs.of_all(np.array([8.0, 16.0]))
    assert 1.0 < unknown[1] / unknown[0] < 2.0, "something between no cost and proportional cost"
    for _ in range(30):
        for count in (8, 16):
            costs.observe(count, 0, 1e6 * count)
    near, far = costs.of_all(np.array([16.0, 64.0]))
    assert far / near == pytest.approx(4.0, rel=0.1)
    assert costs.of_all(np.array([2.0]))[0] < near


def test_forwards_grow_step_by_step() -> None:
    costs, widest = BatchCosts(), 8
    for _ in range(3):
        costs.observe(8, 1, 1e9)  # an engine's first forwards with candidates
    for _ in range(6):
        tokens = 8 + sum(share([[0.99] * 40] * 8, 8, costs))
        assert widest < tokens <= 1.5 * 2**0.5 * widest, "not much wider than any before"
        costs.observe(8, tokens - 8, 1e7)
        widest = tokens


def test_one_stalled_forward_changes_little() -> None:
    costs = BatchCosts()
    for _ in range(50):
        costs.observe(8, 0, 1e7)
        costs.observe(8, 8, 1.1e7)
    costs.observe(8, 8, 1e10)
    near, far = costs.of_all(np.array([8.0, 16.0]))
    assert far / near < 1.5
    for _ in range(20):
        costs.observe(8, 8, 1.1e7)
    near, far = costs.of_all(np.array([8.0, 16.0]))
    assert far / near == pytest.approx(1.1, rel=0.05)


@pytest.mark.parametrize(
    "earlier",
    [[(2, 2e9)], [(2, 80e6)] * 200, [(128, 20e6)] * 200, [(200, 3e9)]],
    ids=["a stall", "few long texts", "many short texts", "a wide stall"],
)
def test_what_was_learned_of_other_texts_is_corrected(earlier: list[tuple[int, float]]) -> None:
    """An engine that computes all the time, so that these candidates gain nothing; and then one for which they do."""
    for slope, gains in ((1.0, False), (0.02, True)):
        costs = BatchCosts()
        for tokens, nanoseconds in earlier:
            costs.observe(tokens, 0, nanoseconds)
        chosen = []
        for number in range(600):
            found = sum(share([[0.3 + 0.4 * gains] * 4] * 64, 64, costs)) if (number + 1) % 100 else 0
            if gains and number % 25 == 24 and not found:  # a trial
                found = 64
            costs.observe(64, found, 20e6 * (1 + slope * found / 64))
            chosen.append(found)
        assert (sum(one > 0 for one in chosen[400:]) > 150) == gains, chosen[400:]
        assert gains or not any(chosen[400:])


@pytest.mark.parametrize("sequence_count", [1, 2, 8, 512])
def test_forwards_that_take_as_long_with_more_take_all_candidates(sequence_count: int) -> None:
    costs = BatchCosts([(1 << power, 1_000_000) for power in range(1, 17)])
    assert share([[0.6] * 7] * sequence_count, sequence_count, costs) == [7] * sequence_count
