"""Child processes run no files of the current directory, which may be a model's."""

import subprocess
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
