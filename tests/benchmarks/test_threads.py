"""Tests that benchmarks compute with as many threads as they may use cores, not as the machine has."""

import os
from argparse import ArgumentParser
from typing import Any, NoReturn

import pytest

from benchmarks import engines, every_pair, pairs, planner, traces
from services.engines.cpu import core_count


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)


@pytest.mark.parametrize("benchmark", [engines, every_pair, pairs, traces])
def test_threads_by_default(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = []

    def parse_args(parser: ArgumentParser) -> NoReturn:
        defaults.append(parser.get_default("threads"))
        raise SystemExit

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_args)
    with pytest.raises(SystemExit):
        benchmark.main()
    assert defaults == [core_count()]


def test_threads_of_the_planners_settings() -> None:
    assert planner._settings()["c"].target.options[-2:] == ("--threads", str(core_count()))
