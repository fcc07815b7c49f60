"""The Kubernetes overlays render, are valid, and configure their processes as intended."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.grammars import trial
from services.sandbox import jinja, tokenizer_selftest
from tests.deploy.commands import ROOT
from tests.deploy.manifests import KUBERNETES, OVERLAYS, cores_of, environment_of, of_kind, processes, render

# Kinds of the Prometheus operator, of which the validator has no schema.
OPERATOR = ("PodMonitor", "PrometheusRule")
OPEN = ("base", "overlays/one-node")
METRICS = (ROOT / "docs/reference/metrics.md").read_text()
SECRETS = {
    "draftbridge-tls": {"tls.crt", "tls.key", "ca.crt"},
    "draftbridge-keys": {"keys.toml"},
    "draftbridge-services": {"keys.toml", "token"},
    "draftbridge-guest": {"token"},
    "draftbridge-monitoring": {"token"},
}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def labels_of(deployment: dict[str, Any]) -> dict[str, str]:
    return deployment["spec"]["template"]["metadata"]["labels"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a selector with labels or expressions selects a pod."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_are_valid(overlay: str) -> None:
    for one in render(overlay):
        if one["kind"] not in OPERATOR:
            kubernetes_validate.validate(one, "1.37", strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in render(overlay)]
    assert len(set(names)) == len(names)
    namespaced = [one["metadata"] for one in render(overlay) if one["kind"] != "Namespace"]
    assert {one.get("namespace") for one in namespaced} == {"draftbridge"}


def test_the_policy_of_the_documentation_lets_the_traces_of_all_processes_out() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "deploy/README.md").read_text(), flags=re.M | re.S)
    (policy,) = [one for one in map(yaml.safe_load, blocks) if one.get("kind") == "NetworkPolicy"]
    kubernetes_validate.validate(policy, "1.37", strict=True)
    pods = [labels_of(one) for one in of_kind("base", "Deployment")]
    assert pods and all(selects(policy["spec"]["podSelector"], labels) for labels in pods)
    assert policy["spec"]["policyTypes"] == ["Egress"]


def test_a_wrong_object_is_noticed() -> None:
    (wrong, *_) = of_kind("base", "Deployment")
    wrong = wrong | {"spec": wrong["spec"] | {"replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_processes_are_configured_as_they_are_connected(overlay: str, tmp_path: Path) -> None:
    found = {one.name: one for one in processes(overlay, tmp_path)}
    assert {"bridge", "draft"} <= set(found)
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "Service")}
    for process in found.values():
        ports = {one["name"]: one["containerPort"] for one in process.container["ports"]}
        values = process.values
        assert ports["grpc"] == port_of(values["listen"])
        assert ports["metrics"] == port_of(values["metrics"])
        assert ports.get("http") == (port_of(values["http"]) if values.get("http") else None)
        assert all(one["targetPort"] in ports for one in services[process.name]["ports"])
        # HTTP/2 in the clear, unless the overlay has TLS.
        named = {one.get("appProtocol") for one in services[process.name]["ports"] if one["name"] == "grpc"}
        assert named == {"kubernetes.io/h2c" if overlay in OPEN else None}
        pause = process.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert process.pod["terminationGracePeriodSeconds"] >= pause + values["grace"] + 10
    bridge = found["bridge"].values
    for address in (*bridge["target"], *bridge["draft"]):
        name, _, port = address.partition(":")
        assert port_of(found[name].values["listen"]) == int(port)
        assert services[name]["clusterIP"] == "None", "a name with the addresses of all pods"
    roles = {one.values["role"] for one in found.values() if "role" in one.values}
    assert roles == {"target", "draft"} if "target" in found else {"draft"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_processes_are_as_secure_as_their_overlay(overlay: str, tmp_path: Path) -> None:
    for process in processes(overlay, tmp_path):
        values = process.values
        assert values["insecure"] is (overlay in OPEN)
        assert (values["tls_certificate"] is not None and values["keys"] is not None) is not values["insecure"]
        if process.name == "bridge":
            assert (values["service_ca"] is not None and values["service_token_file"] is not None) is not values[
                "insecure"
            ]
        given = [str(one) for key, one in values.items() if isinstance(one, Path)]
        mounts = [one["mountPath"] for one in process.container["volumeMounts"]]
        assert all(any(file.startswith(f"{mount}/") for mount in mounts) for file in given)
    for deployment in of_kind(overlay, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False, "DRAFTBRIDGE_... of a service would be taken for settings"
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {one["name"]: one for one in pod["volumes"]}
        for container in pod["containers"]:
            own = container["securityContext"]
            assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert {"startupProbe", "readinessProbe"} <= container.keys()
            assert {one["name"] for one in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            assert len(volume) == 2, f"one kind of volume: {volume}"
            if secret := volume.get("secret"):
                assert {one["key"] for one in secret.get("items", ())} <= SECRETS[secret["secretName"]]
            if claim := volume.get("persistentVolumeClaim"):
                claims = [one["metadata"]["name"] for one in of_kind(overlay, "PersistentVolumeClaim")]
                assert claim["claimName"] in claims


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_the_process_itself(overlay: str, tmp_path: Path) -> None:
    found = {one.name: one for one in processes(overlay, tmp_path)}
    starts = {name: one.container["startupProbe"] for name, one in found.items()}
    limits = {name: one["periodSeconds"] * one["failureThreshold"] for name, one in starts.items()}
    for process in found.values():
        environment = environment_of(process.container)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = process.container[kind]
            # A bridge without a target runs, and is not restarted, but gets no requests.
            service = ["draftbridge.v1.BridgeService"] if (kind, process.name) == ("readinessProbe", "bridge") else []
            if overlay in OPEN:
                assert probe["grpc"]["port"] == port_of(process.values["listen"])
                assert probe["grpc"].get("service") == (service[0] if service else None)
                continue
            assert "grpc" not in probe, "Kubernetes' own probes speak no TLS"
            assert probe["exec"]["command"] == ["draftbridge", "health", *(["--service"] if service else []), *service]
            assert port_of(environment["DRAFTBRIDGE_CLIENT_SERVER"]) == port_of(process.values["listen"])
            assert environment["DRAFTBRIDGE_CLIENT_SERVER_NAME"] == process.name
            assert environment["DRAFTBRIDGE_CLIENT_CA"] == "/etc/draftbridge-tls/ca.crt"
    assert min(limits.values()) >= 1500
    # A bridge waits for a target that is starting, and is not restarted meanwhile.
    wait = found["bridge"].values["connect_timeout"]
    assert limits.get("target", 0) <= wait < limits["bridge"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rollout_is_given_the_time_that_its_pods_have_to_start(overlay: str) -> None:
    for deployment in of_kind(overlay, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        start = container["startupProbe"]
        assert deployment["spec"]["progressDeadlineSeconds"] > start["periodSeconds"] * start["failureThreshold"] + 300


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rolling_update_needs_no_spare_accelerator_or_node(overlay: str) -> None:
    for deployment in of_kind(overlay, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        scarce = overlay == "overlays/one-node" or any(
            name.endswith((".com/gpu", "/gaudi")) for name in container["resources"]["limits"]
        )
        wanted = {"maxSurge": 0, "maxUnavailable": 1} if scarce else {"maxSurge": 1, "maxUnavailable": 0}
        assert deployment["spec"]["strategy"]["rollingUpdate"] == wanted


def test_one_node_of_four_cores_has_room_for_all() -> None:
    deployments = of_kind("overlays/one-node", "Deployment")
    assert sum(cores_of(one["spec"]["template"]["spec"]["containers"][0]) for one in deployments) <= 3.5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_on_cpus_compute_with_as_many_threads_as_they_request_cores(overlay: str, tmp_path: Path) -> None:
    for process in processes(overlay, tmp_path):
        if process.name != "bridge":
            on_cpu = process.values["engine"] == "ik_llama"
            assert process.values["threads"] == (cores_of(process.container) if on_cpu else None)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_bridge_has_memory_for_its_sandboxes(overlay: str, tmp_path: Path) -> None:
    (bridge,) = [one for one in processes(overlay, tmp_path) if one.name == "bridge"]
    limit = bridge.container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    # Kubernetes ends all processes of a container that exceeds its memory, so each sandbox must fit beside the bridge.
    for sandbox in (tokenizer_selftest.MEMORY_LIMIT_BYTES, trial.MEMORY_LIMIT_BYTES, jinja.MEMORY_LIMIT_BYTES):
        assert sandbox + 2 * (bridge.values["guest_memory"] << 20) <= int(limit[:-2]) << 30


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods(overlay: str) -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind(overlay, "Deployment")}
    labels = [labels_of(one) for one in deployments.values()]
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert sum(selects(budget["spec"]["selector"], one) for one in labels) == 1
    assert len(of_kind(overlay, "PodDisruptionBudget")) == len(deployments)
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "NetworkPolicy")}
    for policy in policies.values():
        assert any(selects(policy["podSelector"], one) for one in labels)
    for name, one in deployments.items():
        (policy,) = [policy for policy in policies.values() if selects(policy["podSelector"], labels_of(one))]
        assert set(policy["policyTypes"]) == ({"Ingress"} if name == "vllm" else {"Ingress", "Egress"})
    for name in {"bridge", "vllm"} & set(policies):
        (admitted,) = [one["podSelector"] for one in policies[name]["ingress"][0]["from"]]
        assert selects(admitted, {"draftbridge-client": "true"}), "any pod with this label"
        assert not selects(admitted, labels_of(deployments["draft"]))
    # Bridge and draft run close to the process with which the bridge exchanges a message for each pass or step.
    wanted = "target" if "target" in deployments else "vllm"
    for name in ("bridge", "draft"):
        near = deployments[name]["spec"]["template"]["spec"]["affinity"]["podAffinity"]
        terms = [one["podAffinityTerm"] for one in near["preferredDuringSchedulingIgnoredDuringExecution"]]
        assert all(selects(one["labelSelector"], labels_of(deployments[wanted])) for one in terms)
        assert "topology.kubernetes.io/zone" in {one["topologyKey"] for one in terms}
    monitors = of_kind(overlay, "PodMonitor")
    for monitor in monitors:
        endpoint = monitor["spec"]["podMetricsEndpoints"][0]
        assert endpoint.get("scheme") == "https" and endpoint["port"] == "metrics"
        assert endpoint["authorization"]["credentials"]["name"] in SECRETS
        chosen = [name for name, one in deployments.items() if selects(monitor["spec"]["selector"], labels_of(one))]
        assert set(chosen) == set(deployments) - {"vllm"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_autoscalers_use_metrics_that_exist(overlay: str) -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind(overlay, "Deployment")}
    adapter = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yaml").read_text())
    patterns = [re.search(r'=~"([^"]+)"', one["seriesQuery"])[1] for one in adapter["rules"]["custom"]]  # type: ignore[index]
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        scaled = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in scaled["spec"], "the autoscaler owns the number"
        for metric in scaler["spec"]["metrics"]:
            name = metric["pods"]["metric"]["name"]
            assert f"| `{name}` | gauge |" in METRICS
            assert any(re.fullmatch(pattern, name) for pattern in patterns)


def test_every_component_is_part_of_an_overlay() -> None:
    used = {
        one
        for file in KUBERNETES.glob("overlays/*/kustomization.yaml")
        for one in yaml.safe_load(file.read_text()).get("components", ())
    }
    assert {f"../../components/{one.name}" for one in (KUBERNETES / "components").iterdir()} == used


def test_vllm_is_given_an_adapter_and_settings_that_exist() -> None:
    settings = pytest.importorskip("draftbridge.guests.settings")
    (vllm,) = [one for one in of_kind("overlays/vllm-guests", "Deployment") if one["metadata"]["name"] == "vllm"]
    (container,) = vllm["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    read = settings.GuestSettings.read(None, environment)
    bridge = next(one for one in of_kind("overlays/vllm-guests", "Service") if one["metadata"]["name"] == "bridge")
    assert read.bridge == f"bridge:{bridge['spec']['ports'][0]['port']}"
    (grace,) = [int(one.partition("=")[2]) for one in container["args"] if one.startswith("--shutdown-timeout=")]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert vllm["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= pause + grace + 10
    known = {f"DRAFTBRIDGE_GUEST_{one.name.upper()}" for one in fields(settings.GuestSettings)}
    assert set(environment) <= known
    (speculation,) = [one.partition("=")[2] for one in container["args"] if one.startswith("--speculative-config=")]
    module, _, name = json.loads(speculation)["model"].rpartition(".")
    assert f"class {name}" in (ROOT / "protos" / f"{module.replace('.', '/')}.py").read_text()
