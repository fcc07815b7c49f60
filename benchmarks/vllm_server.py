"""Runs vLLM's OpenAI server of another Python environment, and sends it requests, for benchmarks and tests."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import server_process

_ROOT = Path(__file__).parents[1]
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
# vLLM for CPUs asks for these to be loaded first, where they exist.
_PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")
_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


@dataclass(frozen=True)
class Completion:
    """What a request produced. `ids`: the generated tokens."""

    ids: tuple[int, ...]
    text: str
    seconds: float


@dataclass(frozen=True)
class VllmServer:
    """A running server."""

    port: int
    log: Path

    def complete(self, prompt: Mapping[str, Any], max_tokens: int, **options: Any) -> Completion:
        """Generates, greedily unless `options` have a temperature. `prompt` has "prompt" or "messages"."""
        chat = "messages" in prompt
        body = {"model": "m", "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **options}
        body |= {"messages": prompt["messages"]} if chat else {"prompt": prompt["prompt"]}
        began = time.monotonic()
        answer = server_process.post(self.port, _CHAT if chat else _COMPLETIONS, body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return Completion(tuple(choice["token_ids"]), text, time.monotonic() - began)

    def samples(self, prompt: Mapping[str, Any], max_tokens: int, **options: Any) -> list[tuple[int, ...]]:
        """Returns the generated tokens of the `n` answers to a prompt."""
        body = {"model": "m", "max_tokens": max_tokens, "return_token_ids": True, "prompt": prompt["prompt"], **options}
        answer = server_process.post(self.port, _COMPLETIONS, body)
        return [tuple(choice["token_ids"]) for choice in answer["choices"]]

    def abandon(self, prompt: Mapping[str, Any], max_tokens: int, after: float) -> None:
        """Sends a request, and closes the connection after `after` seconds, without reading the answer."""
        body = {"model": "m", "max_tokens": max_tokens, "prompt": prompt["prompt"], "temperature": 0}
        server_process.abandon(self.port, _COMPLETIONS, body, after)

    def counts(self) -> dict[str, float]:
        """Returns vLLM's own counters of speculation and preemption, by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found = (line.split() for line in lines if line.startswith(("vllm:spec_decode_num_", "vllm:num_preemptions")))
        return {name.partition("{")[0].partition("num_")[2]: float(value) for name, value in found}


@contextlib.contextmanager
def vllm_server(
    python: Path, model: str, log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """Runs a server until the block ends. `python`: of vLLM's environment. Raises `ServerFailed`."""
    port = server_process.free_port()
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
    with server_process.running(command, port, log, own | dict(environment or {})):
        yield VllmServer(port, log)


def speculation(proposer: str, count: int) -> tuple[str, str]:
    """Returns vLLM's options for a class that proposes candidates."""
    method = {"method": "custom_class", "model": proposer, "num_speculative_tokens": count}
    return "--speculative-config", json.dumps(method)
