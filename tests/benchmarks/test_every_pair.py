"""Tests the arithmetic of the benchmark of all pairs."""

from benchmarks.every_pair import Result, Row, rows


def test_results_are_summed_by_pair_and_way() -> None:
    results = [
        Result("a", "b", "auto", 0.0, True, 300, 100, 4),
        Result("a", "c", "auto", 0.0, True, 300, 300, 0),
        Result("a", "b", "auto", 1.0, False, 100, 100, 1),
    ]
    assert rows(results) == [Row("a", "b", "auto", 1, 2, 2.0, 5), Row("a", "c", "auto", 1, 1, 1.0, 0)]
