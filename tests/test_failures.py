"""Services that go away, hang and come back under a running bridge."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2
from services.processes import READY, fleet, stop
from tests.waiting import eventually

PROMPT = "The quick brown fox"
OPTIONS = ("--dtype", "float32", "--threads", "1")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def served(model: Path, address: str) -> Iterator[None]:
    """The model at a given address, again."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", str(model), "--listen", address, *OPTIONS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert READY in process.stdout.readline()
    try:
        yield
    finally:
        stop(process)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see when signals are handled")
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
def test_a_bridge_that_waits_for_its_models_can_be_stopped(signal_: signal.Signals) -> None:
    command = ["bridge", "--target", free_address(), "--connect-timeout", "600", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([sys.executable, "-m", "services.cli", *command], stderr=subprocess.PIPE, text=True)

    def handles() -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    with process:
        try:
            eventually(handles)
            process.send_signal(signal_)
            assert process.communicate(timeout=10)[1] == ""
            assert process.returncode == 0
        finally:
            process.kill()


def test_services_come_and_go(tiny_models: tuple[Path, Path]) -> None:
    target, draft = tiny_models
    at, at_draft = free_address(), free_address()
    with (
        fleet(
            str(target),
            str(draft),
            target_options=("--listen", at, *OPTIONS),
            draft_options=("--listen", at_draft, *OPTIONS),
        ) as running,
        Client(running.bridge) as client,
    ):
        expected = client.generate(PROMPT, max_tokens=100, speculation="off")

        # A draft that hangs changes nothing, and holds nothing up for long.
        os.kill(running.processes["draft"].pid, signal.SIGSTOP)
        for mode in ("opportunistic", "lockstep"):
            assert client.generate(PROMPT, max_tokens=100, speculation=mode).text == expected.text
        os.kill(running.processes["draft"].pid, signal.SIGCONT)

        # Killed, it changes nothing; back again, it is used again.
        running.processes["draft"].kill()
        running.processes["draft"].wait()
        result = client.generate(PROMPT, max_tokens=100, speculation="lockstep")
        assert result.text == expected.text
        assert "SERVICE_UNREACHABLE" in result.finished.speculation.note
        assert [one.reachable for one in client.status().endpoints] == [True, False]
        with served(draft, at_draft):
            for _ in range(50):  # the channel finds it at its next try
                result = client.generate(PROMPT, max_tokens=100, speculation="lockstep")
                assert result.text == expected.text
                if result.finished.speculation.proposed_token_count:
                    break
            assert result.finished.speculation.note == ""

        # Without its target a generation fails, and says so, also half-way.
        with pytest.raises(CallError) as caught:
            for event in client.stream(PROMPT, speculation="off"):
                if isinstance(event, bridge_pb2.GenerateDelta):
                    running.processes["target"].kill()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE")
        assert at in str(caught.value)
        running.processes["target"].wait()
        with pytest.raises(CallError, match=at):
            client.generate(PROMPT, max_tokens=5)
        with served(target, at):
            for _ in range(50):
                try:
                    result = client.generate(PROMPT, max_tokens=100)
                    break
                except CallError as error:
                    assert error.reason == "SERVICE_UNREACHABLE"
            assert result.text == expected.text
        assert client.status().failed_count >= 2
