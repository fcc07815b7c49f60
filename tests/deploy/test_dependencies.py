"""Tests the dependencies that pyproject.toml declares: against the pinned versions, the imports and the stubs."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["optional-dependencies"].items()}
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
# What is imported, where the package has another name. The longest prefix counts.
PACKAGES = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_channelz": "grpcio-channelz",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "ik_llama_cpp": "ik-llama-cpp-python",
    "llama_cpp": "llama-cpp-python",
    "opentelemetry": "opentelemetry-sdk",  # which requires the same version of opentelemetry-api
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "optimum": "optimum-habana",
    "pydantic_core": "pydantic",  # which pins it
}
# Gaudi's own containers bring these.
BROUGHT = {"deepspeed", "habana-frameworks", "neural-compressor"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def package(module: str) -> str:
    known = [name for name in PACKAGES if f"{module}.".startswith(f"{name}.")]
    return PACKAGES[max(known, key=len)] if known else canonicalize_name(module.split(".")[0])


def pins(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), flags=re.M)
    return {canonicalize_name(name): Version(version) for name, version in lines}


# The other extras have environments of their own.
@pytest.mark.parametrize(
    ("file", "extras"),
    [("constraints.txt", ["dev", "llamacpp", *EXTRAS["dev"][0].extras]), ("constraints-habana.txt", ["habana"])],
)
def test_the_pinned_versions_are_within_the_bounds(file: str, extras: list[str]) -> None:
    pinned = pins(file)
    wanted = [*BASE, *(one for extra in extras for one in EXTRAS[extra])]
    wanted = [one for one in wanted if one.name != PROJECT["name"]]
    assert all(one.specifier.contains(pinned[canonicalize_name(one.name)]) for one in wanted)


def test_what_is_installed_beside_vllm_satisfies_both() -> None:
    """The newest versions that vLLM 0.32 accepts, of what it bounds and both need."""
    accepted = {"llguidance": "1.7.6", "transformers": "5.19.0"}
    bounds = {one.name: one.specifier for one in BASE}
    assert all(bounds[name].contains(version) for name, version in accepted.items())
    (vllm,) = EXTRAS["vllm"]
    assert vllm.specifier.contains("0.32.0") and not vllm.specifier.contains("0.33.0"), "it names what was tested"


def test_what_is_imported_is_declared() -> None:
    declared = {canonicalize_name(one.name) for one in BASE} | BROUGHT
    for extra, requirements in EXTRAS.items():
        if extra != "dev":
            declared |= {canonicalize_name(one.name) for one in requirements}
    own = {"bridge", "services", "draftbridge", *sys.stdlib_module_names}
    missing = {
        f"{path.relative_to(ROOT)}: {module}"
        for folder in ("bridge", "services", "protos")
        for path in (ROOT / folder).rglob("*.py")
        for module in imported(ast.parse(path.read_text()))
        if module.split(".")[0] not in own and package(module) not in declared
    }
    assert not missing


def test_the_stubs_run_with_the_lowest_versions() -> None:
    lowest = {one.name: str(one.specifier).removeprefix(">=") for one in BASE}
    for path in (ROOT / "protos" / "draftbridge" / "v1").glob("*_pb2*.py"):
        text = path.read_text()
        if path.stem.endswith("_grpc"):
            wanted = re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", text)
            assert wanted == [lowest["grpcio"]], path
        else:
            ((major, minor, patch),) = re.findall(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", text)
            assert f"{major}.{minor}.{patch}" == lowest["protobuf"], path
