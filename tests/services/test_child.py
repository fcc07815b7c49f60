"""Child processes run no files of the current directory, which may be a model's, and end with their parent."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from services.child import bound_command, command

SERVICES = Path(__file__).parents[2] / "services"


@pytest.mark.parametrize(
    "module", ["services.store.convert", "services.engines.ik_llama.probe", "services.engines.trial", "services.cli"]
)
def test_a_file_beside_a_model_does_not_run(module: str, tmp_path: Path) -> None:
    for name in ("numpy", "torch", "gguf", "json", "pathlib", "typer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)")
    for words in (command(module, "--help"), bound_command(module, "--help")):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode != 77
    assert not (tmp_path / "__pycache__").exists()


def test_there_is_no_other_way_to_start_a_module() -> None:
    found = [file.name for file in SERVICES.rglob("*.py") if '"-m"' in file.read_text()]
    assert found == ["child.py"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which there is a module `waiting`, which waits for a line of its standard input."""
    (tmp_path / "waiting.py").write_text("import sys; print(*sys.argv[1:], flush=True); input()")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_a_bound_child_ends_with_a_parent_that_is_killed(environment: dict[str, str]) -> None:
    child = "from services.child import bound_command; words = bound_command('waiting', 'ready')"
    parent = [sys.executable, "-c", f"import subprocess; {child}; subprocess.Popen(words).wait()"]
    pipe = subprocess.PIPE
    # What the child waits for never comes: this process holds the other end.
    with subprocess.Popen(parent, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        process.kill()
        assert select.select([process.stdout], [], [], 60)[0] and not process.stdout.read(), "the child has ended, too"


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_a_bound_child_whose_parent_has_ended_does_nothing(environment: dict[str, str]) -> None:
    words = bound_command("waiting", "ready")
    words[words.index(str(os.getpid()))] = "0"
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_long_work_of_models_is_bound() -> None:
    files = [file for part in ("store", "engines") for file in (SERVICES / part).rglob("*.py")]
    assert not [one.name for one in files if "import command" in one.read_text()]


def test_a_server_ends_with_its_parent_while_it_chooses_an_engine() -> None:
    """It may try engines for a minute, or convert a model, before it serves."""
    code = (
        "import threading; from services.config import ModelServerConfig; from services.model import server;"
        "server.choose_engine = lambda *args: threading.Event().wait();"
        "server.run(ModelServerConfig(model='any'), print, print, until_stdin_closes=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == 0
