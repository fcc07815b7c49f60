"""The torch engine against transformers, in float32, over families, batches and rollbacks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bridge.errors import UnusableModel
from services.engine.engine import Row
from services.engine.torch_engine import TorchEngine
from tests.engine_contract import EngineContract, expected, saved

SMALL = {"vocab_size": 120, "max_position_embeddings": 256}
LLAMA_LIKE = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
FAMILIES = {
    "llama": transformers.LlamaConfig(**LLAMA_LIKE),
    "mistral": transformers.MistralConfig(**LLAMA_LIKE, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen3": transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=8, sliding_window_pattern=3),
    "phi3": transformers.Phi3Config(**LLAMA_LIKE, pad_token_id=0),
    "gpt2": transformers.GPT2Config(vocab_size=120, n_positions=256, n_embd=32, n_layer=2, n_head=4),
    "opt": transformers.OPTConfig(
        vocab_size=120, max_position_embeddings=256, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, word_embed_proj_dim=32,
    ),
    # Scores that are limited, and a score for nothing at all.
    "gemma2": transformers.Gemma2Config(
        **LLAMA_LIKE, head_dim=8, sliding_window=8, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt_oss": transformers.GptOssConfig(
        **LLAMA_LIKE, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN
    ),
    "gpt_bigcode": transformers.GPTBigCodeConfig(vocab_size=120, n_positions=256, n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[torch.nn.Module, TorchEngine]]:
    directory = tmp_path_factory.mktemp(request.param)
    model = saved(FAMILIES[request.param], directory)
    yield model, TorchEngine(directory, dtype="float32", slot_count=3)


class TestTorch(EngineContract):
    """Over all families."""


def test_bfloat16_is_close(tmp_path: Path) -> None:
    model = saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="bfloat16", slot_count=1)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    np.testing.assert_allclose(logits, expected(model, [1, 2, 3, 4]), atol=0.05)
    assert engine.dtype == "bfloat16"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, TorchEngine]:
    directory = tmp_path_factory.mktemp("compiled")
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE | {"num_hidden_layers": 1}), directory)
    return model, TorchEngine(directory, dtype="float32", slot_count=3, compiled=True)


@pytest.mark.parametrize("counts", [(1,), (5,), (3, 1, 4), (16,), (1, 1, 1), (12, 30)])
def test_a_compiled_model_gives_the_models_own_logits(
    compiled: tuple[torch.nn.Module, TorchEngine], counts: tuple[int, ...]
) -> None:
    """At widths that are compiled, filled up, and too many for it; behind tokens that lie in the cache."""
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


def test_positions_mean_the_same_however_long_the_text_gets(tmp_path: Path) -> None:
    """Phi-3's longrope turns all positions by other factors beyond its first length: longer texts are not served."""
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
    model = saved(FAMILIES["gemma3"], tmp_path)
    engine = TorchEngine(tmp_path, device="cuda", dtype="float32", slot_count=1)
    logits = engine.forward([Row(0, 0, tuple(range(1, 30)), 0)])[0]
    np.testing.assert_allclose(logits, expected(model, list(range(1, 30))), atol=1e-3)
