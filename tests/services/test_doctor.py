"""The doctor finds what is wrong with a deployment, names the remedy, and puts the most important first."""

import socket
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftbridge import CallError, Client, Credentials
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli import doctor
from services.cli.doctor import Finding, Level, examine
from services.cli.processes import Fleet
from services.version import VERSION
from tests.support.certificates import authority, issue
from tests.support.secure import suffix_server

States = bridge_pb2.ServiceState


def model(name: str, **fields: Any) -> model_pb2.Model:
    costs = [
        model_pb2.ForwardCost(token_count=count, forward_ns=ns) for count, ns in ((1, 10_000_000), (8, 12_000_000))
    ]
    return model_pb2.Model(
        **({"name": name, "forward_costs": costs, "chat_template": "{{ 1 }}", "server_version": VERSION} | fields)
    )


def service(name: str, role: Any, state: Any = States.STATE_AVAILABLE, **fields: Any) -> States:
    described = fields.pop("model", None) or model(name)
    return States(address=f"{name}:1", role=role, state=state, model=described, round_trip_ns=500_000, **fields)


class Deployment:
    """A client of a bridge whose answers a test chooses. `speeds`: tokens per second by draft, "" for none.

    `near_ties`: by mode. `hanging`: addresses that do not answer the bridge. `refused`: drafts of refused pairs.
    `error`: why each generation fails.
    """

    def __init__(
        self, services: list[States], speeds: dict[str, float], accepted: int = 6, candidates: int = 10
    ) -> None:
        self._services, self._speeds, self._accepted, self._candidates = services, speeds, accepted, candidates
        self.note = ""
        self.text = "the same"
        self.near_ties: dict[str, int] = {}
        self.hanging: tuple[str, ...] = ()
        self.refused: tuple[str, ...] = ()
        self.error: CallError | None = None

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> bridge_pb2.GetStatusResponse:
        endpoints = [
            bridge_pb2.Endpoint(address=one.address, role=one.role, problem="no answer" * (one.address in self.hanging))
            for one in self._services
        ]
        return bridge_pb2.GetStatusResponse(version=VERSION, endpoints=endpoints)

    def models(self) -> list[model_pb2.Model]:
        return []

    def services(self) -> list[States]:
        return self._services

    def pairs(self) -> list[bridge_pb2.Pair]:
        targets = [one.model.name for one in self._services if one.role == model_pb2.ROLE_TARGET]
        return [
            bridge_pb2.Pair(target=one, draft=draft, refusal="the only replica" * (draft in self.refused))
            for one in dict.fromkeys(targets)
            for draft in (*self._speeds, *self.refused)
            if draft
        ]

    def generate(self, prompt: str = "", **options: Any) -> Any:
        if self.error:
            raise self.error
        if options.get("messages"):
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "the template refuses the chat", {})
        assert options["ignore_eos"], "the text might end at once, without a speed"
        draft = options.get("draft", "")
        statistics = bridge_pb2.SpeculationStatistics(
            measured_tokens_per_second=self._speeds[draft], num_draft_tokens=self._candidates,
            num_accepted_tokens=self._accepted, note=self.note,
            near_ties=self.near_ties.get(options.get("speculation", "auto"), 0),
        )  # fmt: skip

        class Answer:
            text = "the same" if not draft else self.text
            finished = bridge_pb2.GenerateFinished(speculation=statistics)

        return Answer()


def examined(deployment: Deployment, on_finding: Callable[[Finding], None] = lambda _: None) -> list[Finding]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        return examine(address, lambda address: deployment, on_finding)  # type: ignore[arg-type, return-value]


def find(found: list[Finding], text: str) -> Finding:
    return next(one for one in found if text in one.text)


TARGET = service("large", model_pb2.ROLE_TARGET)


def test_it_judges_every_draft_and_sorts_by_importance() -> None:
    services = [
        TARGET,
        service("quick", model_pb2.ROLE_DRAFT),
        service("slow", model_pb2.ROLE_DRAFT),
        service("away", model_pb2.ROLE_DRAFT, States.STATE_AWAY, problem="the connection was lost"),
    ]
    found = examined(Deployment(services, {"": 10.0, "quick": 15.0, "slow": 9.0}))
    assert [one.level for one in found] == sorted(one.level for one in found)
    assert find(found, "quick beside large: 1.50x").level is Level.GOOD
    slow = find(found, "slow beside large: 0.90x")
    assert slow.level is Level.SLOW and "zoo measure" in slow.remedy
    assert find(found, "the connection was lost").level is Level.DEGRADED
    chat = find(found, "a chat with large fails")
    assert chat.level is Level.BROKEN and found[0] == chat and chat.remedy == "fix the model's chat template"
    rare = examined(Deployment(services, {"": 10.0, "slow": 9.0}, accepted=1))
    assert "trained on similar text" in find(rare, "often wrong").remedy


@pytest.mark.parametrize(
    ("code", "reason", "level", "remedy"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOTS_EXHAUSTED", Level.DEGRADED, "again when fewer requests run"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "KEY_LIMIT_REACHED", Level.DEGRADED, "again when fewer requests run"),
        (grpc.StatusCode.INTERNAL, "ENGINE_FAILURE", Level.BROKEN, "look at its server's log"),
    ],
)
def test_the_remedy_follows_from_the_error(code: grpc.StatusCode, reason: str, level: Level, remedy: str) -> None:
    deployment = Deployment([TARGET], {"": 10.0})
    deployment.error = CallError(code, reason, "why", {})
    found = [one for one in examined(deployment) if one.check in ("template", "generation")]
    assert [(one.level, one.text[-3:]) for one in found] == [(level, "why")] * 2
    assert all(remedy in one.remedy for one in found)


def test_a_draft_without_candidates_is_not_called_wrong() -> None:
    deployment = Deployment([TARGET, service("mute", model_pb2.ROLE_DRAFT)], {"": 10.0, "mute": 9.0}, 0, 0)
    (found,) = [one for one in examined(deployment) if one.check == "drafts"]
    assert "mute beside large: it proposed no candidate" in found.text and "prompt lookup" in found.remedy
    deployment.note = "the draft was lost"
    (found,) = [one for one in examined(deployment) if one.check == "drafts"]
    assert found.level is Level.DEGRADED and "the draft was lost" in found.text


@pytest.mark.parametrize(
    ("broken", "text", "level", "remedy"),
    [
        (
            service("large", model_pb2.ROLE_TARGET, model=model("large", server_version="0.0.1")),
            "0.0.1",
            Level.DEGRADED,
            "one version",
        ),
        (
            service(
                "", model_pb2.ROLE_TARGET, States.STATE_CONNECTING, problem="it has not answered yet", model=model("")
            ),
            "connecting",
            Level.BROKEN,
            "start it",
        ),
        (
            service(
                "large",
                model_pb2.ROLE_TARGET,
                model=model(
                    "large",
                    forward_costs=[
                        model_pb2.ForwardCost(token_count=1, forward_ns=10_000_000),
                        model_pb2.ForwardCost(token_count=8, forward_ns=60_000_000),
                    ],
                ),
            ),
            "6.0 times as long",
            Level.SLOW,
            "another engine",
        ),
    ],
)
def test_what_is_wrong_has_a_level_and_a_remedy(broken: States, text: str, level: Level, remedy: str) -> None:
    found = find(examined(Deployment([broken], {"": 10.0})), text)
    assert found.level is level and remedy in found.remedy


def test_a_draft_that_is_advised_has_a_model_and_the_fastest_engine() -> None:
    advice = find(examined(Deployment([TARGET], {"": 10.0})), "no draft is configured")
    assert "serve MODEL --role draft --engine auto" in advice.remedy and "serve suffix" not in advice.remedy


def test_a_far_service_is_named() -> None:
    far = States()
    far.CopyFrom(service("far", model_pb2.ROLE_DRAFT))
    far.round_trip_ns = 30_000_000
    found = find(examined(Deployment([TARGET, far], {"": 10.0, "far": 12.0})), "30.0 ms")
    assert found.level is Level.SLOW and "near" in found.remedy
    far.address = "127.0.0.1:50052"
    found = find(examined(Deployment([TARGET, far], {"": 10.0, "far": 12.0})), "30.0 ms")
    assert "cores" in found.remedy, "it cannot be nearer"


def test_one_slow_answer_does_not_make_a_service_far() -> None:
    class Busy(Deployment):
        """The first answer of its draft waits for other work."""

        def status(self) -> bridge_pb2.GetStatusResponse:
            near.round_trip_ns = next(round_trips)
            return super().status()

    round_trips = chain([30_000_000], repeat(500_000))
    near = service("near", model_pb2.ROLE_DRAFT)
    found = examined(Busy([TARGET, near], {"": 10.0, "near": 12.0}))
    assert all(one.level is Level.GOOD for one in found if one.check == "round trips")


def test_a_changed_text_is_the_worst() -> None:
    deployment = Deployment([TARGET, service("wrong", model_pb2.ROLE_DRAFT)], {"": 10.0, "wrong": 20.0})
    deployment.text = "another"
    found = find(examined(deployment), "differs from that of the target alone")
    assert found.level is Level.BROKEN and "--deterministic" in found.remedy
    for mode, excused in (("lockstep", False), ("auto", True), ("off", True)):
        deployment.near_ties = {mode: 1}
        assert any(one.check == "losslessness" for one in examined(deployment)) is not excused, mode


def test_a_service_that_hangs_is_found_and_not_used() -> None:
    deployment = Deployment([TARGET, service("small", model_pb2.ROLE_DRAFT)], {"": 10.0})
    deployment.hanging = ("small:1",)
    found = find(examined(deployment), "small:1 is away: no answer")
    assert found.level is Level.DEGRADED
    deployment.hanging = ("large:1",)
    assert find(examined(deployment), "large:1 is away").level is Level.BROKEN


def test_a_replica_that_is_away_is_not_a_failure() -> None:
    away = States(address="b:1", role=model_pb2.ROLE_TARGET, state=States.STATE_AWAY, model=model("large"))
    fresh = States(address="c:1", role=model_pb2.ROLE_TARGET, state=States.STATE_CONNECTING)
    other = States(address="d:1", role=model_pb2.ROLE_TARGET, state=States.STATE_AWAY, model=model("other"))
    found = examined(Deployment([TARGET, away, fresh, other], {"": 10.0}))
    levels = {address: find(found, f"the target at {address}").level for address in ("b:1", "c:1", "d:1")}
    assert levels == {"b:1": Level.DEGRADED, "c:1": Level.DEGRADED, "d:1": Level.BROKEN}


def test_a_pair_that_cannot_be_is_a_finding_only_if_the_target_has_no_other_draft() -> None:
    deployment = Deployment([TARGET, service("large", model_pb2.ROLE_DRAFT)], {"": 10.0, "small": 15.0})
    deployment.refused = ("large", "away")
    found = examined(deployment)
    assert find(found, "large is not used beside large").level is Level.GOOD
    assert not any("away is not used" in one.text for one in found)
    alone = Deployment([TARGET, service("large", model_pb2.ROLE_DRAFT)], {"": 10.0})
    alone.refused = ("large",)
    only = find(examined(alone), "large is not used beside large")
    assert only.level is Level.SLOW and "--draft" in only.remedy


def test_a_target_that_is_away_is_not_blamed_on_its_draft() -> None:
    deployment = Deployment([TARGET, service("small", model_pb2.ROLE_DRAFT)], {"": 10.0})
    deployment.refused = ("small",)
    assert any(one.check == "pairs" for one in examined(deployment))
    deployment.hanging = ("large:1",)
    assert not any(one.check == "pairs" for one in examined(deployment))


def test_services_of_one_name_with_different_tokenizers_are_named() -> None:
    one, other = (model("large", tokenizer_sha256=letter * 64) for letter in "ab")
    roles = (model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT)
    found = examined(
        Deployment([service("large", roles[0], model=one), service("large", roles[1], model=one)], {"": 9})
    )
    assert find(found, "the checksum is aaaaaaaaaaaa").level is Level.GOOD
    found = examined(Deployment([service("large", roles[0], model=one), service("s", roles[1], model=other)], {"": 9}))
    different = find(found, "have different ones: aaaaaaaaaaaa... at large:1, bbbbbbbbbbbb... at s:1")
    assert different.level is Level.DEGRADED and "--name" in different.remedy


def test_replicas_that_compute_differently_are_named() -> None:
    def replica(address: str, dtype: str, role: Any = model_pb2.ROLE_TARGET, device: str = "cpu") -> States:
        state = service("large", role, model=model("large", engine="ik_llama", device=device, dtype=dtype))
        state.address = address
        return state

    alike = [
        replica("a:1", "Q4_K_M"),
        replica("b:1", "Q4_K_M", device="cpu:1"),
        replica("c:1", "Q8_0", model_pb2.ROLE_DRAFT),
    ]
    assert not [one for one in examined(Deployment(alike, {"": 20})) if one.check == "replicas"]
    found = examined(Deployment([*alike, replica("d:1", "Q4_K_M repacked")], {"": 20}))
    (finding,) = [one for one in found if one.check == "replicas"]
    assert "ik_llama, cpu, Q4_K_M repacked at d:1" in finding.text and "--weights" in finding.remedy


def test_without_a_bridge_it_says_how_to_start_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = examine(f"127.0.0.1:{probe.getsockname()[1]}", Client)
    assert [one.level for one in found] == [Level.BROKEN] and "draftbridge up" in found[0].remedy
    assert examine("nonsense", Client)[0].level is Level.BROKEN


def test_a_bridge_for_engines_only_is_told_from_one_that_can_generate() -> None:
    reported: list[Finding] = []
    found = examined(Deployment([], {}), reported.append)
    assert "no target is configured" in found[0].text and "--target" in found[0].remedy
    assert sorted(reported, key=lambda one: one.level) == found


def test_a_deployment_of_processes_is_examined_from_end_to_end(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TOKENS", 12)
    found = examine(tiny_fleet.bridge, Client)
    assert not [one for one in found if one.level is Level.BROKEN]
    assert {one.check for one in found} >= {
        "port",
        "versions",
        "services",
        "round trips",
        "costs",
        "template",
        "drafts",
    }
    other = examine(tiny_fleet.target, Client)
    assert other[0].level is Level.BROKEN and "address of the bridge" in other[0].remedy


def test_missing_tls_and_tokens_are_told_with_the_option_that_is_missing(tmp_path: Path) -> None:
    ca, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    by = authority(ca)
    authority(other)
    with suffix_server(*issue(by, tmp_path, "server").options) as address:
        for credentials in (None, Credentials(ca=other)):
            found = examine(address, lambda one, given=credentials: Client(one, given))  # type: ignore[misc]
            assert found[0].level is Level.BROKEN and "--ca" in found[0].remedy

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(CallError, match=r"missing\.pem"):  # a mistake of this command's options, not of the bridge
            examine(address, lambda one: Client(one, Credentials(ca=tmp_path / "missing.pem")))

    class Closed(Deployment):
        def status(self) -> bridge_pb2.GetStatusResponse:
            raise CallError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "this call has no token", {})

    found = examined(Closed([], {}))
    assert found[0].level is Level.BROKEN and "--token-file" in found[0].remedy
