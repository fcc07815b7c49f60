"""Tests what the demo does when models cannot be had, and what it says of a gain."""

import io
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridge.errors import UnusableModel
from draftbridge.v1 import bridge_pb2
from services.cli import demo
from services.cli.bench import ALONE, AUTO, Sample
from services.cli.demo import LARGE, SMALL, Demonstration, large_engine
from services.cli.processes import ProcessFailed
from services.errors import ChecksumMismatch, DamagedFile, ModelNotFound
from services.store.cache import NoSpace


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Errors by model; other models are there. They are fetched in the main thread, which Ctrl-C interrupts."""
    errors: dict[str, Exception] = {}

    def resolve(model: str, report: object, *, weights: str) -> Path:
        assert threading.current_thread() is threading.main_thread()
        if model in errors:
            raise errors[model]
        return Path(model)

    monkeypatch.setattr(demo, "resolve", resolve)
    monkeypatch.setattr(demo, "bound_command", lambda *_: [sys.executable, "-c", ""])
    prepare = partial(resolve, weights="some")
    monkeypatch.setattr(demo.registry, "prepare", lambda engine, model, options, report: prepare(model, report))
    return errors


FULL_PRECISION = replace(LARGE, engine="torch")
NO_SPACE = NoSpace(Path("models"), "the download", 1 << 30, 2 << 30)


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (ModelNotFound("no source has it"), ["the small pair"]),
        (ChecksumMismatch("a part is another file"), ["the small pair"]),
        (DamagedFile("it ends before its last tensor"), ["the small pair"]),
        (UnusableModel("it could not be converted"), ["--engine auto", "the small pair"]),
        (NO_SPACE, ["--engine auto", "the small pair"]),
    ],
)
def test_without_the_large_target_it_goes_on_with_the_small_pair(
    gone: dict[str, Exception], error: Exception, steps: list[str]
) -> None:
    gone[LARGE.target] = error
    lines: list[str] = []
    assert demo._fetched(FULL_PRECISION, lines.append) == SMALL
    for line, step in zip(lines, steps, strict=True):
        assert line.startswith(f"{error}; going on with {step}")
    own = demo._fetched(replace(LARGE, prompt="Mine"), lines.append)
    assert own == replace(SMALL, prompt="Mine"), "the prompt is still the user's"


def test_without_room_for_full_precision_the_large_target_runs_in_another_engine(
    gone: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> Path:
        raise NO_SPACE

    monkeypatch.setattr(demo.registry, "prepare", prepare)
    assert demo._fetched(FULL_PRECISION, str) == replace(LARGE, engine="auto")


def test_without_the_draft_that_both_pairs_have_nothing_else_is_tried(gone: dict[str, Exception]) -> None:
    gone[LARGE.draft] = ModelNotFound("no source has it")
    lines: list[str] = []
    with pytest.raises(ModelNotFound, match="no source has it"):
        demo._fetched(LARGE, lines.append)
    assert not lines


@pytest.mark.parametrize("wanted", [replace(LARGE, draft="nonsense"), replace(SMALL, target="nonsense")])
def test_another_pair_than_was_asked_for_never_runs(gone: dict[str, Exception], wanted: Demonstration) -> None:
    gone["nonsense"] = ModelNotFound("nonsense is no model")
    with pytest.raises(ModelNotFound):
        demo._fetched(wanted, str)


def test_a_large_target_that_does_not_start_is_replaced_and_the_small_pair_runs(
    tiny_models: tuple[Path, Path], gone: dict[str, Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Real processes: the large target's directory is empty."""
    target, draft = (str(path) for path in tiny_models)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(demo, "LARGE", replace(FULL_PRECISION, target=str(tmp_path / "empty"), draft=draft))
    monkeypatch.setattr(demo, "SMALL", replace(SMALL, target=target, draft=draft, engine="torch"))
    lines, console = list[str](), Console(file=io.StringIO(), width=100)
    demo.run(console, demo.LARGE, None, lines.append)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    failed = [line for line in lines if "did not start" in line]
    assert all(line.startswith("the target did not start: see its message above; going on with ") for line in failed)
    assert ["--engine auto" in line for line in failed] == [True, False] and failed[1].endswith("the small pair")
    assert SMALL.prompt in printed and "target alone" in printed and "auto" in printed
    assert "Both texts are the same" in printed or "The two texts part after" in printed
    with pytest.raises(ProcessFailed, match="the target did not start"):
        demo.run(console, replace(demo.LARGE, draft="none"), 24, lines.append)


def test_a_draft_that_does_not_start_is_not_tried_with_another_target(
    tiny_models: tuple[Path, Path], gone: dict[str, Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Real processes: the draft's directory is empty."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(demo, "LARGE", replace(LARGE, target=str(tiny_models[0]), draft=str(tmp_path / "empty")))
    lines = list[str]()
    with pytest.raises(ProcessFailed, match="the draft did not start"):
        demo.run(Console(file=io.StringIO()), demo.LARGE, 24, lines.append)
    assert "going on" not in "\n".join(lines)


def test_the_reason_is_that_of_the_engine_that_the_target_has() -> None:
    """`auto` may choose torch, where no faster engine is installed."""
    assert (large_engine(without_bfloat16=True), large_engine(without_bfloat16=False)) == ("auto", "torch")
    assert "in full precision" in LARGE.reason("torch") and "--engine auto" in LARGE.reason("ik_llama")
    assert "(--engine torch)" in LARGE.reason("ik_llama") and "(make demo)" in SMALL.reason("ik_llama")
    for reason in (*LARGE.reasons.values(), *SMALL.reasons.values()):
        assert "Without a draft, 4-bit weights on a CPU (--engine llamacpp or ik_llama" in reason
    assert replace(LARGE, reasons={}).reason("torch") == ""


@pytest.mark.parametrize(("alone", "count"), [(0.0, 48), (1.4, 48), (2.0, 60), (8.7, 96), (50.0, 96)])
def test_a_slow_target_generates_a_shorter_text(alone: float, count: int) -> None:
    assert demo._token_count(alone) == count


@pytest.mark.parametrize(
    ("tried", "words"), [(0, "expected no gain from any source"), (7, "None of the 7 candidates was right")]
)
def test_a_gain_of_nothing_is_explained(tried: int, words: str) -> None:
    did = bridge_pb2.SpeculationStatistics(num_draft_tokens=tried)
    together = Sample(0, "", AUTO, 10, 10, 0, "", did)
    assert words in demo._why(together, replace(together, way=ALONE))


def test_the_gain_is_explained_by_source() -> None:
    sources = [
        bridge_pb2.SourceStatistics(name="draft", accepted_byte_count=77),
        bridge_pb2.SourceStatistics(name="suffix", accepted_byte_count=1),
        bridge_pb2.SourceStatistics(name="learned"),
    ]
    did = bridge_pb2.SpeculationStatistics(
        num_draft_tokens=40, num_accepted_tokens=20, target_pass_count=10, verify_ns=10, elapsed_ns=10,
        generated_byte_count=100, sources=sources,
    )  # fmt: skip
    together = Sample(0, "", AUTO, 29, 10, 0, "", did)
    expected = "Why: of the text, 77% was proposed by the draft and 1% by prompt lookup. So a pass"
    assert demo._why(together, replace(together, way=ALONE)).startswith(expected)


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_a_draft_without_a_model_needs_no_files(gone: dict[str, Exception], draft: str) -> None:
    gone[draft] = ModelNotFound("there is no such model")
    assert demo._fetched(replace(LARGE, draft=draft), str).draft == draft


@pytest.mark.parametrize(
    ("alone", "words"), [("größer", "same, byte for byte (the target is served with"), ("größe", "That is a bug")]
)
def test_the_texts_are_compared_in_words(alone: str, words: str) -> None:
    assert words in demo._compared("größer", alone)


@pytest.mark.parametrize("fails", [False, True])
def test_the_draft_is_read_beside_the_target(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """In a process that does not outlive this one's interest in it, and whose errors are shown here."""
    begun, resolved, after_draft = list[list[str]](), list[str](), list[int | None]()

    class Process(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **options: Any) -> None:
            begun.append(words)
            # The one of a target that fails goes on until it is ended.
            super().__init__([sys.executable, "-c", f"import time; time.sleep({600 * fails})"], **options)

        def terminate(self) -> None:
            super().terminate()
            after_draft.append(self.wait(60))

    def resolve(model: str, report: object, *, weights: str) -> None:
        resolved.append(model)
        if fails:
            raise ModelNotFound("no source has it")

    monkeypatch.setattr(demo, "resolve", resolve)
    monkeypatch.setattr(demo.subprocess, "Popen", Process)
    with pytest.raises(ModelNotFound) if fails else nullcontext():
        demo._fetched(SMALL, str)
    assert [words[-2:] for words in begun] == [["services.store.resolve", SMALL.draft]]
    assert resolved == [SMALL.target] if fails else [SMALL.target, SMALL.draft]
    assert after_draft == [-signal.SIGTERM if fails else 0]
    if not fails:
        demo._fetched(replace(SMALL, draft="none"), str)
        assert len(begun) == 1
