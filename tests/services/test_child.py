"""Child processes run no files of the current directory, which may be a model's, and end with their parent."""

import select
import subprocess
import sys
from pathlib import Path

import pytest

from services.child import command

SERVICES = Path(__file__).parents[2] / "services"


@pytest.mark.parametrize(
    "module", ["services.store.convert", "services.engines.ik_llama.probe", "services.engines.trial", "services.cli"]
)
def test_a_file_beside_a_model_does_not_run(module: str, tmp_path: Path) -> None:
    for name in ("numpy", "torch", "gguf", "json", "pathlib", "typer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)")
    done = subprocess.run(command(module, "--help"), cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode != 77
    assert not (tmp_path / "__pycache__").exists()


def test_there_is_no_other_way_to_start_a_module() -> None:
    found = [file.name for file in SERVICES.rglob("*.py") if '"-m"' in file.read_text()]
    assert found == ["child.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    child = "from services.child import end_with_parent as end; end(); print('ready', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    # What the child waits for never comes: this process holds the other end.
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        process.kill()
        assert select.select([process.stdout], [], [], 5)[0] and not process.stdout.read(), "the child has ended, too"


@pytest.mark.parametrize("name", ["convert", "export", "probe", "trial"])
def test_long_work_of_models_ends_with_its_parent(name: str) -> None:
    files = [file.read_text() for part in ("store", "engines") for file in (SERVICES / part).rglob(f"{name}.py")]
    assert files and all('if __name__ == "__main__":\n    end_with_parent()\n' in text for text in files)
