"""Compares the torch engine with transformers, in float32, over families, batches and rollbacks."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from bridge.errors import UnusableModel
from services.engines.engine import Row, slot_room
from services.engines.torch.compiled import GraphForwards
from services.engines.torch.engine import TorchEngine
from tests.support.depth import DEEP
from tests.support.engine_contract import FAMILIES, LLAMA_LIKE, EngineContract, expected, family, saved


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    model, directory = family(request.param, tmp_path_factory)
    return model, TorchEngine(directory, dtype="float32", slot_count=3)


class TestTorch(EngineContract):
    """Runs the contract over all families."""


class TestByToken(EngineContract):
    """Runs forwards as they are recorded for CUDA, but without recording: their inputs are tensors of a few shapes."""

    @pytest.fixture(scope="class", params=["llama", "gemma3", "gemma2", "gpt_oss", "gpt2"])
    @classmethod
    def pair(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
        model, directory = family(request.param, tmp_path_factory)
        engine = TorchEngine(directory, dtype="float32", slot_count=3)
        engine._fast = GraphForwards(engine._logits, engine._caches, torch.device("cpu"))
        return model, engine


def test_bfloat16_is_close(tmp_path: Path) -> None:
    model = saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="bfloat16", slot_count=1)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    np.testing.assert_allclose(logits, expected(model, [1, 2, 3, 4]), atol=0.05)
    assert engine.dtype == "bfloat16"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[torch.nn.Module, TorchEngine]]:
    directory = tmp_path_factory.mktemp("compiled")
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE | {"num_hidden_layers": 1}), directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engines.torch.compiled._COMPILED_WIDTHS", (8,))  # each takes half a minute
        if not DEEP:  # the model is traced, but no C++ compiled
            patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        yield model, TorchEngine(directory, dtype="float32", slot_count=3, compiled=True)


@pytest.mark.parametrize("counts", [(1,), (5,), (3, 1, 4), (16,), (1, 1, 1), (12, 30)])
def test_a_compiled_model_gives_the_models_own_logits(
    compiled: tuple[torch.nn.Module, TorchEngine], counts: tuple[int, ...]
) -> None:
    """The widths are compiled, padded, or too large to be compiled; all rows follow cached tokens."""
    model, engine = compiled
    texts = [[(7 * slot + index) % 119 + 1 for index in range(10 + count)] for slot, count in enumerate(counts)]
    for slot, text in enumerate(texts):
        engine.forward([Row(slot, 0, tuple(text[:10]), 10)])
    rows = [Row(slot, 10, tuple(text[10:]), 0) for slot, text in enumerate(texts)]
    for text, logits in zip(texts, engine.forward(rows), strict=True):
        np.testing.assert_allclose(logits, expected(model, text)[10:], atol=1e-4)


def test_a_model_that_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(FAMILIES["llama"], tmp_path)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_: 1 / 0)
    with pytest.raises(UnusableModel, match="leave out --compile"):
        TorchEngine(tmp_path, dtype="float32", compiled=True)


def test_weights_in_8_bits_are_close(tmp_path: Path) -> None:
    model = saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=1, int8=True)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    reference = expected(model, [1, 2, 3, 4])
    assert engine.dtype == "int8"
    assert 0 < np.linalg.norm(logits - reference) < 0.05 * np.linalg.norm(reference)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(vocab_size=120, hidden_size=16, num_hidden_layers=1, state_size=4),
        transformers.BloomConfig(vocab_size=120, hidden_size=16, n_layer=1, n_head=2),
    ],
    ids=["recurrent", "alibi"],
)
def test_a_model_that_cannot_be_rolled_back_or_masked_is_refused(
    config: transformers.PretrainedConfig, tmp_path: Path
) -> None:
    saved(config, tmp_path)
    with pytest.raises(UnusableModel, match="Choose a model"):
        TorchEngine(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**LLAMA_LIKE | {"max_position_embeddings": 15}),
        transformers.GPT2Config(vocab_size=120, n_positions=15, n_embd=32, n_layer=2, n_head=4),
    ],
    ids=["mistral", "gpt2"],
)
def test_a_context_shorter_than_the_self_test_is_refused_with_that_reason(
    config: transformers.PretrainedConfig, tmp_path: Path
) -> None:
    saved(config, tmp_path)
    with pytest.raises(UnusableModel, match="context of 15 tokens is shorter than the 16 of the self-test"):
        TorchEngine(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["cuda", "cpu"],
)
def test_a_model_that_does_not_fit_into_memory_is_refused_with_that_reason(error: RuntimeError) -> None:
    refusal = TorchEngine._unusable(SimpleNamespace(slot_count=8, device="cpu"), error)  # type: ignore[arg-type]
    assert "8 sequences do not fit into the memory of cpu" in str(refusal)
    assert "decrease --kv-memory or --slots" in str(refusal)


def test_positions_mean_the_same_however_long_the_text_gets(tmp_path: Path) -> None:
    """Phi-3's longrope rotates all positions by other factors beyond its first length: longer texts are not served."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        **LLAMA_LIKE,
        pad_token_id=0,
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", **factors},
    )
    saved(config, tmp_path)
    assert TorchEngine(tmp_path, dtype="float32").context_length == 64


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path)
    with pytest.raises(UnusableModel, match="--device cpu"):
        TorchEngine(tmp_path, device="cuda:99" if torch.cuda.is_available() else "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_gives_the_same_logits(tmp_path: Path) -> None:
    """Runs forwards directly and as graphs; each width runs twice, as its first forward is the recording."""
    model = saved(FAMILIES["gemma3"], tmp_path)
    ids = list(range(1, 30))
    for compiled in (False, True):
        engine = TorchEngine(tmp_path, device="cuda", dtype="float32", slot_count=2, compiled=compiled)
        for slot in range(2):
            logits = engine.forward([Row(slot, 0, tuple(ids), 0)])[0]
            np.testing.assert_allclose(logits, expected(model, ids), atol=1e-3)
            logits = engine.forward([Row(slot, 20, tuple(ids[20:]), 0)])[0]
            np.testing.assert_allclose(logits, expected(model, ids)[20:], atol=1e-3)


def test_slots_that_are_shorter_than_a_step_are_compiled(tmp_path: Path) -> None:
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE | {"max_position_embeddings": 100}), tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=2)
    engine._fast = GraphForwards(engine._logits, engine._caches, torch.device("cpu"))
    (found,) = engine.forward([Row(1, 0, (1, 2, 3), 0)])
    np.testing.assert_allclose(found, expected(model, [1, 2, 3]), atol=1e-4)


def test_a_graph_that_cannot_be_recorded_later_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out when a longer text comes; the first graph shows whether the model can be recorded at all."""
    model, tried = saved(transformers.LlamaConfig(**LLAMA_LIKE), tmp_path), list[int]()
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=1)
    graphs = engine._fast = GraphForwards(engine._logits, engine._caches, torch.device("cpu"))
    own = graphs._record

    def record(inputs: torch.Tensor, length: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        tried.append(inputs.shape[1])
        if inputs.shape[1] == 4:
            raise UnusableModel("memory has run out")
        return own(inputs, length)

    monkeypatch.setattr(graphs, "_record", record)
    with pytest.raises(UnusableModel, match="memory has run out"):
        engine.forward([Row(0, 0, (1, 2, 3), 0)])
    for ids in ([1, 2], [1, 2, 3], [4, 5, 6]):
        (found,) = engine.forward([Row(0, 0, tuple(ids), 0)])
        np.testing.assert_allclose(found, expected(model, ids), atol=1e-4)
    assert tried == [4, 2, 4]


@pytest.mark.parametrize("byte_count", [-1, 0, 256_000 * 8 - 1])
def test_too_little_memory_for_the_least_context_is_refused(byte_count: int) -> None:
    with pytest.raises(UnusableModel, match="increase --kv-memory"):
        slot_room(1000, 8, byte_count, 4096)
    assert slot_room(1000, 8, 256_000 * 8, 4096) == 256
