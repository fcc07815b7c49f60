"""Model servers that start at the same time: they load together, and one at a time measures."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.engines import together

pytestmark = pytest.mark.skipif(not together.supported, reason="the system has no locks of files for processes")

# Reports when each step began and ended, on the clock that all processes share.
SCRIPT = """
import sys, time
from services.engines import together

def step(name, turn):
    with turn():
        began = time.monotonic()
        time.sleep(0.3)  # the work
        if name == "load, and measure meanwhile":
            step("measure", together.measuring)
            time.sleep(0.3)  # more of it
        print(name, began, time.monotonic(), flush=True)

print("ready", flush=True)
sys.stdin.readline()
for name in sys.argv[1:]:
    step(name, together.measuring if name == "measure" else together.loading)
"""


def begin(process: "subprocess.Popen[str]") -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def started(steps: Sequence[str], file: Path | None) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *steps],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)} | ({together.LOCK: str(file)} if file else {}),
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def spans(*plans: Sequence[str], file: Path | None) -> list[list[tuple[str, float, float]]]:
    """Runs processes with these steps, and returns the name, begin and end of each step of each process."""
    processes = [started(steps, file) for steps in plans]
    found = []
    for process in processes:
        begin(process)
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        lines = [line.rsplit(" ", 2) for line in out.splitlines()]
        found.append([(name, float(began), float(ended)) for name, began, ended in lines])
    return found


def overlap(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    return one[1] < other[2] and other[1] < one[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def test_servers_load_together_and_measure_alone(file: Path) -> None:
    first, second = spans(["load"] * 3 + ["measure"], ["load", "measure"], file=file)
    assert any(overlap(one, other) for one in first[:3] for other in second[:1])
    for measured, others in ((first[3], second), (second[1], first)):
        assert not any(overlap(measured, other) for other in others)


def test_what_is_measured_in_the_middle_of_loading_is_alone_too(file: Path) -> None:
    first, second = spans(["load, and measure meanwhile"] * 2, ["load", "measure"] * 2, file=file)
    inner = [span for span in first if span[0] == "measure"]
    assert len(inner) == 2
    assert not any(overlap(measured, other) for measured in inner for other in second)
    # Afterwards it loads again, so that nobody else measures before it ends.
    after = [
        (name, begin, end)
        for (_, _, begin), (name, _, end) in zip(inner, [span for span in first if span not in inner], strict=True)
    ]
    assert not any(overlap(loaded, other) for loaded in after for other in second if other[0] == "measure")


def test_a_server_that_is_killed_holds_up_nobody(file: Path) -> None:
    dead = started(["load"] * 1000, file)
    assert dead.stdout
    with dead, dead.stdout:
        begin(dead)
        dead.stdout.readline()
        dead.kill()
    assert spans(["measure"], file=file)[0][0][0] == "measure"


def test_a_server_that_starts_alone_waits_for_nobody() -> None:
    first, second = spans(["measure"] * 3, ["measure"] * 3, file=None)
    assert any(overlap(one, other) for one in first for other in second)
