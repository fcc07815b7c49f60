"""Tests the forwards before the first request: which there are, and how long an engine is warmed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bridge.sampling.sampler import Logits, SamplingParameters
from services.config import ModelServerConfig
from services.engines.engine import Row, measure, warm
from services.engines.observer import UNOBSERVED
from services.engines.registry import engine_spec
from services.model import host
from services.model.server import _load
from tests.support.watched import Watched


class Timed:
    """An engine whose first forward of a width takes `first_ms`, and each later one `later_ms`."""

    name, dtype = "timed", "float32"
    vocabulary_size, slot_count, context_length, cache_byte_count, logit_tolerance = 8, 1, 64, 0, 0.0

    def __init__(self, device: str, first_ms: int, later_ms: int) -> None:
        self.device, self.first_ms, self.later_ms = device, first_ms, later_ms
        self.widths: list[int] = []
        self.now_ns = 0

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        width = len(rows[0].token_ids)
        self.now_ns += 1_000_000 * (self.later_ms if width in self.widths else self.first_ms)
        self.widths.append(width)
        return [np.zeros((width, self.vocabulary_size), np.float32)]

    def copy(self, source: int, target: int, token_count: int) -> None:
        raise AssertionError("warming copies nothing")


@pytest.mark.parametrize(
    ("device", "first_ms", "later_ms", "warmed"),
    [
        ("cuda", 100, 100, 25),  # fast: all widths in less than 5 s
        ("cuda", 1000, 100, 25),  # kernels are prepared: worth any time
        ("cuda", 1000, 1000, 6),  # nothing is prepared: it ends at the first width after 5 s
        ("CPU", 140, 100, 25),
        ("CPU", 1000, 700, 4),
        ("cpu", 110, 100, 4),  # nothing is prepared: three widths show it
    ],
)
def test_warming_goes_on_as_long_as_it_gains_something(device: str, first_ms: int, later_ms: int, warmed: int) -> None:
    engine = Timed(device, first_ms, later_ms)
    warm(engine, range(1, 26), lambda: engine.now_ns)
    assert sorted(set(engine.widths)) == list(range(1, warmed + 1))


def test_of_a_slow_engine_forwards_of_one_and_of_eight_tokens_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Timed("cpu", 2600, 2600)
    monkeypatch.setattr("services.engines.engine.perf_counter_ns", lambda: engine.now_ns)
    assert [width for width, _ in measure(engine, all_logits=True)] == [1, 8]


@pytest.mark.parametrize(("disturbed", "warmed"), [((3,), 5), ((2, 4), 6), ((2, 3, 4), 25)])
def test_other_work_during_one_forward_does_not_prolong_warming(disturbed: tuple[int, ...], warmed: int) -> None:
    class Disturbed(Timed):
        def forward(self, rows: Sequence[Row]) -> list[Logits]:
            width = len(rows[0].token_ids)
            self.now_ns += 100_000_000 * (width in disturbed and width not in self.widths)
            return super().forward(rows)

    engine = Disturbed("cpu", 100, 100)
    warm(engine, range(1, 26), lambda: engine.now_ns)
    assert sorted(set(engine.widths)) == list(range(1, warmed + 1))


def test_a_second_forward_that_was_disturbed_does_not_end_warming() -> None:
    """Kernels are prepared at each first forward, and other work makes some second ones as slow."""

    class Disturbed(Timed):
        def forward(self, rows: Sequence[Row]) -> list[Logits]:
            width = len(rows[0].token_ids)
            self.now_ns += 500_000_000 * (width in (2, 3, 5) and width in self.widths)
            return super().forward(rows)

    engine = Disturbed("cpu", 200, 100)
    warm(engine, range(1, 26), lambda: engine.now_ns)
    assert max(engine.widths) == 25


def test_each_width_is_met_once_and_only_those_that_fit() -> None:
    engine = Watched()
    engine.context_length, engine.device = 5, "cuda"
    warm(engine, range(1, 9))
    assert [len(row.token_ids) for (row,) in engine.forwards] == [1, 2, 3, 4, 5]
    assert all(row.keep == row.logits_from == 0 for (row,) in engine.forwards)


def test_no_forward_without_a_text_repeats_an_id() -> None:
    """One repeated id is unlike any text: it has no place in the statistics of FP8."""
    engine = Watched()
    warm(engine, range(1, 26))
    measure(engine, all_logits=True)
    for (row,) in engine.forwards:
        assert len(set(row.token_ids)) >= min(len(row.token_ids), engine.vocabulary_size // 2)


def test_a_served_model_has_its_noise_keys_before_the_first_request(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 262,144 ids take most of a second, in which the event loop would serve nobody."""
    directory, _ = tiny_models
    config = ModelServerConfig(model=str(directory), threads=1, slots=1)
    opening = partial(engine_spec("torch").open, directory, config.options)
    loaded = _load(config, opening, directory, lambda text: None, UNOBSERVED)

    def token_keys(*_: object) -> None:
        raise AssertionError("the keys are computed during a request")

    monkeypatch.setattr(host, "token_keys", token_keys)
    try:
        loaded.sampler(SamplingParameters(), 0)
    finally:
        loaded.scheduler.close()
