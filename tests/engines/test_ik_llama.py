"""Tests ik_llama.cpp by the contract of every engine, bit for bit at every width, and with the real models."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import transformers
from gguf import GGUFReader
from hypothesis import given, settings
from numpy.random import _mt19937

from bridge.errors import UnusableModel
from draftbridge import Client
from services.cli.processes import fleet
from services.config import ModelServerConfig
from services.engines.cpu import cpu_facts, cpu_flags, has_bfloat16, lacks_bfloat16
from services.engines.engine import Engine, Row
from services.engines.ik_llama.spec import IK_LLAMA, MAX_CONTEXTS, missing_instructions
from services.engines.observer import UNOBSERVED
from services.engines.registry import choose_engine
from services.engines.spec import EngineOptions
from services.model.server import _load
from services.store.cache import cache_directory
from services.store.resolve import resolve_gguf
from tests.conftest import save_tiny_model
from tests.support import gguf
from tests.support.depth import DEEP
from tests.support.engine_contract import (
    LLAMA_LIKE,
    STEPS,
    EngineContract,
    check_that_every_mode_says_the_same,
    random_ids,
    saved,
)

pytest.importorskip("ik_llama_cpp", reason="the ik-llama extra is not installed")
# The prebuilt library would end the process there.
if missing_instructions():
    pytest.skip(f"the processor lacks {missing_instructions()}", allow_module_level=True)

from services.engines.gguf import file_type
from services.engines.ik_llama import probe as probing
from services.engines.ik_llama.engine import IkLlamaEngine
from services.engines.ik_llama.library import Model
from services.engines.ik_llama.probe import Way

REPACKED = Way(True, 31, 2, 0.0, (11, 12, 12, 16))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Redirects the records about files to a temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "cache_directory", lambda: tmp_path_factory.getbasetemp() / "cache" / "models")
        patch.setattr(probing, "_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    directory = tmp_path_factory.mktemp("ik_llama")
    model = saved(transformers.LlamaConfig(**LLAMA_LIKE), directory)
    gguf.write(model, directory / "model.gguf")
    return model, IkLlamaEngine(resolve_gguf(str(directory)), threads=2, slot_count=3)


class TestIkLlama(EngineContract):
    """A tiny Llama in float32; keys and values are float16."""

    tolerance = 5e-3


def reader(engine: Engine, ids: list[int]) -> np.ndarray:
    """Returns the logits of a text that is read from its start in one forward, in the last slot."""
    return engine.forward([Row(engine.slot_count - 1, 0, tuple(ids), 0)])[0].copy()


@settings(max_examples=15)
@given(steps=STEPS)
def test_a_position_has_the_same_logits_to_the_last_bit(pair: tuple, steps: list) -> None:
    """This holds for any earlier use of the slot, and for any other rows in the forward."""
    _, engine = pair
    held: dict[int, list[int]] = {0: [], 1: []}
    for step in steps:
        rows = []
        for slot, fraction, ids in {one[0] % 2: (one[0] % 2, *one[1:]) for one in step}.values():
            keep = int(fraction * len(held[slot]))
            held[slot] = held[slot][:keep] + ids
            rows.append(Row(slot, keep, tuple(ids), len(ids) // 2))
        for row, logits in zip(rows, [table.copy() for table in engine.forward(rows)], strict=True):
            assert logits.tobytes() == reader(engine, held[row.slot])[row.keep + row.logits_from :].tobytes()


def check_every_width(engine: Engine, ids: list[int], widths: tuple[int, ...]) -> None:
    """Reads a text in forwards of each width, with other slots in between, and after a copy."""
    whole = reader(engine, ids)
    for width in widths:
        for start in range(0, len(ids), width):
            part = tuple(ids[start : start + width])
            beside = Row(1, 0, tuple(ids[: 1 + start % 7]), 0)
            logits = engine.forward([Row(0, start, part, 0), beside][: 1 + start % 2])[0]
            assert logits.tobytes() == whole[start : start + width].tobytes(), (width, start)
    half = len(ids) // 2
    engine.copy(0, 1, half)
    logits = engine.forward([Row(1, half, tuple(ids[half:]), 0), Row(0, 0, tuple(ids[:3]), 0)])[0]
    assert logits.tobytes() == whole[half:].tobytes()


def test_every_width_gives_the_same_logits_to_the_last_bit(pair: tuple) -> None:
    check_every_width(pair[1], random_ids(3, 100), (1, 2, 3, 7, 16, 31, 64))


def test_single_tokens_that_are_filled_up(pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with repacked weights, this holds up to the end of a slot; padding leaves no trace."""
    gguf.write(pair[0], tmp_path / "model.gguf")
    monkeypatch.setattr("services.engines.ik_llama.engine.choose_way", lambda *_: REPACKED)
    engine = IkLlamaEngine(tmp_path / "model.gguf", threads=1, slot_count=3)
    check_every_width(engine, random_ids(4, 80), (1, 2, 5))
    ids = random_ids(5, engine.context_length)
    engine.forward([Row(0, 0, tuple(ids[:-1]), len(ids) - 1)])
    assert engine.forward([Row(0, len(ids) - 1, (ids[-1],), 1)])[0].shape == (0, 120)
    last = engine.forward([Row(0, len(ids) - 1, (ids[-1],), 0)])[0].copy()
    assert last.tobytes() == reader(engine, ids)[-1:].tobytes()


def test_it_is_deterministic_by_itself(pair: tuple) -> None:
    assert pair[1].logit_tolerance == 0.0


def test_memory_is_a_budget(pair: tuple, tmp_path: Path) -> None:
    model, engine = pair
    gguf.write(model, tmp_path / "model.gguf")
    token_bytes = engine.cache_byte_count // 3 // 256
    with pytest.raises(UnusableModel, match="--kv-memory"):
        IkLlamaEngine(tmp_path / "model.gguf", threads=1, slot_count=3, cache_byte_limit=3 * 255 * token_bytes)


def test_as_many_slots_as_there_are_and_no_more(pair: tuple, tmp_path: Path) -> None:
    """The library crashes at its 65th context; engines free their contexts when they are deleted."""
    gguf.write(pair[0], tmp_path / "model.gguf")
    with pytest.raises(UnusableModel, match=f"at most {MAX_CONTEXTS} sequences: use fewer --slots"):
        IkLlamaEngine(tmp_path / "model.gguf", slot_count=MAX_CONTEXTS + 1)
    for _ in range(3):
        engine = IkLlamaEngine(tmp_path / "model.gguf", threads=2, slot_count=MAX_CONTEXTS - 3)
        rows = [Row(slot, 0, (1, 2, 3), 0) for slot in range(engine.slot_count)]
        assert len({table.tobytes() for table in engine.forward(rows)}) == 1
        del engine


def test_only_errors_of_the_library_are_logged(pair: tuple, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    gguf.write(pair[0], path)
    IkLlamaEngine(path, threads=1, slot_count=1)
    assert caplog.text == ""
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnusableModel):
        Model(path, repacked=False)
    assert "failed to load model" in caplog.text


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnusableModel, match="check that the file is whole"):
        IkLlamaEngine(path)


def test_half_a_file_is_refused(pair: tuple, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf.write(pair[0], path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UnusableModel, match=r"ik_llama\.cpp c"):
        IkLlamaEngine(path)


def test_an_architecture_that_it_does_not_know_is_refused(pair: tuple, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf.write(pair[0], path)
    reader = GGUFReader(path, "r+")
    reader.fields["general.architecture"].parts[-1][:] = np.frombuffer(b"llamo", np.uint8)
    reader.data.flush()
    with pytest.raises(UnusableModel, match="use --engine llamacpp, or give --engine torch a directory"):
        IkLlamaEngine(path)


def test_a_model_with_a_recurrent_state_is_refused(
    pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf.write(pair[0], tmp_path / "model.gguf")
    monkeypatch.setattr("services.engines.ik_llama.library._keeps_state", [lambda model: True])
    with pytest.raises(UnusableModel, match="choose a model with attention layers only"):
        Model(tmp_path / "model.gguf")


def test_a_processor_without_avx2_is_refused_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_instructions({"sse4_2", "fma"}, "x86_64") == "avx2, f16c"
    assert missing_instructions({"avx2", "fma", "f16c"}, "x86_64") == ""
    assert missing_instructions(set(), "aarch64") == ""
    monkeypatch.setattr("services.engines.ik_llama.spec.cpu_flags", lambda: frozenset({"sse4_2"}))
    with pytest.raises(UnusableModel, match="needs a processor with AVX2, F16C, FMA: use --engine"):
        IK_LLAMA.prepare("gemma-3-270m", EngineOptions(), lambda line: pytest.fail(line))
    assert "lacks AVX2" in IK_LLAMA.reason_to_skip("gemma-3-270m", EngineOptions(device="cpu"))


@pytest.mark.parametrize("kind", ["absent", "another platform's", "another program's"])
def test_a_library_that_cannot_be_used_is_refused_with_the_remedy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libllama.so"
    if kind == "another platform's":
        library.write_bytes(b"MZ" + bytes(100))
    place = _mt19937.__file__ if kind == "another program's" else str(library)
    monkeypatch.setenv("IK_LLAMA_CPP_LIB_PATH", place)
    program = [sys.executable, "-c", "import services.engines.ik_llama.library"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    refusal = done.stderr.splitlines()[-1]
    assert "UnusableModel: the library of ik-llama-cpp-python cannot be loaded" in refusal
    assert "unset IK_LLAMA_CPP_LIB_PATH, or use --engine torch" in refusal


def test_processors_are_read_from_what_linux_tells(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name: Ours\nflags\t: avx2 fma\n\nprocessor: 1\nflags: sse\n")
    assert cpu_flags(path) == {"avx2", "fma"} and lacks_bfloat16(path)
    assert cpu_flags(tmp_path / "none") == frozenset() and not lacks_bfloat16(tmp_path / "none")
    (later := tmp_path / "later").write_text("processor : 0\nflags\t: avx2 avx512_bf16\n")
    assert has_bfloat16(later) and not lacks_bfloat16(later)
    # ARM names neither a model nor flags.
    arm = "processor\t: 0\nFeatures\t: fp asimd{}\nCPU implementer\t: 0x41\nCPU part\t: {}\n"
    kinds = [("", "0xd0c"), (" sve", "0xd0c"), ("", "0xd49")]
    for number, kind in enumerate(kinds):
        (tmp_path / f"{number}").write_text(arm.format(*kind))
    facts = {cpu_facts(tmp_path / f"{number}") for number in range(len(kinds))}
    assert len(facts | {cpu_facts(path), cpu_facts(later)}) == 5


def test_types_of_weights_have_names() -> None:
    """137 is a type of ik_llama.cpp alone."""
    assert (file_type(7), file_type(137)) == ("Q8_0", "type 137")


def test_a_failed_row_ends_a_forward_after_the_other_rows(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ended = pair[1], threading.Event()

    def run(row: Row, threads: int) -> np.ndarray:
        if row.slot == 0:
            raise RuntimeError("code 1")
        started.wait(0.2)  # the failed row's forward must not return within this time
        ended.set()
        return np.empty(0)

    started = threading.Event()
    monkeypatch.setattr(engine, "_run", run)
    with pytest.raises(RuntimeError, match="code 1"):
        engine.forward([Row(0, 0, (1,), 0), Row(1, 0, (1,), 0)])
    assert ended.is_set()


@pytest.fixture
def tiny_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory with a tokenizer and a GGUF file."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    directory = save_tiny_model(tmp_path / "target", "sentencepiece", 0)
    gguf.write(transformers.AutoModelForCausalLM.from_pretrained(directory), directory / "model.gguf")
    return directory


def test_a_deterministic_server_runs_it_as_it_is(tiny_target: Path) -> None:
    config = ModelServerConfig(model=str(tiny_target), engine="ik_llama", threads=1, deterministic=True)
    spec, options = choose_engine("ik_llama", config.model, config.options)
    opening = partial(spec.open, spec.prepare(config.model, options, str), options)
    loaded = _load(config, opening, tiny_target, str, UNOBSERVED)
    loaded.scheduler.close()
    assert isinstance(loaded.engine, IkLlamaEngine)


def test_a_service_is_deterministic_without_an_option(tiny_target: Path, tiny_models: tuple[Path, Path]) -> None:
    target_options = ("--engine", "ik_llama", "--threads", "2")
    draft_options = ("--dtype", "float32", "--threads", "1")
    with (
        fleet(
            str(tiny_target), str(tiny_models[1]), target_options=target_options, draft_options=draft_options
        ) as running,
        Client(running.bridge) as client,
    ):
        assert {model.engine: model.deterministic for model in client.models()} == {"ik_llama": True, "torch": False}
        results = [
            client.generate("The quick", max_tokens=60, temperature=1.0, seed=1, speculation=mode)
            for mode in ("off", "lockstep", "opportunistic")
        ]
    assert len({result.token_ids for result in results}) == 1
    assert {result.finished.speculation.near_ties for result in results} == {0}


@pytest.mark.models
@pytest.mark.parametrize(("name", "repacked"), [("gemma-3-270m", True), ("smollm2-135m-instruct", False)])
def test_real_models_give_the_same_logits_at_every_width(
    name: str, repacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's prompt is so long that its sliding window has moved on."""
    monkeypatch.setattr(probing, "cache_directory", cache_directory)  # what is measured is remembered
    file = resolve_gguf(name)
    engine = IkLlamaEngine(file, threads=1, slot_count=3, cache_byte_limit=200 << 20, repacked=repacked)
    assert engine.logit_tolerance == 0.0
    start = 530 if name.startswith("gemma") or DEEP else 60
    end = start + (40 if DEEP else 27)
    ids = [7 * at % 1000 + 10 for at in range(end)]
    engine.forward([Row(0, 0, tuple(ids[:start]), start)])
    engine.copy(0, 2, start)
    whole = engine.forward([Row(2, start, tuple(ids[start:]), 0)])[0].copy()
    for width in (1, 2, 3, 9, 25) if DEEP else (1, 3, 25):
        parts = [
            engine.forward([Row(0, at, tuple(ids[at : min(at + width, end)]), 0)])[0].copy()
            for at in range(start, end, width)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), width


@pytest.mark.zoo
def test_two_gguf_models_say_the_same_in_every_mode() -> None:
    """The models are quantized, and need no option for exact texts."""
    check_that_every_mode_says_the_same("ik_llama", target_options=())
