"""Model directories whose loading would run code are refused; the code would create a file."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bridge.errors import UnusableModel
from services.cli.processes import ProcessFailed, serve
from services.engines.torch.model import load_model


class _Payload:
    """Unpickling creates the file."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> object:
        return Path.touch, (self._trace,)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "code-has-run"


@pytest.fixture
def directory(tiny_models: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models[0], tmp_path / "model"))


def with_python(directory: Path, trace: Path) -> None:
    """Creates the configuration and the model classes of the directory."""
    for name, base in (("configuration", "LlamaConfig"), ("modeling", "LlamaForCausalLM")):
        (directory / f"{name}_evil.py").write_text(
            f"from pathlib import Path\nfrom transformers import {base}\nPath({str(trace)!r}).touch()\n"
            f"class Evil{base}({base}):\n    model_type = 'evil'\n"
        )
    config = json.loads((directory / "config.json").read_text())
    auto = {
        "AutoConfig": "configuration_evil.EvilLlamaConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilLlamaForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": auto}))


def with_pickle(directory: Path, trace: Path) -> None:
    torch.save({"weight": _Payload(trace)}, directory / "pytorch_model.bin")


def test_python_of_a_directory_is_not_run(
    directory: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_python(directory, trace)
    with pytest.raises(ProcessFailed), serve(str(directory), "--threads", "1"):
        pass
    assert "--trust-model, with --engine torch or habana, runs it" in " ".join(capfd.readouterr().err.split())
    with pytest.raises(UnusableModel, match="needs Python code of its directory"):
        load_model(directory, torch.float32)
    assert not trace.exists()
    # With the flag the code runs, so that the file shows what the refusal prevents.
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(UnusableModel):
        load_model(directory, torch.float32, trusted=True)
    assert trace.exists()


def test_pickled_weights_are_not_read(directory: Path, trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with_pickle(directory, trace)
    load_model(directory, torch.float32)  # beside safetensors, they are ignored
    for file in directory.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ProcessFailed), serve(str(directory), "--threads", "1"):
        pass
    assert "has no weights in safetensors" in " ".join(capfd.readouterr().err.split())
    assert not trace.exists()
    torch.load(directory / "pytorch_model.bin", weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../elsewhere/model.safetensors", ["a", "list"]])
def test_an_index_names_only_safetensors_of_the_directory(directory: Path, trace: Path, name: object) -> None:
    with_pickle(directory, trace)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(UnusableModel, match="not safetensors of this directory"):
        load_model(directory, torch.float32)
    assert not trace.exists()


def test_an_adapter_does_not_choose_another_model(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(UnusableModel, match="is an adapter"):
        load_model(directory, torch.float32)
