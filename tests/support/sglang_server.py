"""Runs SGLang's server, in an environment of its own, and sends it requests."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import server_process

_ROOT = Path(__file__).parents[2]
_STAND_IN = _ROOT / "tests" / "guests" / "standin"
# Computes in PyTorch, because kernels for CPUs would have to be built from source.
_OPTIONS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
    "--mem-fraction-static", "0.5", "--skip-server-warmup", "--host", "127.0.0.1",
)  # fmt: skip


@dataclass(frozen=True)
class Completion:
    """The generated tokens, the forwards that verified candidates, and how many of those were right."""

    ids: tuple[int, ...]
    text: str
    verify_count: int
    accepted_count: int


@dataclass(frozen=True)
class SglangServer:
    """A running server."""

    port: int
    log: Path

    def complete(self, prompt: str, max_tokens: int, **sampling: Any) -> Completion:
        """Generates greedily."""
        answer = server_process.post(self.port, "/generate", _request(prompt, max_tokens, **sampling))
        counts = answer["meta_info"]
        return Completion(
            tuple(answer["output_ids"]),
            answer["text"],
            counts.get("spec_verify_ct", 0),
            counts.get("spec_num_correct_drafts", 0),
        )

    def abandon(self, prompt: str, max_tokens: int, after: float) -> None:
        """Sends a request, and closes the connection after `after` seconds, without reading the answer."""
        server_process.abandon(self.port, "/generate", _request(prompt, max_tokens), after)


def _request(prompt: str, max_tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, **sampling}}


@contextlib.contextmanager
def sglang_server(
    python: Path, model: str, log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[SglangServer]:
    """Runs a server until the block ends. `python`: of SGLang's environment. Raises `ServerFailed`."""
    port = server_process.free_port()
    command = (
        str(python), str(_STAND_IN / "serve_sglang.py"), "--model-path", model, "--port", str(port), *_OPTIONS, *options
    )  # fmt: skip
    own = {
        "PYTHONPATH": f"{_STAND_IN}:{_ROOT}:{_ROOT / 'protos'}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with server_process.running(command, port, log, own | dict(environment or {})):
        yield SglangServer(port, log)
