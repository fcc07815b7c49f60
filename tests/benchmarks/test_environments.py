"""Tests the arithmetic of `benchmarks.environments`."""

from rich.console import Console

from benchmarks.environments import SIZES, parse, table


def test_a_way_is_a_name_and_settings() -> None:
    assert parse("plain") == ("plain", {})
    assert parse("both: LD_PRELOAD=/a=b affinity=0-1") == ("both", {"LD_PRELOAD": "/a=b", "affinity": "0-1"})


def test_speeds_are_relative_to_the_first_way() -> None:
    samples = {
        "plain": [dict.fromkeys(SIZES, 10.0), dict.fromkeys(SIZES, 12.0), dict.fromkeys(SIZES, 90.0)],
        "fast": [dict.fromkeys(SIZES, 6.0), dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, 8.0)],
    }
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(samples))
    assert "12.0 (1.00x)" in captured.get()
    assert "6.0 (2.00x)" in captured.get()
