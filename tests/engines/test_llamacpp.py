"""Tests llama.cpp by the contract of every engine, and with the real models."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import transformers

from bridge.errors import UnusableModel
from services.engines.engine import Row
from services.store.resolve import resolve_gguf
from tests.support import gguf
from tests.support.engine_contract import (
    LLAMA_LIKE,
    EngineContract,
    check_that_every_mode_says_the_same,
    expected,
    random_ids,
    saved,
)

# An extra that is built from source; `make test-engines` installs it and runs this file.
pytest.importorskip("llama_cpp", reason="the llamacpp extra is not installed: make test-engines")

import llama_cpp

from services.engines.llamacpp.engine import LlamaCppEngine, _amx_problem, model_options


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnusableModel, match=r"check that the file is whole.*give --engine torch a directory"):
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


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, ""), (-11, "crash in this build"), (-9, "for lack of memory"), (None, "took longer than 120 s")],
)
def test_kernels_that_could_not_be_tried_are_not_called_broken(
    status: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(command: list[str], *, timeout: float, **options: object) -> subprocess.CompletedProcess:
        if status is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, status)

    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AMX_INT8 = 1")
    monkeypatch.setattr(subprocess, "run", run)
    options = model_options(tmp_path / "model.gguf")
    assert options.use_extra_bufts == (not words)
    assert words in caplog.text and bool(caplog.text) == bool(words)


def test_the_trial_of_kernels_runs_a_file_whose_name_is_no_text(pair: tuple, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.gguf")
    gguf.write(pair[0], path)
    assert _amx_problem(path) == ""


def test_memory_is_a_budget(pair: tuple, tmp_path: Path) -> None:
    model, engine = pair
    gguf.write(model, tmp_path / "model.gguf")
    token_bytes = engine.cache_byte_count // 3 // 256
    with pytest.raises(UnusableModel, match="--kv-memory"):
        LlamaCppEngine(tmp_path / "model.gguf", slot_count=3, cache_byte_limit=3 * 255 * token_bytes)


def test_slots_in_any_order_and_with_gaps(pair: tuple) -> None:
    """llama.cpp runs neighbouring slots together; what fills a gap leaves no trace."""
    model, engine = pair
    for slot, text in enumerate(((1, 2, 3), (4, 5, 6, 7), (8, 9))):
        engine.forward([Row(slot, 0, text, len(text))])
    last, first = engine.forward([Row(2, 2, (10, 11), 0), Row(0, 3, (12,), 0)])
    np.testing.assert_allclose(last, expected(model, [8, 9, 10, 11])[2:], atol=5e-3)
    np.testing.assert_allclose(first, expected(model, [1, 2, 3, 12])[3:], atol=5e-3)
    between = engine.forward([Row(1, 4, (13,), 0)])[0]
    np.testing.assert_allclose(between, expected(model, [4, 5, 6, 7, 13])[4:], atol=5e-3)


def test_what_fills_a_gap_is_cut_off_again(pair: tuple) -> None:
    _, engine = pair
    for slot in range(3):
        engine.forward([Row(slot, 0, (1, 2, 3), 3)])
    engine.forward([Row(2, 3, (4,), 0), Row(0, 3, (4,), 0)])
    lengths = [llama_cpp.llama_memory_seq_pos_max(engine._memory, slot) + 1 for slot in range(3)]
    assert lengths == [4, 3, 4]


def test_a_forward_of_more_tokens_than_go_through_at_a_time(tmp_path: Path) -> None:
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE | {"max_position_embeddings": 1024}), tmp_path)
    gguf.write(model, tmp_path / "model.gguf")
    engine = LlamaCppEngine(tmp_path / "model.gguf", threads=2, slot_count=3)
    texts = [random_ids(seed, 700) for seed in range(3)]
    tables = engine.forward([Row(slot, 0, tuple(text), 0) for slot, text in enumerate(texts)])
    for text, logits in zip(texts, tables, strict=True):
        np.testing.assert_allclose(logits, expected(model, text), atol=2e-2)


@pytest.mark.models
def test_two_gguf_models_say_the_same_in_every_mode() -> None:
    """The target is deterministic, because quantized arithmetic differs by width."""
    check_that_every_mode_says_the_same("llamacpp", target_options=("--deterministic",))
