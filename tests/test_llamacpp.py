"""llama.cpp, by the same contract as every engine, and with the real models."""

from pathlib import Path

import pytest
import transformers

from bridge.errors import UnusableModel
from draftbridge import Client
from services.model.store import resolve_gguf
from services.processes import fleet
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
def test_two_gguf_models_say_the_same_in_every_mode() -> None:
    """In processes of their own; a deterministic target, because quantized arithmetic differs by width."""
    options = ("--engine", "llamacpp", "--threads", "1", "--kv-memory", "0.5")
    with (
        fleet(
            "gemma-3-270m",
            "smollm2-135m-instruct",
            target_options=(*options, "--deterministic"),
            draft_options=options,
        ) as running,
        Client(running.bridge) as client,
    ):
        assert {model.engine for model in client.models()} == {"llamacpp"}
        for temperature in (0.0, 1.0):
            results = {
                mode: client.generate(
                    "The planets are", max_tokens=48, temperature=temperature, seed=2, speculation=mode
                )
                for mode in ("off", "lockstep", "opportunistic")
            }
            assert len({result.token_ids for result in results.values()}) == 1
        assert results["lockstep"].finished.speculation.num_accepted_tokens > 0
