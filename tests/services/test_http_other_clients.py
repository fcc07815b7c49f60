"""Tests the HTTP door with clients and a conformance suite that were written elsewhere.

LangChain and LiteLLM need other versions of their libraries than the rest of the tests: `make test-clients` installs
them into a separate environment, and sets DRAFTBRIDGE_CLIENTS_PYTHON to its interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftbridge import Client
from services.cli.processes import Fleet

# Its other cases need images, reasoning, or a refusal without `model`.
CONFORMANCE = (
    "chat-basic-response",
    "chat-system-prompt",
    "chat-multi-turn",
    "chat-streaming-response",
    "chat-streaming-usage",
    "chat-tool-calling",
)


def test_the_conformance_suite_llm_comply(tiny_fleet: Fleet) -> None:
    arguments = ["--format", "openai-chat", "-u", f"{tiny_fleet.http}/v1", "-k", "unused", "-m", "tiny-target"]
    # The tiny model does not end its texts by itself.
    arguments += ["--json", "-f", ",".join(CONFORMANCE), "-i", "finish_reason"]
    command = [str(Path(sys.executable).with_name("llm-comply")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    results = {one["id"]: one for one in report["results"]}
    assert set(results) == set(CONFORMANCE)
    assert {name for name, one in results.items() if one["status"] != "passed"} == set(), done.stdout


def run(name: str, url: str) -> dict[str, Any]:
    python = os.environ.get("DRAFTBRIDGE_CLIENTS_PYTHON")
    if not python:
        pytest.skip("needs an environment of its own: run make test-clients")
    script = Path(__file__).parent / "clients" / f"with_{name}.py"
    command = [python, str(script), f"{url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.clients
@pytest.mark.parametrize("name", ["langchain", "litellm"])
def test_other_clients(tiny_fleet: Fleet, client: Client, name: str) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    expected = client.generate(messages=messages, max_tokens=12, temperature=0.9, seed=11, stop=["zzzz"])
    found = run(name, tiny_fleet.http)
    assert found["text"] == found["streamed"] == expected.text
    assert found["tokens"] == found["streamed tokens"] == expected.finished.usage.generated_token_count
    assert found["error"] == "NotFoundError" or "NotFound" in found["error"]
    if name == "langchain":
        assert found["several"] == [expected.text] * 2
        without, with_tools = found["prompt tokens"]
        assert with_tools > without, "the definition of the tool reaches the template"
