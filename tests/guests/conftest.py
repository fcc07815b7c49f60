"""Real engines in environments of their own; `make test-guests` builds them and names them in variables."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import save_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.guests)


def _python_of(engine: str) -> Path:
    variable = f"DRAFTBRIDGE_TEST_{engine.upper()}"
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"{variable} does not name the Python of an environment with {engine}: make test-guests")
    return Path(name)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Returns the Python of an environment with vLLM."""
    return _python_of("vLLM")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Returns the Python of an environment with SGLang."""
    return _python_of("SGLang")


@pytest.fixture(scope="session")
def vllm_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a tiny model whose attention heads are large enough for vLLM."""
    directory = tmp_path_factory.mktemp("models") / "vllm-target"
    # vLLM samples padding ids, which a trained model never has.
    save_tiny_model(directory, "sentencepiece", 0, hidden_size=64, padding=0)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory
