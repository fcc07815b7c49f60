"""Runs vLLM's OpenAI server of another Python environment, and sends it requests, for benchmarks and tests."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_START_SECONDS, _STOP_SECONDS, _REQUEST_SECONDS = 300.0, 20.0, 300.0
# vLLM for CPUs asks for these to be loaded first, where they exist.
_PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")
_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


class ServerFailed(Exception):
    """vLLM did not start; the message has the end of its log."""


@dataclass(frozen=True)
class Completion:
    """What a request produced. `ids`: the generated tokens."""

    ids: tuple[int, ...]
    text: str
    seconds: float


@dataclass(frozen=True)
class VllmServer:
    """A running server."""

    url: str
    log: Path

    def complete(self, prompt: Mapping[str, Any], max_tokens: int, **options: Any) -> Completion:
        """Generates, greedily unless `options` have a temperature. `prompt` has "prompt" or "messages"."""
        chat = "messages" in prompt
        body = {"model": "m", "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **options}
        body |= {"messages": prompt["messages"]} if chat else {"prompt": prompt["prompt"]}
        began = time.monotonic()
        answer = self._post("/v1/chat/completions" if chat else "/v1/completions", body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return Completion(tuple(choice["token_ids"]), text, time.monotonic() - began)

    def samples(self, prompt: Mapping[str, Any], max_tokens: int, **options: Any) -> list[tuple[int, ...]]:
        """Returns the generated tokens of the `n` answers to a prompt."""
        body = {"model": "m", "max_tokens": max_tokens, "return_token_ids": True, "prompt": prompt["prompt"], **options}
        return [tuple(choice["token_ids"]) for choice in self._post("/v1/completions", body)["choices"]]

    def abandon(self, prompt: Mapping[str, Any], max_tokens: int, after: float) -> None:
        """Sends a request, and closes the connection after `after` seconds, without reading the answer."""
        host = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host)
        body = json.dumps({"model": "m", "max_tokens": max_tokens, "prompt": prompt["prompt"], "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        time.sleep(after)  # the client leaves in the middle of its request
        connection.close()

    def counts(self) -> dict[str, float]:
        """Returns vLLM's own counters of speculation and preemption, by name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found = (line.split() for line in lines if line.startswith(("vllm:spec_decode_num_", "vllm:num_preemptions")))
        return {name.partition("{")[0].partition("num_")[2]: float(value) for name, value in found}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            return json.load(response)


@contextlib.contextmanager
def vllm_server(
    python: Path, model: str, log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """Runs a server until the block ends. `python`: of vLLM's environment. Raises `ServerFailed`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folders = (python.parents[1] / "lib", *_LIBRARIES)
    preloaded = [str(folder / name) for name in _PRELOADED for folder in folders if (folder / name).exists()]
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    own = {
        "PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}",
        "LD_PRELOAD": ":".join(preloaded),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | own | (environment or {}), stdout=output, stderr=output, start_new_session=True
        )
    server = VllmServer(f"http://127.0.0.1:{port}", log)
    try:
        _wait_for(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(server: VllmServer, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=1):
            return
        time.sleep(0.3)  # between two polls of its health
    words = server.log.read_text(errors="replace")[-3000:]
    raise ServerFailed(f"vLLM did not start; the end of {server.log}:\n{words}")


def speculation(proposer: str, count: int) -> tuple[str, str]:
    """Returns vLLM's options for a class that proposes candidates."""
    method = {"method": "custom_class", "model": proposer, "num_speculative_tokens": count}
    return "--speculative-config", json.dumps(method)
