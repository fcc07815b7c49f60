"""How threads of a forward wait for one another and where they run, as a server's OpenMP library and Linux report it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftbridge import Client
from services.cli.processes import READY, fleet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")

_SET_HERE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES")
_PLAIN = {name: value for name, value in os.environ.items() if name not in _SET_HERE}


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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
@pytest.mark.parametrize(
    ("options", "environment", "bound"),
    [((), {}, True), (("--threads", "1"), {}, False), ((), {"OMP_PROC_BIND": "false"}, False)],
    ids=["a thread for each core", "fewer", "a user decides"],
)
def test_threads_for_all_cores_are_bound_to_them(
    tiny_models: tuple[Path, Path],
    options: tuple[str, ...],
    environment: dict[str, str],
    bound: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in _SET_HERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    allowed = os.sched_getaffinity(0)
    with (
        fleet(str(tiny_models[0]), None, target_options=("--device", "cpu", *options)) as running,
        Client(running.bridge) as client,
    ):
        client.generate("The quick brown", max_tokens=4)
        pid = running.processes["target"].pid
        cores = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
        assert os.sched_getaffinity(pid) == allowed, "the main thread may use all cores"
    assert {min(one) for one in cores if len(one) == 1} == (allowed if bound else set())


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
        "import os; from services.engines.openmp import bind_threads, load_torch; bind_threads('cpu', None)\n"
        f"before = os.sched_getaffinity(0); load_torch(); import services.engines.{module}\n"
        "assert os.sched_getaffinity(0) == before and os.environ.get('OMP_PROC_BIND') == 'true'\n"
        "from services.engines.openmp import environment_before\n"
        "assert not {'OMP_PROC_BIND', 'OMP_PLACES'} & set(environment_before())"
    )
    subprocess.run([sys.executable, "-c", program], env=_PLAIN, check=True, timeout=120)
