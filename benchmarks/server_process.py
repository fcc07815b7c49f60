"""Runs the HTTP server of another engine in an environment of its own, for benchmarks and tests."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_START_SECONDS, _STOP_SECONDS, _REQUEST_SECONDS = 300.0, 20.0, 300.0
_POLL_SECONDS, _HEALTH_SECONDS = 0.3, 5.0
_JSON = {"Content-Type": "application/json"}


class ServerFailed(Exception):
    """The server did not start; the message has the end of its log."""


def free_port() -> int:
    """Returns a port of this machine that nothing listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Runs a server until the block ends, which begins when `/health` at its port answers.

    `environment` is added to that of this process. All output goes to `log`. Raises `ServerFailed`.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_for(port, process, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(port: int, path: str, body: Mapping[str, Any]) -> Any:
    """Sends a request to a server of this machine, and returns its answer, both in JSON."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), _JSON)
    with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
        return json.load(response)


def abandon(port: int, path: str, body: Mapping[str, Any], after: float) -> None:
    """Sends a request, and closes the connection after `after` seconds, without reading the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), _JSON)
    time.sleep(after)  # the client leaves in the middle of its request
    connection.close()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    health = f"http://127.0.0.1:{port}/health"
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=_HEALTH_SECONDS):
            return
        time.sleep(_POLL_SECONDS)  # between two polls of its health
    raise ServerFailed(f"the server did not start; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
