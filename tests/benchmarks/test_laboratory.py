"""Compares the loop and the policy in virtual time, where costs and distances are known, with simulations."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recorded
from benchmarks.scripted import Pair
from benchmarks.simulate import MODES, PAIRS, VIRTUAL, row, traced
from bridge.planning.planner import Mode
from tests.support.depth import DEEP


@pytest.mark.parametrize(
    ("pair", "round_trip_ms"),
    [
        (PAIRS[0], 0),
        (PAIRS[1], 10),
        (PAIRS[2], 100),
        *(((PAIRS[3], 10), (PAIRS[0], 50), (PAIRS[2], 10)) if DEEP else ()),
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


TRACES = recorded.read(Path(recorded.__file__).with_name("trace.json"))
QWEN, SMOLLM = "qwen2.5-coder-1.5b-instruct", "smollm2-135m-instruct"


def test_every_ordered_pair_of_the_four_real_models_is_recorded() -> None:
    models = {one.target for one in TRACES.values()}
    assert len(models) == 4
    assert set(TRACES) == {f"{target} <- {draft}" for target in models for draft in models if target != draft}


@pytest.mark.parametrize(
    ("name", "pair", "round_trip_ms"),
    [
        (f"{QWEN} <- {SMOLLM}", PAIRS[0], 0),
        (f"gemma-3-270m <- {SMOLLM}", PAIRS[2], 50),
        *((name, pair, 10) for name in TRACES for pair in (PAIRS if DEEP else ())),
    ],
)
def test_the_automatic_mode_never_loses_where_a_real_draft_is_right(name: str, pair: Pair, round_trip_ms: int) -> None:
    found = row(replace(traced(pair, TRACES[name]), round_trip_ms=round_trip_ms), 600, VIRTUAL)
    assert found["auto"] > 0.97 * max(found["lockstep"], found["opportunistic"], 1.0)


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        (f"{QWEN} <- {SMOLLM}", PAIRS[0]),
        (f"gemma-3-270m <- {QWEN}", PAIRS[2]),
        *((name, pair) for name in TRACES for pair in (PAIRS if DEEP else ())),
    ],
)
def test_the_first_request_of_a_bridge_loses_little(name: str, pair: Pair) -> None:
    found = row(replace(traced(pair, TRACES[name]), round_trip_ms=10), 96, VIRTUAL, learning=0)
    assert found["auto"] > 0.90 * max(found["lockstep"], found["opportunistic"], 1.0)
