"""`--engine auto` chooses the fastest engine with speculation, measured once for a file and a machine."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from services.engines import trial
from services.engines.ik_llama.spec import IK_LLAMA
from services.engines.llamacpp.spec import LLAMACPP
from services.engines.registry import choose_engine
from services.engines.spec import Dtype, EngineOptions, EngineSpec, GaudiOptions, Weights
from services.engines.trial import Costs, fastest, speed

WIDTHS = (1, 2, 3, 5, 9, 17, 25)
# Both need 1 ms for one token; each further token costs the first engine 1 ms, and the second 0.1 ms.
NARROW: Costs = [(width, 1_000_000 * width) for width in WIDTHS]
WIDE: Costs = [(width, 1_000_000 + 100_000 * (width - 1)) for width in WIDTHS]
OPTIONS = EngineOptions(device="cpu")


def test_the_speed_is_that_of_the_best_width() -> None:
    assert speed(NARROW) == pytest.approx(1000)
    assert speed(WIDE) == pytest.approx(1e3 * (1 - 0.7**5) / 0.3 / 1.4)
    assert speed(WIDE, drafts=True) == speed(NARROW, drafts=True) == pytest.approx(1000)


class Attempts:
    """Stands in for the trials of two engines, and counts them."""

    def __init__(self, **costs: Costs | str) -> None:
        self.costs, self.names = costs, list[str]()

    def __call__(self, name: str, path: Path, options: EngineOptions, deterministic: bool) -> Costs:
        self.names.append(name)
        found = self.costs[name]
        if isinstance(found, str):
            raise trial._TrialFailed(found)
        return found


def engine(name: str, path: Path) -> EngineSpec:
    return replace(LLAMACPP, name=name, prepare=lambda model, weights, report: path)


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a file that is worth a trial, and sets up a new cache."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "_MIN_WEIGHT_BYTES", 3)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_the_fastest_is_taken_and_remembered_for_the_file_and_the_machine(big: Path) -> None:
    rivals, lines = [engine("a", big), engine("b", big)], list[str]()
    attempts = Attempts(a=NARROW, b=WIDE)

    def chosen(options: EngineOptions = OPTIONS, **more: bool) -> str:
        return fastest(rivals, "model", options, report=lines.append, attempt=attempts, **more).name

    assert chosen() == "b" and attempts.names == ["a", "b"]
    assert "a, b (once)" in lines[0] and "b (expected tokens/s with a good draft: a 1000, b 1" in lines[1]
    assert chosen() == "b" and len(attempts.names) == 2
    attempts.costs = {"a": WIDE, "b": NARROW}
    assert chosen(replace(OPTIONS, threads=1)) == "a" and len(attempts.names) == 4
    assert chosen(deterministic=True) == "a" and chosen(drafts=True) == "a" and len(attempts.names) == 8
    assert chosen() == "b" and len(attempts.names) == 8
    os.utime(big, ns=(1, 1))
    assert chosen() == "a" and len(attempts.names) == 10


def test_a_memory_that_is_damaged_or_not_writable_costs_only_time(
    big: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rivals, attempts = [engine("a", big), engine("b", big)], Attempts(a=NARROW, b=WIDE)
    for content in (None, "{", "[]", '{"b": "fast"}'):
        for file in (tmp_path / "cache" / "engines").glob("*.json"):
            file.write_text(content or "")
        assert fastest(rivals, "model", OPTIONS, report=str, attempt=attempts).name == "b"
    assert len(attempts.names) == 8
    for file in (tmp_path / "cache" / "engines").glob("*"):
        file.unlink()
    (tmp_path / "cache" / "engines").rmdir()
    (tmp_path / "cache" / "engines").write_text("a file")
    assert fastest(rivals, "model", OPTIONS, report=str, attempt=attempts).name == "b"
    assert "cannot be written" in caplog.text


def test_an_engine_that_fails_is_not_taken(big: Path) -> None:
    rivals, lines = [engine("a", big), engine("b", big)], list[str]()
    attempts = Attempts(a="its library is for another platform", b=NARROW)
    assert fastest(rivals, "model", OPTIONS, report=lines.append, attempt=attempts).name == "b"
    assert "a is not used: its library is for another platform" in lines
    attempts = Attempts(a="x", b="y")
    os.utime(big, ns=(2, 2))
    assert fastest(rivals, "model", OPTIONS, report=str, attempt=attempts).name == "a", "whose own error is shown"


def test_all_options_reach_the_process_of_a_trial() -> None:
    gaudi = GaudiOptions(max_graphs=3, quant_config=Path("maxabs.json"))
    for options in (OPTIONS, replace(OPTIONS, weights=Weights.INT8, dtype=Dtype.BFLOAT16, gaudi=gaudi)):
        assert trial._decoded(trial._encoded(options, True)) == (options, True)


def test_a_small_model_is_not_measured(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MIN_WEIGHT_BYTES", 5)
    attempts = Attempts()
    assert fastest([engine("a", big), engine("b", big)], "m", OPTIONS, report=str, attempt=attempts).name == "a"


def test_auto_compares_engines_that_read_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[str]]()

    def last(rivals: list[EngineSpec], model: str, options: EngineOptions) -> EngineSpec:
        seen.append([one.name for one in rivals])
        return rivals[-1]

    monkeypatch.setattr("services.engines.spec.find_spec", lambda name: True)
    monkeypatch.setattr("services.engines.ik_llama.spec.missing_instructions", lambda: "")
    spec, options = choose_engine("auto", "gemma-3-270m", OPTIONS, last)
    assert seen == [["llamacpp", "ik_llama"]] and spec is IK_LLAMA and options.weights is Weights.AUTO
    assert choose_engine("llamacpp", "gemma-3-270m", OPTIONS, last)[0] is LLAMACPP and len(seen) == 1


def test_a_trial_in_a_process_of_its_own(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch engine is measured; a library that cannot be loaded, as of another platform, is refused."""
    options = replace(OPTIONS, threads=1)
    costs = trial._attempt("torch", tiny_models[0], options, False)
    assert [width for width, _ in costs][:4] == [1, 2, 3, 5] and all(taken_ns > 0 for _, taken_ns in costs)
    broken = tmp_path / "ik_llama_cpp"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('wrong ELF class')")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")]))
    with pytest.raises(trial._TrialFailed, match=r"cannot be loaded \(wrong ELF class\)"):
        trial._attempt("ik_llama", tmp_path / "model.gguf", options, False)
