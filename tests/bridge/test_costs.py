"""Tests what forwards cost by their number of tokens."""

import random

import pytest

from bridge.measuring.costs import Ewma, ForwardTime, WidthCost
from tests.support.simulated import FLAT, HOPELESS, MS, STEEP, measured


def test_an_average_begins_with_its_first_value() -> None:
    average = Ewma(100.0)
    average.observe(10.0)
    assert average.value == 10.0
    average.observe(20.0)
    assert average.value == 15.0


def test_an_average_of_gains_may_be_negative() -> None:
    average = Ewma(0.0)
    for value in (-3.0, -1.0, 4.0):
        average.observe(value)
    assert average.value == pytest.approx(0.0)


def test_an_average_of_nothing_still_rises() -> None:
    average = Ewma(1.0)
    average.observe(0.0, limit=10.0)
    average.observe(8.0, limit=10.0)
    assert average.value == 4.0


@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_a_forward_costs_what_such_forwards_have_cost(times: dict[int, float]) -> None:
    cost, noise = ForwardTime(WidthCost(), 0.0), random.Random(0)
    for _ in range(600):
        width = noise.choice([1, 1, 1, 2, 3, 5, 9, 17])
        cost.observe(width, times[width] * MS * noise.uniform(0.9, 1.1))
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width) == pytest.approx(times[width] * MS, rel=0.12)


def test_plans_know_the_costs_of_all_widths_as_they_are_now() -> None:
    """They read a table. No forward is expected to be faster than a narrower one, whatever a service measured."""
    costs, noise = WidthCost.measured([(1, 10), (2, 5), (8, 30), (9, 20)]), random.Random(0)
    assert costs.table[:2] == [1.0, 1.0]
    for number in range(200):
        if number % 3 == 0:
            costs.forget(3)
        elif number % 3 == 1:
            costs.observe(noise.randint(2, 30), noise.uniform(0.5, 9.0))
        else:
            costs.scale(noise.uniform(0.9, 1.1))
        assert costs.table == sorted(costs.table) == [costs.of(width) for width in range(1, len(costs.table) + 1)]


def test_what_a_service_measured_is_expected_from_the_start() -> None:
    cost = ForwardTime(WidthCost.measured(measured(STEEP)), STEEP[1] * MS)
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width) == pytest.approx(STEEP[width] * MS, rel=0.05)
    for nonsense in ([], [(5, 7)], [(1, 0), (2, 5)], [(2, 5), (4, 6)]):
        assert WidthCost.measured(nonsense) == WidthCost()
    assert WidthCost.measured([(1, 10), (5, 2), (9, 30)]).of(5) == 1.0, "a wider forward never costs less"


@pytest.mark.parametrize("start", [measured(FLAT), []])
def test_a_slow_read_beyond_the_widths_that_are_kept_does_not_upset_them(start: list[tuple[int, int]]) -> None:
    cost = WidthCost.measured(start)
    before = [cost.of(width) for width in (2, 5, 9)]
    true = FLAT[60] / FLAT[1]
    for place in range(12):
        cost.observe(60, (2 if place == 0 else 1) * true)
        assert 0.5 * true < cost.of(60) < 2.5 * true
        assert [cost.of(width) for width in (2, 5, 9)] == before
    assert cost.of(60) == pytest.approx(true, rel=0.1)


def test_one_forward_that_took_long_does_not_count_for_many() -> None:
    cost = ForwardTime(WidthCost(), 0.0)
    for _ in range(20):
        cost.observe(1, 10 * MS)
    cost.observe(1, 1000 * MS)
    assert cost.of(1) < 13 * MS


def test_what_was_doubted_is_believed_again_when_narrower_forwards_confirm_it() -> None:
    costs = WidthCost.measured(measured(HOPELESS))
    for _ in range(100):
        costs.forget(1)
    assert costs.of(9) < 0.5 * HOPELESS[9] / HOPELESS[1], "a disturbed measurement would be found out"
    for _ in range(10):
        costs.observe(2, HOPELESS[2] / HOPELESS[1])
    for _ in range(200):
        costs.forget(1)
    assert costs.of(9) == pytest.approx(HOPELESS[9] / HOPELESS[1], rel=0.1)


def test_wide_forwards_alone_show_their_own_cost_then_that_of_a_longer_text() -> None:
    """Plain passes made the costs that the service reported doubtful; then a user chose turns of four."""
    cost = ForwardTime(WidthCost.measured(measured(HOPELESS)), HOPELESS[1] * MS)
    for _ in range(100):
        cost.widths.forget(1)
    for _ in range(40):
        cost.observe(5, HOPELESS[5] * MS)
    assert cost.of(5) == pytest.approx(HOPELESS[5] * MS, rel=0.05)
    assert cost.single_ns == pytest.approx(HOPELESS[1] * MS, rel=0.1)
    for _ in range(40):
        cost.observe(5, 2 * HOPELESS[5] * MS)
    assert cost.single_ns == pytest.approx(2 * HOPELESS[1] * MS, rel=0.1)


def test_a_plain_forward_corrects_the_ratios_from_which_its_time_was_inferred() -> None:
    """Wide forwards become as cheap as those of one token; no forward shows which of the two costs has changed."""
    cost = ForwardTime(WidthCost.measured(measured(HOPELESS)), HOPELESS[1] * MS)
    for _ in range(60):
        cost.observe(5, HOPELESS[5] * MS)
    for _ in range(60):
        cost.observe(5, FLAT[5] * MS)
    inferred = cost.single_ns
    assert inferred < 0.3 * FLAT[1] * MS
    cost.observe(1, FLAT[1] * MS)
    assert cost.of(5) == pytest.approx(FLAT[5] * MS, rel=0.05)
    assert cost.single_ns > 1.5 * inferred


def test_a_plain_forward_under_another_load_leaves_its_ratios_alone() -> None:
    quiet, busy = WidthCost.measured(measured(STEEP)), WidthCost.measured(measured(STEEP))
    cost, before = ForwardTime(quiet, STEEP[1] * MS), list(busy.ratios)
    for _ in range(60):
        cost.observe(5, STEEP[5] * MS)
    cost.widths = busy
    cost.observe(1, 3 * STEEP[1] * MS)
    assert busy.ratios == before


def test_widths_between_those_that_were_seen_are_doubted_too() -> None:
    """Otherwise a forward of 9 tokens would never be tried, however cheap 3 and 17 are."""
    costs = WidthCost.measured(measured(HOPELESS))
    for width in (3, 17) * 30:
        costs.observe(width, STEEP[width] / STEEP[1])
    for _ in range(200):
        costs.forget(3)
    assert costs.of(9) == pytest.approx(STEEP[9] / STEEP[1], rel=0.1)
