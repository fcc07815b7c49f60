"""Tests how ik_llama finds out in which way it runs a file best, and what it remembers of that."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from bridge.errors import UnusableModel
from tests.support import gguf
from tests.support.engine_contract import LLAMA_LIKE, saved

pytest.importorskip("ik_llama_cpp", reason="the ik-llama extra is not installed")

from services.engines.ik_llama.spec import IK_LLAMA, missing_instructions

# Skipped on such a processor, because the prebuilt library would end the process there.
if missing_instructions():
    pytest.skip(f"the processor lacks {missing_instructions()}", allow_module_level=True)

from services.engines.ik_llama import probe as probing
from services.engines.ik_llama.engine import IkLlamaEngine
from services.engines.ik_llama.library import Context
from services.engines.ik_llama.probe import Way, choose_way
from services.engines.spec import EngineOptions, Weights
from services.errors import TrialUnfinished

PLAIN = Way(False, 31, 1, 0.0, (10, 12, 16, 24))
REPACKED = Way(True, 31, 2, 0.0, (11, 12, 12, 16))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirects the records about files to a temporary directory."""
    monkeypatch.setattr(probing, "cache_directory", lambda: tmp_path / "cache" / "models")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ik_llama")
    gguf.write(saved(transformers.LlamaConfig(**LLAMA_LIKE), directory), directory / "model.gguf")
    return directory / "model.gguf"


def test_the_faster_way_is_taken_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    tried: list[tuple[bool, Way | None]] = []

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        tried.append((repacked, known))
        return REPACKED if repacked else PLAIN

    for _ in range(2):
        assert choose_way(path, 2, None, probe) == REPACKED
    assert tried == [(False, None), (True, None), (False, PLAIN), (True, REPACKED)]
    assert choose_way(path, 1, None, probe) == REPACKED  # another number of threads counts as another machine
    path.write_bytes(b"other")
    assert choose_way(path, 2, None, probe) == REPACKED
    assert len(tried) == 12


@pytest.mark.parametrize(("repacked", "way"), [(False, PLAIN), (True, REPACKED)])
def test_the_way_that_a_user_names_is_the_only_one_that_is_tried(repacked: bool, way: Way, tmp_path: Path) -> None:
    """So that servers on different machines give the same text for a seed."""
    path, tried = tmp_path / "model.gguf", list[bool]()
    path.write_bytes(b"GGUF")

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        tried.append(repacked)
        return REPACKED if repacked else PLAIN

    assert choose_way(path, 2, None, probe) == REPACKED
    tried.clear()
    for _ in range(2):
        assert choose_way(path, 2, repacked, probe) == way
    assert tried == [repacked]
    with pytest.raises(UnusableModel, match=r"crashes with model\.gguf here: use --weights auto"):
        choose_way(path, 3, repacked, lambda *_: None)


def test_a_server_names_the_way_in_its_type_of_weights(tiny_file: Path) -> None:
    full, repacked = (
        IK_LLAMA.open(tiny_file, EngineOptions(threads=1, slot_count=1, weights=weights))
        for weights in (Weights.FULL, Weights.REPACKED)
    )
    assert repacked.dtype == f"{full.dtype} repacked"
    assert IK_LLAMA.reason_to_skip(str(tiny_file), EngineOptions(device="cpu", weights=Weights.REPACKED)) == ""
    assert IK_LLAMA.reason_to_skip(str(tiny_file), EngineOptions(device="cpu", weights=Weights.FULL)) != ""


def test_other_work_on_the_machine_during_one_probe_does_not_decide(tmp_path: Path) -> None:
    path, disturbed = tmp_path / "model.gguf", iter([1, 4, 4, 1])
    path.write_bytes(b"GGUF")

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        way, factor = (REPACKED if repacked else PLAIN), next(disturbed)
        return replace(way, pass_ns=tuple(factor * one for one in way.pass_ns))

    assert choose_way(path, 2, None, probe) == REPACKED


@pytest.mark.parametrize("probes", [1, 2])
def test_a_choice_counts_for_good_if_each_way_had_an_undisturbed_probe(tmp_path: Path, probes: int) -> None:
    path, disturbed, tried = tmp_path / "model.gguf", iter([True] * 2 * probes), list[bool]()
    path.write_bytes(b"GGUF")

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        tried.append(repacked)
        return replace(REPACKED if repacked else PLAIN, disturbed=next(disturbed, False))

    def choose() -> bool:
        return choose_way(path, 2, None, probe).repacked

    # A server that is restarted soon, or started beside it, generates the same text.
    assert [choose() for _ in range(3)] == [True, True, True]
    assert len(tried) == 4
    for file in (probing.cache_directory().parent / "ik_llama").glob("*.json"):
        os.utime(file, (0, 0))
    assert [choose() for _ in range(2)] == [True, True]
    assert len(tried) == (4 if probes == 1 else 8)


@pytest.mark.parametrize(
    ("plain", "repacked", "chosen"),
    [
        (PLAIN, replace(REPACKED, pass_ns=(12, 12, 16, 23)), PLAIN),
        (PLAIN, replace(REPACKED, pass_ns=(13, 13, 15, 22)), None),
        (PLAIN, replace(REPACKED, drift=0.5), PLAIN),
        (replace(PLAIN, drift=0.5), replace(REPACKED, pass_ns=(99, 99, 99, 99)), None),
        (None, REPACKED, REPACKED),
        (PLAIN, None, PLAIN),
    ],
    ids=["no faster", "faster with candidates", "inexact", "plain is inexact", "plain crashes", "repacked crashes"],
)
def test_which_way_is_better(tmp_path: Path, plain: Way | None, repacked: Way | None, chosen: Way | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert choose_way(path, 2, None, lambda *facts: repacked if facts[2] else plain) == (chosen or repacked)


def test_what_only_repacked_weights_cannot_do_costs_only_these(tmp_path: Path) -> None:
    """Such as memory for a second copy of the weights."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        if repacked or threads == 3:
            raise UnusableModel(f"it cannot be loaded {'repacked' if repacked else 'as it is'}")
        return PLAIN

    for _ in range(2):
        assert replace(choose_way(path, 2, None, probe), disturbed=False) == PLAIN
    for file in (probing.cache_directory().parent / "ik_llama").glob("*.json"):
        os.utime(file, (0, 0))
    assert choose_way(path, 2, None, lambda *facts: REPACKED if facts[2] else PLAIN) == REPACKED, "memory is back"
    with pytest.raises(UnusableModel, match="it cannot be loaded repacked"):
        choose_way(path, 3, None, probe)


def test_a_probe_that_did_not_come_to_its_end_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    def probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        if repacked:
            raise TrialUnfinished("took too long")
        return PLAIN

    assert choose_way(path, 4, None, probe) == PLAIN
    assert choose_way(path, 4, None, lambda *_: REPACKED) == REPACKED

    def never(*_: object) -> Way | None:
        raise TrialUnfinished("took too long")

    with pytest.raises(TrialUnfinished, match=r"took too long with model\.gguf here: use --engine"):
        choose_way(path, 5, None, never)


def test_a_probe_that_did_not_come_to_its_end_costs_nothing_that_was_measured_before(tmp_path: Path) -> None:
    path, seen = tmp_path / "model.gguf", list[bool]()
    path.write_bytes(b"GGUF")

    def once(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
        seen.append(repacked)
        if seen.count(repacked) > 1:
            raise TrialUnfinished("took too long")
        return REPACKED if repacked else PLAIN

    assert choose_way(path, 4, None, once) == choose_way(path, 5, None, lambda *facts: REPACKED if facts[2] else PLAIN)
    assert seen.count(True) == seen.count(False) == 2


def test_logits_that_depend_on_the_number_of_threads_are_not_deterministic(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Threaded(Context):
        def decode(self, *given: object) -> np.ndarray:
            return super().decode(*given) + self._threads

    monkeypatch.setattr("services.engines.ik_llama.library.Context", Threaded)
    assert probing._measure(tiny_file, 2, False).drift == pytest.approx(1, abs=0.01)
    assert probing._measure(tiny_file, 1, False).drift == 0.0


@pytest.mark.parametrize(
    ("widths", "max_width", "min_width", "drift"),
    [
        ({1}, 31, 2, 0.0),  # single tokens are filled up
        ({31}, 14, 1, 0.0),  # passes are narrower
        ({14, 31}, 14, 1, 1.0),
        ({8}, 31, 1, 1.0),
        ({2}, 31, 1, 1.0),
        ({1, 8}, 31, 1, 1.0),  # to fill up single tokens would not help
    ],
    ids=str,
)
def test_widths_with_other_logits_are_avoided_or_counted_as_drift(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch, widths: set[int], max_width: int, min_width: int, drift: float
) -> None:
    class Uneven(Context):
        def decode(self, token_ids: Sequence[int], position: int, logits_from: int) -> np.ndarray:
            return super().decode(token_ids, position, logits_from) + (len(token_ids) in widths)

    monkeypatch.setattr("services.engines.ik_llama.library.Context", Uneven)
    way = probing._measure(tiny_file, 1, False)
    assert (way.max_width, way.min_width) == (max_width, min_width)
    assert way.drift == pytest.approx(drift, rel=0.01, abs=0)  # none is none, to the last bit
    known = replace(way, max_width=20, drift=0.5, pass_ns=(), disturbed=False)
    again = probing._measure(tiny_file, 1, False, known)
    assert replace(again, pass_ns=(), disturbed=False) == known, "a second probe measures only times"
    assert len(again.pass_ns) == 4 and min(again.pass_ns) > 0


def test_a_file_with_logits_that_are_not_numbers_is_refused(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Context):
        def decode(self, *given: object) -> np.ndarray:
            return super().decode(*given) * np.nan

    monkeypatch.setattr("services.engines.ik_llama.library.Context", Broken)
    with pytest.raises(UnusableModel, match=r"computes no numbers with model\.gguf: use --engine"):
        probing._measure(tiny_file, 1, False)


def test_what_was_remembered_and_is_damaged_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    choose_way(path, 3, None, lambda *_: PLAIN)
    for file in (probing.cache_directory().parent / "ik_llama").glob("*.json"):
        file.write_text('{"repacked": tr')
    assert choose_way(path, 3, None, lambda *_: REPACKED) == REPACKED


def test_a_crash_of_the_library_is_an_error_with_a_remedy(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child process that tries it dies, not this one."""
    killer = tmp_path / "python"
    killer.write_text(f"#!/bin/sh\nkill -{signal.SIGABRT.value} $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(killer))
    with pytest.raises(UnusableModel, match=r"crashes with model\.gguf here: use --engine llamacpp or torch"):
        IkLlamaEngine(tiny_file)


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(probing, "cache_directory", lambda: path / "models")
    assert choose_way(path, 2, None, lambda *_: PLAIN) == PLAIN
