"""Tests `draftbridge zoo` and `draftbridge doctor` over running services."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftbridge import Client
from services.cli import terminal
from services.cli.app import app
from services.cli.processes import Fleet

PROMPTS = [{"prompt": "The quick brown fox", "category": "tales"}, {"prompt": "She sells sea", "category": "shells"}]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the terminal so wide that no cell is cut."""
    monkeypatch.setattr(terminal.out, "_width", 200)
    monkeypatch.setattr(terminal.out, "_height", 50)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


def test_measure_predicts_runs_resumes_and_reports(tiny_fleet: Fleet, tmp_path: Path, prompts: Path) -> None:
    output = tmp_path / "zoo"
    command = ("zoo", "measure", "--server", tiny_fleet.bridge, "--prompts", str(prompts), "--count", "1")
    command += ("--tokens", "12", "--temperatures", "0,0.5", "--output", str(output))
    text = run(*command)
    assert "tiny-target" in text and "tiny-draft" in text and "95% interval" in text and "predicted" in text
    figures = json.loads((output / "zoo.json").read_text())
    (pair,) = figures["pairs"]
    assert (pair["target"], pair["draft"], pair["gain"]["count"]) == ("tiny-target", "tiny-draft", 1)
    assert pair["texts"] == {"count": 4, "equal": 4, "near_ties": 0}
    assert [one["temperature"] for one in figures["predictions"]] == [0.0, 0.5] and figures["failures"] == []
    assert 0 < pair["vocabulary_overlap"] < 1
    with Client(tiny_fleet.bridge) as client:
        models = {one.model.name: one.model for one in client.services()}
    # None if other tests kept the cores busy when the servers started.
    reported = [[cost.token_count, cost.forward_ns] for cost in models["tiny-target"].forward_costs]
    assert figures["models"]["tiny-target"]["costs"] == reported
    samples = (output / "samples.jsonl").read_text().splitlines()
    found = [one["sample"] for one in map(json.loads, samples) if "sample" in one]
    assert len(found) == 2 * 3, "alone, auto and turns at two temperatures"
    texts = {(one["temperature"], one["text"]) for one in found}
    assert len(texts) == 2, "a text depends on the temperature, not on the way"
    assert "tiny-draft" in (output / "report.html").read_text()
    run(*command)
    assert (output / "samples.jsonl").read_text().splitlines() == samples, "nothing is measured twice"
    (output / "report.html").unlink()
    (output / "report.html").symlink_to("/dev/full")
    result = CliRunner().invoke(app, list(command))
    assert "report.html cannot be written" in str(result.exception) and "95% interval" in result.output


def test_predict_and_show_print_every_pair(tiny_fleet: Fleet, tmp_path: Path, prompts: Path) -> None:
    command = ("zoo", "predict", "--server", tiny_fleet.bridge, "--prompts", str(prompts), "--count", "1")
    assert "tiny-draft" in run(*command, "--output", str(tmp_path / "zoo"))
    text = run("zoo", "show", "--server", tiny_fleet.bridge)
    assert "available" in text and "best" in text and tiny_fleet.target in text


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(tiny_fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        app, ["zoo", "predict", "--server", tiny_fleet.bridge, "--output", str(tmp_path / "file")]
    )
    assert result.exit_code == 2 and "cannot be made a folder" in " ".join(result.output.replace("│", " ").split())


def test_a_zoo_without_a_pair_that_works_is_a_failure(tiny_fleet: Fleet, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("too long " * 200)
    for name in ("predict", "measure"):
        command = ["zoo", name, "--server", tiny_fleet.bridge, "--prompts", str(prompts), "--output", str(tmp_path)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and f"no pair could be {name}" in result.output, result.output
    assert json.loads((tmp_path / "zoo.json").read_text())["failures"], "the report shows what failed"


def test_names_that_the_bridge_does_not_have_are_refused(tiny_fleet: Fleet, tmp_path: Path) -> None:
    command = ["zoo", "predict", "--server", tiny_fleet.bridge, "--drafts", "nobody", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "names that the bridge has (tiny-draft)" in str(result.exception)
    for option in ("--targets", "--drafts"):
        for names in ("", ","):
            command = ["zoo", "measure", option, names, "--output", str(tmp_path)]
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 1 and f"{option} must be names" in str(result.exception)
    result = CliRunner().invoke(app, ["zoo", "predict", "--server", tiny_fleet.bridge, "--engine", "torch"])
    assert result.exit_code == 1 and "--engine must be left out with --server" in str(result.exception)
    result = CliRunner().invoke(app, ["zoo", "predict", "--targets", "a/model.gguf,b/model.gguf", "--drafts", "suffix"])
    assert result.exit_code == 1 and "different names, got model for a/model.gguf, b/model.gguf" in str(
        result.exception
    )
    result = CliRunner().invoke(app, ["zoo", "measure", "--server", tiny_fleet.bridge, "--temperatures", "warm"])
    assert result.exit_code == 1 and "--temperatures" in str(result.exception)


def test_the_doctor_prints_findings_and_ends_with_their_status(tiny_fleet: Fleet) -> None:
    text = run("doctor", "--server", tiny_fleet.bridge, "--verbose")
    assert "findings are in order" in text and "accepts connections" in text and "tiny-draft beside tiny-target" in text
    result = CliRunner().invoke(app, ["doctor", "--server", tiny_fleet.target])
    assert result.exit_code == 1 and "give the address of the bridge" in result.output
