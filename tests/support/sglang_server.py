"""Runs SGLang's server, in an environment of its own, and sends it requests."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_STAND_IN = _ROOT / "tests" / "guests" / "standin"
_START_SECONDS, _STOP_SECONDS, _REQUEST_SECONDS = 300.0, 20.0, 300.0
# Computes in PyTorch, because kernels for CPUs would have to be built from source.
_OPTIONS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
    "--mem-fraction-static", "0.5", "--skip-server-warmup", "--host", "127.0.0.1",
)  # fmt: skip


@dataclass(frozen=True)
class Completion:
    """The generated tokens, the forwards that verified candidates, and how many of those were right."""

    ids: tuple[int, ...]
    verify_count: int
    accepted_count: int


@dataclass(frozen=True)
class SglangServer:
    """A running server."""

    port: int
    log: Path

    def complete(self, prompt: str, max_tokens: int, **sampling: Any) -> Completion:
        """Generates greedily."""
        body = json.dumps({"text": prompt, "sampling_params": _greedy(max_tokens) | sampling})
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body.encode(), headers)
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            answer = json.load(response)
        counts = answer["meta_info"]
        return Completion(
            tuple(answer["output_ids"]), counts.get("spec_verify_ct", 0), counts.get("spec_num_correct_drafts", 0)
        )

    def abandon(self, prompt: str, max_tokens: int, after: float) -> None:
        """Sends a request, and closes the connection after `after` seconds, without reading the answer."""
        connection = HTTPConnection("127.0.0.1", self.port)
        body = json.dumps({"text": prompt, "sampling_params": _greedy(max_tokens)})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        time.sleep(after)  # the client leaves in the middle of its request
        connection.close()


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_tokens, "temperature": 0}


@contextlib.contextmanager
def sglang_server(
    python: Path, model: str, log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[SglangServer]:
    """Runs a server until the block ends. `python`: of SGLang's environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = (
        str(python), str(_STAND_IN / "serve_sglang.py"), "--model-path", model, "--port", str(port), *_OPTIONS, *options
    )  # fmt: skip
    own = {
        "PYTHONPATH": f"{_STAND_IN}:{_ROOT}:{_ROOT / 'protos'}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | own | (environment or {}), stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_for(port, process, log)
        yield SglangServer(port, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.3)  # between two polls of its health
    raise AssertionError(f"SGLang did not start; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
