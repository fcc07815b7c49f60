"""Model servers that start at the same time: they load together, and one at a time measures."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import pytest

from draftbridge import Client
from services.cli.processes import configured_environment, fleet
from services.engines import together
from tests.support.engine_package import install_engine

pytestmark = pytest.mark.skipif(not together.possible, reason="the system has no locks of files for processes")

# Enters a context at each line that names one, and leaves the innermost at each other line.
SCRIPT = """
import sys
from contextlib import ExitStack
from services.engines import measuring, together

entered = {"loading": together.loading, "measuring": together.measuring, "alone": lambda: measuring.alone(600.0)}
stacks = []
for line in sys.stdin:
    if enter := entered.get(line.strip()):
        stacks.append(ExitStack())
        stacks[-1].enter_context(enter())
    else:
        stacks.pop().close()
    print(line.strip(), flush=True)
"""
# How long something is expected not to happen.
WHILE = 0.3


class Server:
    """A process that stands for a model server that starts."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._done.put(line.strip())

    def begin(self, step: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def done(self, step: str) -> None:
        assert self._done.get(timeout=60) == step

    def do(self, *steps: str) -> None:
        for step in steps:
            self.begin(step)
            self.done(step)

    def waits(self, seconds: float = WHILE) -> bool:
        """Whether the step that has begun is not done within this time."""
        try:
            self._done.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


@contextmanager
def server(environment: dict[str, str]) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of servers that start together."""
    (tmp_path / "lock").touch()
    return {together.LOCK: str(tmp_path / "lock"), "DRAFTBRIDGE_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def pair(variables: dict[str, str]) -> Iterator[tuple[Server, Server]]:
    with server(variables) as one, server(variables) as other:
        yield one, other


def test_servers_load_together_and_measure_alone(pair: tuple[Server, Server]) -> None:
    one, other = pair
    one.do("loading")
    other.do("loading")
    one.do("end")
    one.begin("measuring")
    assert one.waits(), "the other one loads"
    other.do("end")
    one.done("measuring")
    other.begin("loading")
    assert other.waits(), "the other one measures"
    one.do("end")
    other.done("loading")


def test_a_server_that_measured_in_the_middle_of_loading_goes_on_loading(pair: tuple[Server, Server]) -> None:
    one, other = pair
    one.do("loading", "measuring", "end")
    other.begin("measuring")
    assert other.waits()
    one.do("end")
    other.done("measuring")


@pytest.mark.parametrize("step", ["measuring", "alone"])
def test_two_that_want_to_measure_while_both_load_take_turns(pair: tuple[Server, Server], step: str) -> None:
    one, other = pair
    one.do("loading")
    other.do("loading")
    one.begin(step)
    assert one.waits(), "the other one loads"
    other.begin(step)  # which gives way, and then either of them may be the first
    tried = cycle(pair)
    first = next(server for server in tried if not server.waits(0.01))
    second = next(tried)
    assert second.waits()
    first.do("end", "end")
    second.done(step)


def test_a_server_that_is_killed_holds_up_nobody(pair: tuple[Server, Server]) -> None:
    one, other = pair
    one.do("loading")
    other.begin("measuring")
    assert other.waits()
    one.process.kill()
    other.done("measuring")


@pytest.mark.parametrize("path", ["", "missing", "."])
def test_without_a_file_nobody_waits(variables: dict[str, str], tmp_path: Path, path: str) -> None:
    named = {together.LOCK: str(tmp_path / path) if path else ""}
    with server(variables | named) as one, server(variables | named) as other:
        one.do("loading", "measuring", "end")
        other.do("measuring", "alone")


# Two servers open it only if both do so at the same time, and it is used for nothing else meanwhile.
ENGINE = """
import os, time
from pathlib import Path
from services.engines.torch.spec import TORCH
from dataclasses import replace

PLACE = Path(__file__).parent

def opening():
    return list(PLACE.glob("opening-*"))

class Together:
    name = "together"

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def forward(self, rows):
        if opening():
            (PLACE / "disturbed").touch()
        return self._engine.forward(rows)

def open_(path, options):
    (PLACE / f"opening-{os.getpid()}").touch()
    end = time.monotonic() + 120
    while len(opening()) + len(list(PLACE.glob("opened-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)  # until the other server has come
    opened = Together(TORCH.open(path, options))
    try:
        (PLACE / "first").mkdir()
    except FileExistsError:
        time.sleep(1.5)  # the first one, which has opened its model, could measure now
    (PLACE / f"opening-{os.getpid()}").rename(PLACE / f"opened-{os.getpid()}")
    if time.monotonic() >= end:
        raise TimeoutError("the other server does not open its model at the same time")
    return opened

SPEC = replace(TORCH, name="together", open=open_)
"""


def test_target_and_draft_of_a_fleet_load_together(
    tmp_path: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, "together", ENGINE, monkeypatch)
    monkeypatch.setenv(together.LOCK, "one of another fleet, which has ended")
    options = ("--engine", "together", "--dtype", "float32", "--threads", "1")
    target, draft = map(str, tiny_models)
    with ExitStack() as stack:
        running = stack.enter_context(fleet(target, draft, target_options=options, draft_options=options))
        assert len(list(tmp_path.glob("opened-*"))) == 2
        assert not (tmp_path / "disturbed").exists()
        client = stack.enter_context(Client(running.bridge))
        assert client.generate("The quick", max_tokens=6).finished.usage.generated_token_count == 6


def test_the_variable_of_another_fleet_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(together.LOCK, "one of another fleet, which has ended")
    assert together.LOCK not in configured_environment()
