"""Tests the arithmetic of the load benchmark, and the model that it uses."""

import argparse
from collections import Counter

import numpy as np

from benchmarks import scripted
from benchmarks.load import open_seconds, percentiles, table
from benchmarks.scripted_service import ScriptedServiceEngine, expected
from services.engines.engine import Row


def test_percentiles() -> None:
    assert percentiles([]) == [0.0] * 3
    assert percentiles([7.0]) == [7.0] * 3
    assert percentiles([float(value) for value in range(101)]) == [50.0, 95.0, 99.0]


def test_the_open_loop_lasts_until_enough_requests_have_arrived() -> None:
    given = {"seconds": 8.0, "open_seconds": 70.0}
    assert open_seconds(argparse.Namespace(open_requests=0, **given), 25.0) == 8.0
    assert open_seconds(argparse.Namespace(open_requests=1000, **given), 25.0) == 40.0
    assert open_seconds(argparse.Namespace(open_requests=1000, **given), 3.0) == 70.0


def test_a_table_has_a_cell_for_each_value() -> None:
    rows = [{"clients": 4, "passes/s": 1234.5, "ms": [0.123, 5.0, 60.4], "errors": Counter({"BUSY": 2})}]
    head, rule, row = table(rows).splitlines()
    assert head == "| clients | passes/s | ms | errors |"
    assert rule == "|---|---|---|---|"
    assert row == "| 4 | 1,234 | 0.12 / 5.00 / 60 | 2 BUSY |"


def test_the_scripted_model_generates_the_expected_text_whatever_its_forwards_are() -> None:
    vocabulary = scripted.model().vocabulary
    prompt = [vocabulary.byte_ids[byte] for byte in b"a prompt"]
    right = [vocabulary.byte_ids[byte] for byte in expected("a prompt", 30).encode()]
    engine = ScriptedServiceEngine(2, 0.0, 1.0)
    for width in (1, 4):
        ids = list(prompt)
        (logits,) = engine.forward([Row(0, 0, tuple(ids), len(ids) - 1)])
        ids.append(int(np.argmax(logits[-1])))
        while len(ids) < len(prompt) + 30:
            candidates = right[len(ids) - len(prompt) :][: width - 1]
            (logits,) = engine.forward([Row(0, len(ids) - 1, (ids[-1], *candidates), 0)])
            ids += [int(id_) for id_ in np.argmax(logits, axis=1)]
        assert ids[len(prompt) :][:30] == right


def test_a_draft_is_right_about_as_often_as_it_should_be() -> None:
    target, draft = ScriptedServiceEngine(1, 0.0, 1.0), ScriptedServiceEngine(1, 0.0, 0.8)
    row = Row(0, 0, tuple(scripted.text(1, 2000)), 0)
    (right,), (proposed,) = target.forward([row]), draft.forward([row])
    agreed = np.mean(np.argmax(right, axis=1) == np.argmax(proposed, axis=1))
    assert 0.75 < agreed < 0.85
