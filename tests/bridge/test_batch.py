"""The distribution of candidates over the sequences of a forward is the best that a full search finds."""

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.planning.batch import BatchCosts, share
from bridge.planning.costs import ForwardTime, WidthCost

CHANCES = st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=3)
RATIOS = st.lists(st.floats(0.0, 1.5), min_size=5, max_size=5).map(lambda steps: list(accumulate(steps, initial=1.0)))


def speed(chances: list[list[float]], widths: tuple[int, ...], count: int, time: ForwardTime) -> float:
    tokens = count + sum(sum(accumulate(one[:width], mul)) for one, width in zip(chances, widths, strict=True))
    return tokens / time.widths.of(1 + sum(widths) / count)


@given(CHANCES, RATIOS, st.integers(0, 3))
def test_no_other_way_to_share_is_faster(chances: list[list[float]], ratios: list[float], others: int) -> None:
    time, count = ForwardTime(WidthCost(ratios), 1e7), len(chances) + others
    found = tuple(share(chances, count, time))
    best = max(speed(chances, ways, count, time) for ways in product(*(range(len(one) + 1) for one in chances)))
    assert speed(chances, found, count, time) == pytest.approx(best)


def test_a_loaded_engine_gets_fewer_candidates_and_the_most_certain() -> None:
    chances = [[0.9] * 8, [0.4] * 8]
    cheap, dear = (
        ForwardTime(WidthCost([1 + slope * (knot - 1) for knot in (1, 2, 3, 5, 9, 17)]), 1e7) for slope in (0.02, 0.6)
    )
    assert share(chances, 2, cheap)[0] >= 6
    few = share(chances, 2, dear)
    assert few[0] > few[1] == 0
    assert sum(few) < sum(share(chances, 2, cheap))
    assert share([], 5, dear) == [] and share([[], []], 5, dear) == [0, 0]


def test_costs_are_learned_by_level_of_load() -> None:
    costs = BatchCosts()
    for number in range(300):
        for count, slope in ((2, 0.01), (32, 0.8)):
            candidates = count * (number % 4)
            costs.observe(count, candidates, 1e7 * (1 + slope * candidates / count))
    assert costs.of(2).widths.of(4) == pytest.approx(1.03, abs=0.1)
    assert costs.of(32).widths.of(4) == pytest.approx(3.4, rel=0.15)
    assert share([[0.5] * 4] * 32, 32, costs.of(32)) == [0] * 32
    assert sum(share([[0.5] * 4] * 2, 2, costs.of(2))) >= 4
