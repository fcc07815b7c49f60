"""Tests the comparison of two sequences from their beginning."""

from itertools import takewhile

from hypothesis import example, given
from hypothesis import strategies as st

from bridge.text.common_prefix import common_prefix_length

SEQUENCES = st.one_of(*(st.lists(st.sampled_from((1, 2)), max_size=40).map(kind) for kind in (list, tuple, bytes)))


@given(SEQUENCES, SEQUENCES)
@example([1, 2], (1, 2))
@example(b"ab", [97, 98, 99])
def test_it_is_the_number_of_equal_items_from_the_start(left: list[int], right: list[int]) -> None:
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    assert common_prefix_length(left, right) == expected


@given(SEQUENCES, st.integers(0, 40))
def test_a_part_is_a_prefix_of_the_whole(whole: list[int], count: int) -> None:
    assert common_prefix_length(whole, list(whole[:count])) == min(count, len(whole))
