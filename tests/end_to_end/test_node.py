"""Tests a client in another language that has only the .proto files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftbridge import Client
from services.cli.processes import Fleet

HERE = Path(__file__).parent
PROTOS = HERE.parents[1] / "protos"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the script, next to its installed packages. The extra `dev` has npm and Node.js."""
    place = tmp_path_factory.mktemp("node")
    shutil.copytree(HERE / "node", place, dirs_exist_ok=True)
    command = [BIN / "npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=place, timeout=200, check=True)
    return place / "generate.js"


def run(script: Path, address: str, prompt: str, max_tokens: int = 24) -> tuple[int, dict]:
    done = subprocess.run(
        [str(BIN / "node"), str(script), str(PROTOS), address, prompt, str(max_tokens)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_node_streams_the_same_text(script: Path, tiny_fleet: Fleet) -> None:
    with Client(tiny_fleet.bridge) as client:
        expected = client.generate("The quick brown fox", max_tokens=24)
    code, result = run(script, tiny_fleet.bridge, "The quick brown fox")
    assert code == 0
    assert result["text"] == expected.text
    assert result["token_ids"] == list(expected.token_ids)
    assert result["started"]["target"] == "tiny-target"
    assert result["started"]["seed"].isdecimal()
    assert result["finished"]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert result["finished"]["usage"]["generated_token_count"] == 24
    assert result["deltas"] > 1


def test_node_sees_the_status_of_a_refusal(script: Path, tiny_fleet: Fleet) -> None:
    code, result = run(script, tiny_fleet.bridge, "")
    assert code == 1
    assert result["code"] == 3  # INVALID_ARGUMENT
    assert "nothing to continue" in result["message"]
    assert result["reason"] == "EMPTY_PROMPT"
    code, result = run(script, tiny_fleet.bridge, "The", 0)
    assert code == 1
    assert result["reason"] == "INVALID_FIELD" and result["metadata"]["field"] == "max_tokens"


def test_node_sees_that_nothing_answers(script: Path) -> None:
    code, result = run(script, "127.0.0.1:1", "The")
    assert code == 1
    assert result["code"] == 14 and "reason" not in result  # UNAVAILABLE, from gRPC itself
