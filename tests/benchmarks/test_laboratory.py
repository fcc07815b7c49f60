"""Compares the loop and the policy in virtual time, where costs and distances are known, with simulations."""

from dataclasses import replace

import pytest

from benchmarks.simulate import MODES, PAIRS, VIRTUAL, row
from bridge.planning.planner import Mode
from tests.support.depth import DEEP


@pytest.mark.parametrize(
    ("pair", "round_trip_ms"),
    [
        (PAIRS[0], 0),
        (PAIRS[1], 10),
        (PAIRS[2], 100),
        (PAIRS[3], 10),
        *(((PAIRS[0], 50), (PAIRS[2], 10)) if DEEP else ()),
    ],
    ids=lambda value: f"{value} ms away" if isinstance(value, int) else f"{value.draft_ms:g} of {value.verify_ms:g} ms",
)
def test_no_mode_wastes_time_and_the_automatic_one_never_loses(pair, round_trip_ms: int) -> None:  # type: ignore[no-untyped-def]
    found = row(replace(pair, round_trip_ms=round_trip_ms), 600, VIRTUAL)
    for mode in MODES:
        # The simulated automatic mode knows beforehand which patience is best.
        least = 0.9 if mode is Mode.AUTO else 0.93
        assert found[mode.value] > least * found[f"simulated_{mode.value}"], mode
    assert found["auto"] > 0.97 * max(found["lockstep"], found["opportunistic"], 1.0)
