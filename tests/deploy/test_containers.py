"""Checks the container files as far as possible without building them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from services.cli.connection import _OPTIONS
from tests.deploy.commands import ROOT, parse
from tests.deploy.manifests import tool

FILES = sorted((ROOT / "deploy/containers").glob("*.Dockerfile"))
OURS = [file for file in FILES if file.name != "vllm.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_file_passes_the_linter(file: Path) -> None:
    done = subprocess.run([tool("hadolint"), str(file)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linter_notices_faults(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && apt-get install curl\n")
    command = [tool("hadolint"), str(tmp_path / "Dockerfile")]
    assert subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_image_runs_without_rights(file: Path) -> None:
    text = file.read_text()
    assert text.rindex("\nUSER 10001:10001") > text.rindex("\nFROM")
    assert "useradd --uid 10001" in text
    stages = re.findall(r"^FROM \S+( AS build)?$", text, flags=re.M)
    assert len(stages) == (2 if file in OURS else 1)


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_the_health_check_is_the_projects_own_command(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, flags=re.M)
    name, *arguments = json.loads(check)
    assert name == "draftbridge"
    assert parse(arguments)["timeout"] > 0
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, flags=re.M)
    assert json.loads(entry) == ["draftbridge"]
    (address,) = re.findall(r"DRAFTBRIDGE_CLIENT_SERVER=(\S+)", text)
    assert re.fullmatch(r"127\.0\.0\.1:5005[01]", address)


def test_variables_of_the_client_exist() -> None:
    known = {one.envvar for _, one in _OPTIONS.values() if one.envvar}
    known |= {"DRAFTBRIDGE_CLIENT_SERVER", "DRAFTBRIDGE_CLIENT_SERVER_NAME"}
    for file in [*FILES, *ROOT.glob("deploy/**/*.yaml")]:
        assert set(re.findall(r"DRAFTBRIDGE_CLIENT_\w+", file.read_text())) <= known


def test_images_are_built_from_everything_that_is_installed() -> None:
    kept = {one.removeprefix("!") for one in (ROOT / ".dockerignore").read_text().splitlines() if one.startswith("!")}
    packages = re.search(r"packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    assert {one.strip(' "').partition("/")[0] for one in packages[1].split(",")} <= kept
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= kept


def test_images_have_the_python_that_tests_run_on() -> None:
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    chosen = [found for file in OURS for found in re.findall(r"^ARG PYTHON=(.*)", file.read_text(), flags=re.M)]
    assert chosen == [oldest[1]] * 2


def test_extras_exist() -> None:
    known = re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    for file in OURS:
        for extras in re.findall(r"EXTRAS=(\S+)|'\.\[(\S+)\]'", file.read_text()):
            assert set("".join(extras).split(",")) <= set(known)
