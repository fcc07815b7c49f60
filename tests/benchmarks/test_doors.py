"""Tests the arithmetic of the benchmark of the doors, and that it runs."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import doors
from benchmarks.doors import summary
from tests.support.depth import deep_only


def test_latencies_of_all_streams_and_the_longest_gap_of_one() -> None:
    streams = [[(0, 2_000_000), (10_000_000, 13_000_000)], [(0, 1_000_000), (30_000_000, 31_000_000)]]
    found = summary(streams)
    assert found["median"] == pytest.approx(1.5) and found["longest gap"] == pytest.approx(30)
    assert found["p99"] >= 2


@deep_only
def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "doors.json"
    options = ["--streams", "2", "--events", "5", "--pace-ms", "5", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["doors", *options])
    doors.main()
    assert set(json.loads(out.read_text())["2"]) == {"grpc", "http", "remote http"}
