"""Tests pinning a process to cores."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bridge.errors import InvalidField
from services.config import ModelServerConfig
from services.engines import cpu
from services.engines.affinity import pin
from services.model import server
from services.model.server import pinned_options

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes")


@pytest.fixture(autouse=True)
def restored() -> object:
    """Gives this process's threads their cores back."""
    allowed = os.sched_getaffinity(0)
    yield
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), allowed)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with two nodes of two cores with two hyper-threads each; this process's first core is in node 0."""
    first = min(os.sched_getaffinity(0))
    for node, cores in enumerate([(first, first + 1000), (first + 2000, first + 3000)]):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(",".join(map(str, cores)) + "\n")
        for core in cores:
            topology = tmp_path / "cpu" / f"cpu{core}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{cores[0]},{cores[1]}\n")
    return tmp_path


def test_all_threads_of_a_process_are_pinned() -> None:
    first = min(os.sched_getaffinity(0))
    script = (
        "import os, threading, numpy; from pathlib import Path; from services.engines.affinity import pin\n"
        "wait = threading.Event(); thread = threading.Thread(target=wait.wait); thread.start()\n"
        f"pin('{first}')\n"
        "print([os.sched_getaffinity(int(one.name)) for one in Path('/proc/self/task').iterdir()]); wait.set()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    assert {core for cores in ast.literal_eval(done.stdout) for core in cores} == {first}


def test_a_thread_that_ends_meanwhile_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    first, pinned = min(os.sched_getaffinity(0)), []

    def set_affinity(task: int, cores: frozenset[int]) -> None:
        pinned.append(task)
        if len(pinned) == 1:
            raise ProcessLookupError

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int)
        assert pin(str(first)) == {first}
        assert len(pinned) == len(list(Path("/proc/self/task").iterdir()))


def test_a_node_is_its_physical_cores(system: Path) -> None:
    first = min(os.sched_getaffinity(0))
    assert pin("numa:0", system) == {first}
    assert os.sched_getaffinity(0) == {first}


def test_a_part_of_a_node_is_enough(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have a part of a node, of which some cores have only their second hyper-thread."""
    first = min(os.sched_getaffinity(0))
    (system / "node" / "node0" / "cpulist").write_text(f"{first},{first + 1},{first + 1000}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {first + 1000})
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: pinned.append(cores))
    assert pin("numa:0", system) == {first + 1000}
    assert set(pinned) == {frozenset({first + 1000})}


def test_a_pinned_server_computes_with_a_thread_for_each_core() -> None:
    first = str(min(os.sched_getaffinity(0)))
    assert pinned_options(ModelServerConfig(model="any", cpu_affinity=first)).threads == 1
    assert pinned_options(ModelServerConfig(model="any", cpu_affinity=first, threads=3)).threads == 3
    assert pinned_options(ModelServerConfig(model="any")).threads in (None, cpu.core_quota())


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_processor_time_of_a_container_is_counted_in_cores(
    files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu.core_quota(tmp_path) == cores


@pytest.mark.parametrize(("cores", "threads"), [(4, 1), (1, None)])
def test_a_server_in_a_container_computes_with_as_many_threads_as_it_has_time_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int | None
) -> None:
    """Where the limit is not below the physical cores, engines keep their own number, which is that of these."""
    for module in (cpu, server):
        monkeypatch.setattr(module, "core_quota", lambda: 1)
    monkeypatch.setattr(server, "physical_core_count", lambda: cores)
    assert cpu.core_count() == 1
    assert pinned_options(ModelServerConfig(model="any")).threads == threads
    assert pinned_options(ModelServerConfig(model="any", threads=3)).threads == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("numa:2", r"the number of a node \(0, 1\)"),
        ("numa:1", "that this process may use"),
        ("99999", "that this process may use"),
        ("0-", "numbers of cores as 0-7,16"),
        ("x", "numbers of cores as 0-7,16"),
        ("3-2", "that this process may use"),
    ],
)
def test_other_texts_are_refused(text: str, words: str, system: Path) -> None:
    with pytest.raises(InvalidField, match=words):
        pin(text, system)
