"""Tests OpenVINO by the contract of every engine, and with the real models."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bridge.errors import UnusableModel
from services.engines.engine import Row
from services.engines.openvino.engine import OpenVinoEngine
from services.engines.openvino.export import export
from services.engines.openvino.graph import AttentionSpec
from services.engines.openvino.padding import measured_budget
from services.engines.openvino.spec import convert
from services.store.cache import NoSpace, cache_directory
from tests.support.depth import DEEP
from tests.support.engine_contract import (
    FAMILIES,
    LLAMA_LIKE,
    EngineContract,
    check_that_every_mode_says_the_same,
    expected,
    family,
    saved,
)

# OpenVINO has no operators for the attention or the routing to experts of the others.
NOT_EXPORTED = ("gemma2", "gpt_oss", "phimoe")
# Their graphs have nothing that those of other families lack.
ALIKE = () if DEEP else ("llama", "mistral", "phi3", "qwen2", "qwen3")
EXPORTED = [name for name in FAMILIES if name not in NOT_EXPORTED + ALIKE]


@pytest.fixture(scope="module", params=EXPORTED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    model, directory = family(request.param, tmp_path_factory)
    export(directory, directory / "openvino", "full")
    return model, OpenVinoEngine(directory / "openvino" / "model.xml", dtype="float32", threads=1, slot_count=3)


class TestOpenVino(EngineContract):
    """Runs the contract over all families that can be exported."""


@dataclass(frozen=True)
class Exported:
    """A model of transformers and its lossless export."""

    model: torch.nn.Module
    path: Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model, directory = family("llama", tmp_path_factory)
    export(directory, directory / "openvino", "full")
    return Exported(model, directory / "openvino" / "model.xml")


@pytest.mark.parametrize("weights", ["int8", "int4"] if DEEP else ["int8"])
def test_smaller_weights_are_close(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is converted once."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    model = saved(FAMILIES["llama"], tmp_path)
    path = convert(tmp_path, "tiny", weights)
    assert convert(tmp_path, "tiny", weights, pytest.fail) == path
    engine = OpenVinoEngine(path, slot_count=1)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    reference = expected(model, [1, 2, 3, 4])
    assert engine.dtype == weights
    assert np.linalg.norm(logits - reference) < (0.05 if weights == "int8" else 0.3) * np.linalg.norm(reference)


def test_room_for_the_converted_file_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    weights = saved(FAMILIES["llama"], tmp_path).num_parameters()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(NoSpace) as caught:
        convert(tmp_path, "tiny", "full")
    assert caught.value.metadata["needed_bytes"] == str(4 * weights)


def test_damaged_weights_are_refused_by_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    saved(FAMILIES["llama"], tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    for status, problem in ((1, "the file is damaged"), (-9, "the process was killed")):
        failed = SimpleNamespace(returncode=status, stderr="the file is damaged")
        monkeypatch.setattr("subprocess.run", lambda *arguments, failed=failed, **options: failed)
        with pytest.raises(UnusableModel, match=rf"could not be converted for OpenVINO \({problem}"):
            convert(tmp_path, "tiny", "full")


@pytest.mark.parametrize(("name", "kept_bytes"), [("model.bin", 1000), ("model.bin", None), ("model.xml", 1000)])
def test_a_converted_model_that_is_damaged_is_refused_with_the_remedy(
    name: str, kept_bytes: int | None, llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    kept = shutil.copytree(llama.path.parent, cache_directory() / "tiny-openvino")
    (kept / name).unlink() if kept_bytes is None else os.truncate(kept / name, kept_bytes)
    with pytest.raises(UnusableModel, match=rf"is damaged \(.*\): delete {kept} and run the same command again"):
        OpenVinoEngine(kept / "model.xml", slot_count=1)


def test_a_model_with_large_keys_and_values_is_converted(tmp_path: Path) -> None:
    """They need more than 256 MiB for the two sequences of the self-test."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 2176, "num_hidden_layers": 1}
    large = LLAMA_LIKE | heads
    saved(transformers.LlamaConfig(**large), tmp_path)
    export(tmp_path, tmp_path / "openvino", "full")
    assert OpenVinoEngine(tmp_path / "openvino" / "model.xml", slot_count=1).context_length == 256


def test_one_thread_goes_without_bfloat16(llama: Exported) -> None:
    """With one thread, OpenVINO crashes in bfloat16."""
    model, path = llama.model, llama.path
    engine = OpenVinoEngine(path, threads=1, slot_count=1)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    np.testing.assert_allclose(logits, expected(model, [1, 2, 3, 4]), atol=0.05)
    assert engine.dtype == "float32"
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(UnusableModel, match="--threads 2"):
            OpenVinoEngine(path, dtype=dtype, threads=1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not tie processes to cores")
def test_a_process_that_may_use_one_core_goes_without_bfloat16_too(llama: Exported) -> None:
    """Runs in a child process, because a crash would end this one."""
    script = (
        "import os, sys; from pathlib import Path; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from services.engines.openvino.engine import OpenVinoEngine, Row\n"
        "engine = OpenVinoEngine(Path(sys.argv[1]), slot_count=1)\n"
        "print(engine.forward([Row(0, 0, (1, 2, 3), 0)])[0].shape, engine.dtype)"
    )
    command = [sys.executable, "-c", script, str(llama.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.split(maxsplit=2)[-1].strip() == "float32", done.stderr


def test_an_export_with_other_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are longer than the texts of the self-test."""
    saved(transformers.MistralConfig(**LLAMA_LIKE, initializer_range=0.3, sliding_window=100), tmp_path)
    export(tmp_path, tmp_path / "right", "full")

    def wider(*values: Any) -> AttentionSpec:
        spec = AttentionSpec(*values)
        return replace(spec, window=spec.window + 1)

    monkeypatch.setattr("services.engines.openvino.export.AttentionSpec", wider)
    with pytest.raises(ValueError, match="logits differ"):
        export(tmp_path, tmp_path / "wrong", "full")


def test_no_usage_data_is_sent() -> None:
    """The library would send it from processes that it forks."""
    script = (
        "import os; os.register_at_fork(before=lambda: print('forked'))\n"
        "import services.engines.openvino.engine; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["imported"] and "forked" not in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_that_the_device_does_not_have_is_refused(family: str, tmp_path: Path) -> None:
    saved(FAMILIES[family], tmp_path)
    with pytest.raises(UnusableModel, match="use torch"):
        export(tmp_path, tmp_path / "openvino", "full")


@pytest.mark.parametrize(("device", "remedy"), [("npu", "use --device cpu or gpu"), ("gpu.7", "use one of these")])
def test_a_device_that_cannot_be_used_is_refused(device: str, remedy: str, llama: Exported) -> None:
    with pytest.raises(UnusableModel, match=remedy):
        OpenVinoEngine(llama.path, device=device)


@pytest.mark.parametrize(
    ("budget", "after_five", "after_seventeen"),
    [
        (48, 12 * [5], [*4 * [17], *2 * [5]]),
        (16, [*4 * [5], *8 * [1]], [17, *5 * [5]]),
        (3, 12 * [1], [*5 * [5], 1]),
        (0, 12 * [1], [*5 * [5], 1]),
    ],
)
def test_a_forward_has_as_many_tokens_as_the_one_before_within_the_budget(
    budget: int, after_five: list[int], after_seventeen: list[int], llama: Exported
) -> None:
    """In float32, padding tokens change nothing."""
    engine, sizes = sized(llama.path, budget)
    ids: list[int] = []
    for width in (1, 1, 5, *12 * (1,), 17, 5, 5, 5, 5, 5, 1):
        news = tuple(1 + (len(ids) + place) % 7 for place in range(width))
        [logits] = engine.forward([Row(1, len(ids), news, 0)])
        ids += news
        np.testing.assert_allclose(logits, expected(llama.model, ids)[-width:], atol=1e-4)
    assert sizes == [1, 1, 5, *after_five, 17, *after_seventeen]


@pytest.mark.parametrize(
    ("change_ns", "token_ns", "budget"),
    [
        (6_000_000, 500_000, 12),
        (6_000_000, 4_000_000, 1),
        (6_000_000, 40_000_000, 0),
        (9_000_000, 0, 48),  # the most
        (0, 500_000, 0),
    ],
)
def test_the_budget_is_what_a_change_costs_in_tokens(change_ns: int, token_ns: int, budget: int) -> None:
    """Also if the first forward of a number of tokens, and now and then another one, takes longer."""
    clock, widths = [0], [0]

    def forward(rows: list[Row]) -> None:
        width = len(rows[0].token_ids)
        clock[0] += 10_000_000 + token_ns * (width - 1) + change_ns * (widths[-1] != width)
        clock[0] += 200_000_000 * (width not in widths) + 5_000_000 * (len(widths) % 7 == 0)
        widths.append(width)

    engine = SimpleNamespace(forward=forward, vocabulary_size=99)
    assert measured_budget(engine, lambda: clock[0]) == budget
    assert len(widths) <= 21


def test_what_a_sequence_gets_does_not_depend_on_those_before_it(llama: Exported) -> None:
    """A forward is padded only for sequences that were in the one before, and not right after their prompts."""
    engine, sizes = sized(llama.path, 48)
    engine.forward([Row(0, 0, (1, 2, 3, 4, 5), 0)])
    engine.forward([Row(0, 3, (4,), 0)])  # three of the last five tokens were accepted
    assert sizes[-2:] == [5, 5]
    for rows in (
        [Row(1, 5, (1,), 0)],  # another sequence
        [Row(0, 1, (2, 3, 4), 2)],  # the rest of a prompt
        [Row(0, 4, (5,), 0)],  # the first forward after it
        [Row(0, 5, (6, 7, 8), 0)],
        [Row(0, 3, (4,), 0)],  # the same slot, whose cache another sequence has found
        [Row(0, engine.context_length - 4, (1,) * 4, 0)],
        [Row(0, engine.context_length - 1, (1,), 0)],  # no room
    ):
        engine.forward(rows)
        assert sizes[-1] == len(rows[0].token_ids)
    engine.forward([Row(0, 6, (1, 2, 3), 0), Row(1, 6, (1,), 0)])
    engine.forward([Row(1, 7, (1,), 0), Row(0, 7, (1,), 0)])
    assert sizes[-2:] == [4, 4]
    engine.forward([Row(0, 8, (1,), 0), Row(1, 8, (1, 2, 3), 2)])  # together with a prompt
    engine.forward([Row(0, 9, (1,), 0)])
    assert sizes[-2:] == [4, 1]
    engine.forward([Row(0, 8, (1,), 0)])  # the other sequence has ended
    engine.forward([Row(1, 8, (1,), 0), Row(0, 9, (1,), 0)])
    assert sizes[-2:] == [1, 2]


def sized(path: Path, budget: int) -> tuple[OpenVinoEngine, list[int]]:
    """Returns an engine that has measured this budget, and a list that gets the number of tokens of each forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engines.openvino.engine.measured_budget", lambda engine: budget)
        engine = OpenVinoEngine(path, dtype="float32", threads=1, slot_count=2)
    request, sizes = engine._request, []

    def infer(inputs: dict, **options: bool) -> None:
        sizes.append(len(inputs["token_ids"]))
        request.infer(inputs, **options)

    engine._request = SimpleNamespace(infer=infer, get_output_tensor=request.get_output_tensor)
    return engine, sizes


def test_memory_is_a_budget(llama: Exported) -> None:
    path = llama.path
    token_bytes = OpenVinoEngine(path, slot_count=3).cache_byte_count // 3 // 256
    with pytest.raises(UnusableModel, match="--kv-memory"):
        OpenVinoEngine(path, slot_count=3, cache_byte_limit=3 * 255 * token_bytes)


@pytest.mark.zoo
def test_the_real_pair_says_the_same_in_every_mode() -> None:
    """In float32, the width of a forward hardly changes the logits."""
    check_that_every_mode_says_the_same("openvino", target_options=("--dtype", "float32", "--weights", "full"))
