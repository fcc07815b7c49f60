"""Times of work, and whether other work on the machine disturbed it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from services.engines import engine as engines
from services.engines.engine import measure
from services.engines.timing import Timing, timed
from services.model.server import _undisturbed
from tests.support.tiny import HashEngine, model

counted = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count how long threads wait")

_BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


def compute(seconds: float = 0.2) -> None:
    """Computes until this thread has had a core for some time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def on_a_core_with_others(count: int) -> Iterator[None]:
    """Keeps this thread to one core, which `count` other processes keep busy."""
    before = os.sched_getaffinity(0)
    core = min(before)
    command = [sys.executable, "-c", _BUSY, str(core)]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    os.sched_setaffinity(0, {core})
    try:
        for other in others:
            assert other.stdout and other.stdout.readline(), "it runs"
        yield
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.communicate()


@counted
def test_work_on_a_core_that_others_use_is_disturbed() -> None:
    with on_a_core_with_others(2):
        found = timed(compute)
    assert found.disturbed and found.taken_ns > 0.2e9


def test_a_thread_that_waits_for_something_else_is_undisturbed() -> None:
    """The sleep is what is timed. Other tests may be running: of many tries, one has a core at once."""
    assert any(not timed(lambda: time.sleep(0.1)).disturbed for _ in range(200))


def test_undisturbed_times_are_better_than_shorter_ones() -> None:
    assert min(Timing(True, 1), Timing(False, 3), Timing(False, 2)) == Timing(False, 2)


class Machine:
    """Stands in for `timed`. `busy`: whether other work goes on during the forward of this number."""

    def __init__(self, busy: Callable[[int], bool]) -> None:
        self._busy, self.count = busy, 0

    def __call__(self, work: Callable[[], object]) -> Timing:
        self.count += 1
        work()
        disturbed = self._busy(self.count)
        return Timing(disturbed, 100 if disturbed else 10)


@pytest.mark.parametrize(
    ("busy", "disturbed", "forwards"),
    [
        (lambda number: False, [], 8),
        (lambda number: number <= 8, [], 11),
        (lambda number: number == 4, [], 8),
        (lambda number: True, [1, 2, 3], 14),
    ],
    ids=["never", "at first", "once", "always"],
)
def test_disturbed_forwards_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, busy: Callable[[int], bool], disturbed: list[int], forwards: int
) -> None:
    machine = Machine(busy)
    monkeypatch.setattr(engines, "timed", machine)
    found = measure(HashEngine(model("byte_level")), all_logits=True, widths=(1, 2, 3))
    assert found == [(width, Timing(width in disturbed, 100 if width in disturbed else 10)) for width in (1, 2, 3)]
    assert machine.count == forwards


def test_all_widths_have_the_same_number_of_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of more tries is shorter. The first forwards, of one token, only warm up."""
    times = iter([1, 1, *[10] * 6])
    monkeypatch.setattr(engines, "timed", lambda work: (work(), Timing(False, next(times)))[1])
    found = measure(HashEngine(model("byte_level")), all_logits=True, widths=(1, 2, 3))
    assert [timing.taken_ns for _, timing in found] == [10, 10, 10]


def test_a_slow_engine_is_measured_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards that tell least are left out, and so are further times of those that were disturbed."""
    now = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(engines, "timed", Machine(lambda number: True))
    monkeypatch.setattr(engines, "perf_counter_ns", lambda: next(now))
    assert [width for width, _ in measure(HashEngine(model("byte_level")), all_logits=True)] == [1, 2, 4, 8, 12, 25]


def test_a_server_reports_only_undisturbed_costs(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Timing(False, 10), Timing(True, 90)
    assert _undisturbed([(1, good), (2, bad), (3, good)]) == ((1, 10), (3, 10))
    assert not caplog.records
    assert _undisturbed([(1, bad), (2, good)]) == ()
    assert "other work kept the cores busy" in caplog.text
