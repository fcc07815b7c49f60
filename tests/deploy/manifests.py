"""Renders the Kubernetes overlays of `deploy/`, and finds the processes in them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.commands import ROOT, parse

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ["base", *sorted(f"overlays/{one.name}" for one in (KUBERNETES / "overlays").iterdir())]


def tool(name: str) -> str:
    """Returns the path of a program of the environment or the system. Skips the test if there is none, but in CI."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found:
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed: the extra dev brings it")
    # A test run needs no kubectl or hadolint on a developer's machine; CI has both.
    pytest.skip(f"{name} is not installed: the extra dev brings it")


@cache
def render(overlay: str) -> list[dict[str, Any]]:
    """Returns the objects of an overlay."""
    command = [tool("kubectl"), "kustomize", str(KUBERNETES / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[dict[str, Any]]:
    """Returns the objects of one kind."""
    return [one for one in render(overlay) if one["kind"] == kind]


@dataclass(frozen=True)
class Process:
    """A container of an overlay that runs `draftbridge`. `values`: its configuration by name."""

    name: str
    pod: dict[str, Any]
    container: dict[str, Any]
    values: dict[str, Any]


def processes(overlay: str, directory: Path) -> Iterator[Process]:
    """Yields the processes of an overlay, configured from its files in `directory`, its environment and its flags."""
    for config in of_kind(overlay, "ConfigMap"):
        for file, text in config["data"].items():
            (directory / file).write_text(text)
    for deployment in of_kind(overlay, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        if container["image"].split(":")[0] == "draftbridge" and container["args"][0] in ("serve", "bridge"):
            (mount,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "config"]
            arguments = [one.replace(mount, str(directory)) for one in container["args"]]
            values = parse(arguments, environment_of(container))
            yield Process(deployment["metadata"]["name"], pod, container, values)


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """Returns the environment variables of a container. Kubernetes rounds its own requests of cores up."""
    requested = str(ceil(cores_of(container)))
    found = {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}
    own = {"resourceFieldRef": {"resource": "requests.cpu"}}
    return {name: requested if value == own else value for name, value in found.items()}


def cores_of(container: dict[str, Any]) -> float:
    """Returns how many cores a container requests."""
    return float(container["resources"]["requests"]["cpu"].replace("m", "e-3"))
