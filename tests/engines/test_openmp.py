"""How threads of a forward wait for one another, as OpenMP's library reports it, and where they run, as Linux does."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from draftbridge import Client
from services.cli import processes
from services.cli.processes import READY, fleet
from services.engines import cpu, openmp
from services.engines.cpu import core_count
from services.engines.llamacpp import spec
from services.engines.spec import EngineOptions
from tests.conftest import save_tiny_model
from tests.support import gguf, warm
from tests.support.depth import DEEP, deep_only

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")

_SET_HERE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_NUM_THREADS")
_PLAIN = {name: value for name, value in os.environ.items() if name not in _SET_HERE}


def _cold_server(*arguments: str, **options: Any) -> Any:
    """Starts model servers as a user does, because they set OpenMP's variables before they import it."""
    start = warm.cold_start if arguments[0] == "serve" else warm.start
    return start(*arguments, **options)


def _tasks(process: "subprocess.Popen[str]") -> list[Path]:
    """Returns the threads of a process, as Linux shows them."""
    return list(Path(f"/proc/{process.pid}/task").iterdir())


def test_a_server_limits_how_long_they_wait(tiny_models: tuple[Path, Path]) -> None:
    arguments = ("serve", str(tiny_models[0]), "--threads", "2", "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**_PLAIN, "OMP_DISPLAY_ENV": "verbose"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        assert server.stdin and server.stdout
        printed = []
        for line in server.stdout:
            printed.append(line)
            if line.startswith(READY):
                break
        server.stdin.close()
        server.stdout.read()
    assert printed and printed[-1].startswith(READY)
    # More than one OpenMP library may be loaded.
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", "".join(printed))) == {"10000"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the directory of a tiny model that ik_llama can run, which computes with all threads that it gets."""
    directory = save_tiny_model(tmp_path_factory.mktemp("small"), "sentencepiece", 0)
    gguf.write(AutoModelForCausalLM.from_pretrained(directory), directory / "model.gguf")
    return str(directory)


@pytest.mark.skipif(core_count() < 2, reason="this machine has one core")
@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}], ids=["fewer than cores", "a user decides"])
def test_other_threads_are_not_bound(environment: dict[str, str], small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_start", _cold_server)
    for name in _SET_HERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    allowed = os.sched_getaffinity(0)
    count = str(len(allowed)) if environment else "1"
    options = ("--engine", "ik_llama", "--weights", "full", "--device", "cpu", "--threads", count)
    with fleet(small, None, target_options=options) as running, Client(running.bridge) as client:
        client.generate("The quick brown", max_tokens=4)
        tasks = _tasks(running.processes["target"])
        assert {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks} == {frozenset(allowed)}


@pytest.mark.models
@pytest.mark.skipif(core_count() < 2, reason="this machine has one core")
@pytest.mark.parametrize("per_core", [1, 2] if DEEP else [2])
def test_threads_of_a_forward_are_bound_but_not_those_of_forwards_beside_one_another(
    per_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ik_llama each sequence has its own forward. With two threads per core, each of two has a team of threads.

    With a tiny model, forwards beside one another are rare.
    """
    monkeypatch.setattr(processes, "_start", _cold_server)
    for name in _SET_HERE:
        monkeypatch.delenv(name, raising=False)
    allowed = os.sched_getaffinity(0)
    threads = str(per_core * len(allowed))
    options = ("--engine", "ik_llama", "--weights", "full", "--device", "cpu", "--threads", threads)
    with fleet("smollm2-135m-instruct", None, target_options=options) as running, Client(running.bridge) as client:

        def generate(prompt: str) -> None:
            client.generate(prompt, max_tokens=8, ignore_eos=True, speculation="off")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(generate, ("The quick brown", "Once upon a time")))
        target = running.processes["target"]
        assert os.sched_getaffinity(target.pid) == allowed, "the main thread may use all cores"
        tasks = _tasks(target)
        bound = [place for task in tasks if (place := os.sched_getaffinity(int(task.name))) < allowed]
    # Those of a forward that runs alone.
    assert sorted(map(list, bound)) == sorted([one] for one in allowed for _ in range(per_core))


@deep_only
def test_no_thread_of_openvino_is_bound(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It computes with threads of its own. The model is converted first."""
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    monkeypatch.setattr(processes, "_start", _cold_server)
    for name in _SET_HERE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    allowed = os.sched_getaffinity(0)
    options = ("--engine", "openvino", "--device", "cpu", "--threads", str(len(allowed)))
    with processes.serve(str(tiny_models[0]), *options) as (_, server):
        assert {frozenset(os.sched_getaffinity(int(task.name))) for task in _tasks(server)} == {frozenset(allowed)}


@pytest.mark.parametrize("openmp_count", [0, 1])
def test_the_thread_that_starts_those_of_llama_cpp_is_bound_only_beside_openmp(
    openmp_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without OpenMP, llama.cpp's threads have the cores of the one that starts them."""
    pytest.importorskip("llama_cpp")
    from services.engines.llamacpp import engine

    bound: list[bool] = []
    monkeypatch.setattr(spec, "bind_this_thread", lambda: bound.append(True))
    monkeypatch.setattr(engine, "LlamaCppEngine", lambda *given, **named: SimpleNamespace(device="cpu"))
    facts = f"CPU : AVX2 = 1 | OPENMP = {openmp_count} | REPACK = 1 | " if openmp_count else "CPU : AVX2 = 1 | "
    monkeypatch.setattr(engine.llama_cpp, "llama_print_system_info", facts.encode)
    spec.LLAMACPP.open(Path("model.gguf"), EngineOptions())
    assert bound == [True] * openmp_count


@pytest.mark.parametrize(
    ("device", "count", "environment", "places"),
    [
        ("cpu", None, {}, "{0,2},{1,3}"),
        ("auto", None, {}, "{0,2},{1,3}"),
        ("cuda", None, {}, None),
        ("cpu", 1, {}, None),
        ("cpu", 2, {}, "{0,2},{1,3}"),
        ("cpu", 4, {}, "{0},{1},{2},{3}"),
        ("cpu", None, {"OMP_NUM_THREADS": "2"}, None),
        ("cpu", 4, {"OMP_NUM_THREADS": "2"}, "{0},{1},{2},{3}"),
        ("cpu", None, {"OMP_PLACES": "{0}"}, None),
        ("cpu", None, {"GOMP_CPU_AFFINITY": "0 1"}, None),
    ],
)
def test_what_binds_them(
    device: str, count: int | None, environment: dict[str, str], places: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with two cores of two hyper-threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {0, 1, 2, 3})
    monkeypatch.setattr(os, "environ", dict(environment))
    monkeypatch.setattr(openmp, "physical_cores", lambda allowed: [frozenset({0, 2}), frozenset({1, 3})])
    monkeypatch.setattr(cpu, "_ACCELERATORS", ())
    monkeypatch.setattr(openmp, "_bound_to", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    openmp.bind_threads(device, count, compiles=False)
    expected = {"OMP_PROC_BIND": "true", "OMP_PLACES": places} if places else {}
    assert os.environ == environment | expected


def test_nothing_is_bound_for_an_accelerator_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(cpu, "_ACCELERATORS", ("/dev/null",))
    monkeypatch.setattr(openmp, "_bound_to", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    openmp.bind_threads("auto", None, compiles=False)
    assert not os.environ
    openmp.bind_threads("cpu", None, compiles=True)
    assert not os.environ
    openmp.bind_threads("cpu", None, compiles=False)
    assert os.environ["OMP_PROC_BIND"] == "true"


@pytest.mark.parametrize(("given", "used"), [({}, "5"), ({"GOMP_SPINCOUNT": "777"}, "777")])
def test_a_user_decides_how_long_they_wait(given: dict[str, str], used: str) -> None:
    program = "from services.engines.openmp import limit_spinning as l; import os; l(9); l(5); print(os.environ)"
    printed = subprocess.run(
        [sys.executable, "-c", program], env=_PLAIN | given, capture_output=True, text=True, check=True
    )
    assert f"'GOMP_SPINCOUNT': '{used}'" in printed.stdout


@pytest.mark.parametrize("library", ["torch", "llama_cpp", "ik_llama_cpp"])
def test_a_library_that_is_loaded_leaves_other_threads_and_processes_their_cores(library: str) -> None:
    pytest.importorskip(library)
    module = {"torch": "torch.engine", "llama_cpp": "llamacpp.engine", "ik_llama_cpp": "ik_llama.library"}[library]
    program = (
        "import os; from services.engines.openmp import bind_threads, load_torch\n"
        "bind_threads('cpu', None, compiles=False)\n"
        f"before = os.sched_getaffinity(0); load_torch(); import services.engines.{module}\n"
        "assert os.sched_getaffinity(0) == before and os.environ.get('OMP_PROC_BIND') == 'true'\n"
        "from services.child import environment_before\n"
        "assert not {'OMP_PROC_BIND', 'OMP_PLACES'} & set(environment_before())"
    )
    subprocess.run([sys.executable, "-c", program], env=_PLAIN, check=True, timeout=120)
