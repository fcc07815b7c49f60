"""llama.cpp, by the same contract as every engine, and with the real models."""

from pathlib import Path

import numpy as np
import pytest
import transformers

from bridge.errors import UnusableModel
from services.engine.engine import Row
from services.model.store import resolve_gguf
from tests import gguf
from tests.engine_contract import EngineContract, saved
from tests.test_engine import LLAMA_LIKE

# An extra that is built from source; `make test-engines` installs it and runs this file.
pytest.importorskip("llama_cpp", reason="the llamacpp extra is not installed: make test-engines")

from services.engine.llamacpp_engine import LlamaCppEngine


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnusableModel, match="check that the file is whole"):
        LlamaCppEngine(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    directory = tmp_path_factory.mktemp("llamacpp")
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE), directory)
    gguf.write(model, directory / "model.gguf")
    return model, LlamaCppEngine(resolve_gguf(str(directory)), threads=1, slot_count=3)


class TestLlamaCpp(EngineContract):
    """A tiny Llama in float32; keys and values are float16."""

    tolerance = 5e-3


def test_memory_is_a_budget(pair: tuple, tmp_path: Path) -> None:
    model, engine = pair
    gguf.write(model, tmp_path / "model.gguf")
    token_bytes = engine.cache_byte_count // 3 // 256
    with pytest.raises(UnusableModel, match="--kv-memory"):
        LlamaCppEngine(tmp_path / "model.gguf", slot_count=3, cache_byte_limit=3 * 255 * token_bytes)


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_real_models_roll_back_and_share(name: str) -> None:
    """Widths round differently; what is cut, copied and batched must not differ by more than that."""
    engine = LlamaCppEngine(resolve_gguf(name), threads=2, slot_count=3, cache_byte_limit=1 << 29)
    ids = tuple(np.random.default_rng(0).integers(1000, 9000, 40).tolist())
    whole = engine.forward([Row(0, 0, ids, 30)])[0].copy()
    engine.forward([Row(1, 0, (*ids[:32], 5, 6, 7), 35)])
    engine.copy(1, 2, 20)
    cut, copied = engine.forward([Row(1, 32, ids[32:], 0), Row(2, 20, ids[20:], 10)])
    for logits, reference in ((cut, whole[2:]), (copied, whole)):
        assert np.linalg.norm(logits - reference) < 0.05 * np.linalg.norm(reference)
