"""`--engine auto` chooses the fastest engine with speculation, measured once for a file and a machine."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from bridge.errors import UnusableModel
from services.engines import measuring, trial
from services.engines.ik_llama.spec import IK_LLAMA, MAX_CONTEXTS
from services.engines.llamacpp.spec import LLAMACPP
from services.engines.measuring import Costs, speed
from services.engines.registry import choose_engine
from services.engines.spec import Dtype, EngineOptions, EngineSpec, GaudiOptions, Weights
from services.engines.timing import Timing
from services.engines.torch.spec import TORCH
from services.engines.trial import fastest
from services.errors import DamagedFile, TrialUnfinished
from services.store.cache import CacheUnusable, NoSpace, Report

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

    def __call__(self, name: str, path: Path, options: EngineOptions, deterministic: bool | None) -> trial.Timings:
        self.names.append(name)
        found = self.costs[name]
        if isinstance(found, str):
            raise trial._TrialFailed(found, passing=found == "took too long")
        return undisturbed(found)


def undisturbed(costs: Costs) -> trial.Timings:
    return [(width, Timing(False, taken_ns)) for width, taken_ns in costs]


def name(spec: EngineSpec | None) -> str:
    return spec.name if spec else ""


def engine(name: str, path: Path) -> EngineSpec:
    return replace(LLAMACPP, name=name, prepare=lambda model, options, report: path)


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
        return name(fastest(rivals, "model", options, report=lines.append, attempt=attempts, **more))

    assert chosen() == "b" and attempts.names == ["a", "b", "a", "b"]
    assert "with a, b (once)" in lines[0] and "b (expected tokens/s with a good draft: a 1000, b 1" in lines[1]
    assert chosen() == "b" and len(attempts.names) == 4
    attempts.costs = {"a": WIDE, "b": NARROW}
    assert chosen(replace(OPTIONS, threads=1)) == "a" and len(attempts.names) == 8
    assert chosen(deterministic=True) == "a" and chosen(drafts=True) == "a" and len(attempts.names) == 16
    assert "(tokens/s: a " in lines[-1]
    assert chosen() == "b" and len(attempts.names) == 16
    os.utime(big, ns=(1, 1))
    assert chosen() == "a" and len(attempts.names) == 20


@pytest.mark.parametrize("disturbed", [0, 1, 2, 3])
def test_one_disturbed_trial_does_not_decide(big: Path, disturbed: int) -> None:
    """Other work makes one of the four trials ten times as slow."""
    rivals, costs, trials = [engine("a", big), engine("b", big)], {"a": NARROW, "b": WIDE}, list[str]()

    def attempt(name: str, path: Path, options: EngineOptions, deterministic: bool | None) -> trial.Timings:
        trials.append(name)
        slower = 10 if len(trials) == disturbed + 1 else 1
        return undisturbed([(width, slower * taken_ns) for width, taken_ns in costs[name]])

    assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempt)) == "b" and len(trials) == 4


def test_what_other_work_disturbed_is_used_but_not_remembered(big: Path) -> None:
    """Other work goes on during both trials of one engine; the next start measures that one again."""
    rivals, costs, trials, busy = [engine("a", big), engine("b", big)], {"a": NARROW, "b": WIDE}, list[str](), {"b"}

    def attempt(name: str, path: Path, options: EngineOptions, deterministic: bool | None) -> trial.Timings:
        trials.append(name)
        slower = 10 if name in busy else 1
        return [(width, Timing(name in busy, slower * taken_ns)) for width, taken_ns in costs[name]]

    def chosen() -> str:
        return name(fastest(rivals, "model", OPTIONS, report=lines.append, attempt=attempt))

    lines = list[str]()
    assert chosen() == "a" and any("other work slowed down b: the next start" in line for line in lines)
    busy.clear()
    assert chosen() == "b" and trials == ["a", "b", "a", "b", "b", "b"]
    assert chosen() == "b" and len(trials) == 6


def test_an_engine_that_crashes_in_one_of_its_trials_is_not_taken(big: Path) -> None:
    rivals, costs = [engine("a", big), engine("b", big)], iter([NARROW, WIDE, NARROW])

    def attempt(name: str, path: Path, options: EngineOptions, deterministic: bool | None) -> trial.Timings:
        if (found := next(costs, None)) is None:
            raise trial._TrialFailed("its trial ended with SIGSEGV")
        return undisturbed(found)

    assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempt)) == "a"


def test_a_memory_that_is_damaged_or_not_writable_costs_only_time(
    big: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rivals, attempts = [engine("a", big), engine("b", big)], Attempts(a=NARROW, b=WIDE)
    for content in (None, "{", "[]", '{"b": "fast"}'):
        for file in (tmp_path / "cache" / "engines").glob("*.json"):
            file.write_text(content or "")
        assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempts)) == "b"
    assert len(attempts.names) == 16
    for file in (tmp_path / "cache" / "engines").glob("*"):
        file.unlink()
    (tmp_path / "cache" / "engines").rmdir()
    (tmp_path / "cache" / "engines").write_text("a file")
    assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempts)) == "b"
    assert "cannot be written" in caplog.text


def test_an_engine_that_fails_is_not_taken(big: Path) -> None:
    rivals, lines = [engine("a", big), engine("b", big)], list[str]()
    attempts = Attempts(a="its library is for another platform", b=NARROW)
    assert name(fastest(rivals, "model", OPTIONS, report=lines.append, attempt=attempts)) == "b"
    assert "a is not used: its library is for another platform" in lines
    attempts = Attempts(a="x", b="y")
    os.utime(big, ns=(2, 2))
    assert fastest(rivals, "model", OPTIONS, report=lines.append, attempt=attempts) is None
    assert lines[-1] == "model does not run here with a, b"


def test_a_trial_that_failed_for_a_passing_reason_is_repeated(big: Path, tmp_path: Path) -> None:
    """A refusal is believed for a day; a trial that took too long is repeated at the next start."""
    rivals, attempts = [engine("a", big), engine("b", big)], Attempts(a="took too long", b="refused")

    def chosen() -> str:
        return name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempts))

    assert chosen() == "a", "which may well run"
    attempts.costs = {"a": NARROW, "b": WIDE}
    assert chosen() == "a" and attempts.names == ["a", "b", "a", "a"]
    forget_refusals(tmp_path)
    assert chosen() == "b" and attempts.names == ["a", "b", "a", "a", "b", "b"]


def forget_refusals(directory: Path) -> None:
    """Makes what the cache below a directory remembers older than a refusal may be."""
    (file,) = (directory / "cache" / "engines").glob("*.json")
    yesterday = time.time() - 25 * 3600
    known = json.loads(file.read_text())
    file.write_text(json.dumps({name: (value, min(when, yesterday)) for name, (value, when) in known.items()}))


def test_a_refusal_is_forgotten_though_another_engine_was_measured_meanwhile(big: Path, tmp_path: Path) -> None:
    """Other work goes on whenever the other engine is measured, so each start writes the file again."""
    rivals, trials = [engine("a", big), engine("b", big)], list[str]()

    def attempt(name: str, path: Path, options: EngineOptions, deterministic: bool | None) -> trial.Timings:
        trials.append(name)
        if name == "a":
            raise trial._TrialFailed("refused")
        return [(width, Timing(True, taken_ns)) for width, taken_ns in NARROW]

    for expected in (["a", "b", "b"], ["b", "b"], ["a", "b", "b"]):
        trials.clear()
        assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempt)) == "b" and trials == expected
        if expected == ["b", "b"]:
            forget_refusals(tmp_path)


def test_what_another_process_measured_meanwhile_is_taken(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rivals, attempts = [engine("a", big), engine("b", big)], Attempts(a=NARROW, b=WIDE)

    @contextmanager
    def after_another(seconds: float) -> Iterator[None]:
        monkeypatch.setattr(trial, "alone", measuring.alone)
        fastest(rivals, "model", OPTIONS, report=str, attempt=attempts)
        yield

    monkeypatch.setattr(trial, "alone", after_another)
    assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempts)) == "b"
    assert attempts.names == ["a", "b", "a", "b"]


def test_a_long_wait_for_another_process_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SILENT_SECONDS", 0.05)
    with measuring.alone(9.0):
        assert not caplog.messages
        with measuring.alone(0.1):
            assert caplog.messages == ["waiting until another process has measured its engines, for at most 0 s"]
    with measuring.alone(0.0):
        assert len(caplog.messages) == 1


@pytest.mark.parametrize(("error", "passing"), [(UnusableModel, False), (TrialUnfinished, True)])
def test_a_trial_that_is_to_be_repeated_says_so(
    error: type[UnusableModel],
    passing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its process ends with a status that its starter understands."""
    refusing = replace(TORCH, open=Mock(side_effect=error("it does not\nload")))
    monkeypatch.setattr("services.engines.registry.engine_spec", lambda name: refusing)
    monkeypatch.setattr("sys.argv", ["trial", "torch", str(tmp_path), trial._encoded(OPTIONS, False, False)])
    with pytest.raises(SystemExit) as ended:
        trial.main()
    done = subprocess.CompletedProcess((), ended.value.code, capsys.readouterr().out, "")
    monkeypatch.setattr(trial, "run", lambda *given, seconds: done)
    with pytest.raises(trial._TrialFailed, match="it does not load") as failed:
        trial._attempt("torch", tmp_path, OPTIONS, False, drafts=False)
    assert failed.value.passing is passing


def test_auto_goes_on_with_other_files_if_no_engine_runs_those_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engines.spec.find_spec", lambda name: name in ("ik_llama_cpp", *TORCH.modules))
    monkeypatch.setattr("services.engines.ik_llama.spec.missing_instructions", lambda: "")
    assert choose_engine("auto", "gemma-3-270m", OPTIONS, lambda *_: None)[0].name == "torch"
    assert choose_engine("auto", "gemma-3-270m", OPTIONS)[0] is IK_LLAMA


def test_the_only_engine_tries_a_file_by_itself_if_it_can(big: Path) -> None:
    tried, lines, no_trial = list[tuple[Path, Weights]](), list[str](), Attempts()

    def try_file(path: Path, options: EngineOptions, report: Report) -> None:
        tried.append((path, options.weights))
        if len(tried) > 1:
            raise UnusableModel("the library crashes with it")

    only = replace(engine("a", big), try_file=try_file, auto_weights=Weights.REPACKED)
    for chosen in ("a", "", ""):
        assert name(fastest([only], "model", OPTIONS, report=lines.append, attempt=no_trial)) == chosen
    assert tried == [(big, Weights.REPACKED)] * 2, "a refusal is believed for a day"
    assert lines == ["a is not used: the library crashes with it", "model does not run here with a"]
    os.utime(big, ns=(3, 3))
    for _ in range(2):
        unfinished = replace(only, try_file=Mock(side_effect=TrialUnfinished("it takes more than 120 s")))
        with pytest.raises(TrialUnfinished, match="more than 120 s"):  # others may need several times the memory
            fastest([unfinished], "model", OPTIONS, report=str, attempt=no_trial)
        unfinished.try_file.assert_called_once(), "what was not found out is not remembered"
    rivals, attempts = [only, engine("b", big)], Attempts(a=WIDE, b=NARROW)
    assert name(fastest(rivals, "model", OPTIONS, report=str, attempt=attempts)) == "a" and len(tried) == 2


@pytest.mark.parametrize(
    "error",
    [
        UnusableModel("it cannot be exported"),
        NoSpace(Path("a"), "the file", 1, 2),
        CacheUnusable(Path("a"), "Read-only file system"),
    ],
)
def test_a_model_that_an_engine_cannot_convert_is_left_to_others(big: Path, error: Exception) -> None:
    def refuse(model: str, options: EngineOptions, report: object) -> Path:
        raise error

    lines = list[str]()
    refusing = replace(LLAMACPP, name="a", prepare=refuse)
    assert fastest([refusing], "model", OPTIONS, report=lines.append) is None
    assert lines == [f"a is not used: {error}"]
    attempts = Attempts(b=WIDE)
    assert name(fastest([refusing, engine("b", big)], "model", OPTIONS, report=str, attempt=attempts)) == "b"


def test_a_damaged_file_is_not_tried_with_other_engines(big: Path) -> None:
    def refuse(model: str, options: EngineOptions, report: object) -> Path:
        raise DamagedFile("it is damaged")

    refusing, lines = replace(LLAMACPP, name="a", prepare=refuse), list[str]()
    with pytest.raises(DamagedFile):
        fastest([refusing, engine("b", big)], "model", OPTIONS, report=lines.append)
    assert not lines


def test_auto_passes_over_an_engine_with_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engines.ik_llama.spec.missing_instructions", lambda: "")
    most = replace(OPTIONS, slot_count=MAX_CONTEXTS)
    assert IK_LLAMA.reason_to_skip("gemma-3-270m", most) == ""
    assert "27 sequences" in IK_LLAMA.reason_to_skip("gemma-3-270m", replace(most, slot_count=MAX_CONTEXTS + 1))


def test_all_options_reach_the_process_of_a_trial() -> None:
    gaudi = GaudiOptions(max_graphs=3, quant_config=Path("maxabs.json"))
    for options in (OPTIONS, replace(OPTIONS, weights=Weights.INT8, dtype=Dtype.BFLOAT16, gaudi=gaudi)):
        for drafts in (True, False):
            assert trial._decoded(trial._encoded(options, True, drafts)) == (options, True, drafts)


def test_a_trial_has_as_much_memory_for_its_sequence_as_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model whose cache is large is refused, whatever the server may use for it."""
    given = list[EngineOptions]()

    def open_(path: Path, options: EngineOptions) -> None:
        given.append(options)
        raise UnusableModel("seen")

    spec = replace(LLAMACPP, open=open_)
    monkeypatch.setattr("services.engines.registry.engine_spec", lambda name: spec)
    keys = set[str]()
    for byte_count, slot_count in ((2 << 30, 8), (8 << 30, 2), (1 << 20, 8)):
        options = replace(OPTIONS, cache_byte_limit=byte_count, slot_count=slot_count, threads=1)
        monkeypatch.setattr("sys.argv", ["trial", "llamacpp", str(tmp_path), trial._encoded(options, None, False)])
        with pytest.raises(SystemExit):
            trial.main()
        keys.add(trial._key([spec], {}, options, False, None))
    assert [(one.slot_count, one.cache_byte_limit >> 20) for one in given] == [(1, 256), (1, 4096), (1, 256)]
    assert len(keys) == 2, "a refusal for lack of memory does not hold for more"


def test_a_small_model_is_not_measured(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MIN_WEIGHT_BYTES", 5)
    attempts = Attempts()
    assert name(fastest([engine("a", big), engine("b", big)], "m", OPTIONS, report=str, attempt=attempts)) == "a"


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
    costs = trial._attempt("torch", tiny_models[0], options, False, drafts=False)
    assert [width for width, _ in costs][:4] == [1, 2, 3, 4] and all(timing.taken_ns > 0 for _, timing in costs)
    broken = tmp_path / "ik_llama_cpp"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('wrong ELF class')")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")]))
    with pytest.raises(trial._TrialFailed, match=r"cannot be loaded \(wrong ELF class\)"):
        trial._attempt("ik_llama", tmp_path / "model.gguf", options, False, drafts=True)
