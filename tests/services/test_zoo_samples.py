"""Tests what `draftbridge zoo measure` runs and keeps: resuming, failures, the prompts and the models."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from bridge.errors import InvalidField
from draftbridge import CallError
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli.terminal import CannotWrite
from services.cli.zoo.command import _numbers, _split
from services.cli.zoo.running import _read
from services.cli.zoo.samples import ALONE, AUTO, TURNS, InvalidSamples, Plan, SampleFile, measure, sample_of
from tests.services.test_zoo_report import sample

PROMPTS = [{"prompt": f"p{number}", "category": ""} for number in range(3)]
PLAN = Plan(("t",), ("d", "e"), PROMPTS, [0.0], 48, refused=frozenset({("t", "e")}))
MODELS: dict[tuple[str, str], dict[str, Any]] = {("target", "t"): {"revision": "1"}, ("draft", "d"): {"revision": "1"}}
States = bridge_pb2.ServiceState


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces generations by made-up samples, and returns their keys."""
    keys: list[Any] = []

    def take(client: object, key: Any, prompt: Any) -> Any:
        keys.append(key)
        return replace(sample("t", "d", AUTO, 0), **key._asdict())

    monkeypatch.setattr("services.cli.zoo.samples.take", take)
    return keys


def run(path: Path, **options: Any) -> SampleFile:
    file = SampleFile(path, MODELS, **options)
    assert len(list(measure(None, PLAN, file))) == 9  # type: ignore[arg-type]
    return file


def test_a_stopped_measurement_resumes_after_the_last_whole_sample(tmp_path: Path, taken: list[Any]) -> None:
    path = tmp_path / "zoo" / "samples.jsonl"
    steps = measure(None, PLAN, SampleFile(path, MODELS))  # type: ignore[arg-type]
    for _ in range(4):
        next(steps)
    with path.open("a") as file:
        file.write('{"sample": {"target": "t", "dra')  # killed while it wrote
    run(path)
    assert len(taken) == len(set(taken)) == 9
    assert not any(key.draft == "e" for key in taken)
    assert [key.way for key in taken[:3]] == [ALONE, AUTO, TURNS] and taken[3].way == AUTO, "the order rotates"


def test_only_models_with_samples_must_be_the_same(tmp_path: Path, taken: list[Any]) -> None:
    path = tmp_path / "samples.jsonl"
    new = ("draft", "new")
    SampleFile(path, {("draft", "d"): {"revision": "0"}, new: {"revision": "0"}})
    run(path)
    for models in ({}, MODELS | {new: {"revision": "1"}}, MODELS | {("target", "d"): {}}):
        assert len(SampleFile(path, models).samples) == 9
    with pytest.raises(InvalidSamples, match=r"another draft d: .* instead of"):
        SampleFile(path, MODELS | {("draft", "d"): {"revision": "2"}})
    with pytest.raises(InvalidSamples, match="another machine"):
        SampleFile(path, MODELS, "another processor")
    for text, problem in (
        ('{"models": {"t": {"revision": "1"}}}\n', "another version"),
        ("nonsense\n", "cannot be read"),
        ('{"format": 3, "processor": ""}\n{"sample": {"target": "t"}}\n', "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidSamples, match=problem):
            SampleFile(path, MODELS)
    path.write_bytes(b"\xff")
    for unreadable in (path, tmp_path):
        with pytest.raises(InvalidSamples, match="cannot be read"):
            SampleFile(unreadable, MODELS)


class Bridge:
    """A client whose drafts fail; `answers`: whether the bridge itself answers."""

    answers = True

    def generate(self, *_: object, draft: str, **__: object) -> None:
        if draft or not self.answers:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "DRAFT_AWAY", "the draft is away", {})

    def stream(self, *_: object, **__: object) -> Iterator[Any]:
        yield bridge_pb2.GenerateDelta(text="a", token_ids=[1])
        yield bridge_pb2.GenerateFinished()

    def models(self) -> None:
        if not self.answers:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE", "nothing answers", {})


def test_a_sample_that_fails_is_kept_with_its_error_and_repeated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bridge = tmp_path / "samples.jsonl", Bridge()
    file = SampleFile(path, MODELS)
    assert len(list(measure(bridge, PLAN, file))) == 9  # type: ignore[arg-type]
    again = SampleFile(path, MODELS)
    for one in (file, again):
        assert len(one.samples) == 3 and set(one.failures.values()) == {"the draft is away"}
        assert {key.draft for key in one.failures} == {"d"}
    monkeypatch.setattr("services.cli.zoo.samples.take", lambda client, key, prompt: sample_of(answer(), key, ""))
    list(measure(bridge, PLAN, again))  # type: ignore[arg-type]
    assert len(SampleFile(path, MODELS).samples) == 9 and not SampleFile(path, MODELS).failures


def test_a_bridge_that_does_not_answer_ends_the_measurement(tmp_path: Path) -> None:
    bridge = Bridge()
    bridge.answers = False
    with pytest.raises(CallError, match="nothing answers"):
        next(measure(bridge, PLAN, SampleFile(tmp_path / "samples.jsonl", MODELS)))  # type: ignore[arg-type]


def answer(**fields: Any) -> Iterator[Any]:
    yield bridge_pb2.GenerateDelta(text="a", token_ids=[1])
    yield bridge_pb2.GenerateFinished(speculation=bridge_pb2.SpeculationStatistics(**fields))


def test_a_text_that_lost_its_draft_is_not_a_sample() -> None:
    key = PLAN.keys()[1][0]
    assert sample_of(answer(note="the draft was lost"), key, "") == "the draft was lost"
    assert getattr(sample_of(answer(), key, ""), "text", None) == "a"


class Listing:
    """A client of a bridge with these services."""

    def __init__(self, *services: States) -> None:
        self._services = services

    def services(self) -> tuple[States, ...]:
        return self._services

    def pairs(self) -> list[bridge_pb2.Pair]:
        return [bridge_pb2.Pair(target="t", draft="t", refusal="only replica")]


def service(address: str, role: Any, name: str = "", problem: str = "", forward_ns: int = 0) -> States:
    state = States.STATE_REFUSED if problem else States.STATE_AVAILABLE
    costs = [model_pb2.ForwardCost(token_count=1, forward_ns=forward_ns)]
    described = model_pb2.Model(name=name, forward_costs=costs)
    return States(address=address, role=role, state=state, problem=problem, model=described)


def test_models_that_cannot_be_used_stay_in_the_zoo_with_their_problem(capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT
    client = Listing(
        service("a:1", target, "t"), service("b:1", target, "lost", "it is away"), service("a:1", draft, "t"),
        service("c:1", draft, "", "its tokenizer is not understood"), service("d:1", draft, "t", "two models"),
    )  # fmt: skip
    zoo = _read(client, [], [], {"c:1": "gone"})  # type: ignore[arg-type]
    assert (list(zoo.targets), list(zoo.drafts)) == (["t", "lost"], ["t", "gone"])
    assert list(zoo.models) == [("target", "t"), ("draft", "t")]
    assert zoo.refused["t", "t"] == "only replica" and "tokenizer is not" in zoo.refused["t", "gone"]
    assert "it is away" in zoo.refused["lost", ""] and "it is away" in zoo.refused["lost", "t"]
    plan = Plan(zoo.targets, zoo.drafts, PROMPTS[:1], [0.0], 8, refused=frozenset(zoo.refused))
    assert [(key.target, key.way) for key, _ in plan.keys()] == [("t", ALONE)]
    assert capsys.readouterr().err.count("cannot be used") == 3, "each service, also one whose name another has"
    assert list(_read(client, ["t"], [], {}).targets) == ["t"]  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="lost"):
        _read(client, ["nobody"], [], {})  # type: ignore[arg-type]


def test_a_target_and_a_draft_of_one_name_have_their_own_times() -> None:
    target, draft = model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT
    client = Listing(
        service("a:1", target, "t", forward_ns=1), service("b:1", target, "t", forward_ns=2),
        service("c:1", draft, "t", forward_ns=3),
    )  # fmt: skip
    zoo = _read(client, [], [], {})  # type: ignore[arg-type]
    assert {place: one.costs for place, one in zoo.times.items()} == {
        ("target", "t"): ((1, 1),), ("draft", "t"): ((1, 3),)
    }, "the first of each role"  # fmt: skip


def test_all_given_prompts_are_measured_and_the_number_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    measured, probes, text = _split(path, None)
    assert [one["prompt"] for one in measured] == ["p0", "p1", "p2"]
    assert [one["prompt"] for one in probes] == ["p1", "p2"] and "3 of 3 prompts, predicted from the last" in text
    measured, probes, text = _split(path, 1)
    assert (len(measured), len(probes), text) == (1, 2, "1 of 3 prompts")
    assert len(_split(None, None)[0]) == 4


@pytest.mark.parametrize("text", ["", "warm", "0,,1", "-1", "nan", "1000"])
def test_a_wrong_temperature_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match="--temperatures"):
        _numbers(text)
    assert _numbers("0, 1,0") == [0.0, 1.0]


def test_a_sample_that_does_not_fit_on_the_disk_is_an_error_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path, {})
    path.unlink()
    path.symlink_to("/dev/full")
    one = sample("t", "", ALONE, 0)
    with pytest.raises(CannotWrite, match=r"samples\.jsonl cannot be written .*: free some space"):
        file.add(one.key, one)
