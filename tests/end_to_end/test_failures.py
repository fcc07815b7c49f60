"""Services that end, hang and restart under a running bridge."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest

from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2
from services.cli.processes import READY, Fleet, fleet, launched, stop
from tests.support import warm
from tests.support.alone import did
from tests.support.ports import free_address
from tests.support.waiting import eventually, held

PROMPT = "The quick brown fox"
OPTIONS = ("--dtype", "float32", "--threads", "1")


@contextmanager
def served(model: Path | str, address: str, *options: str) -> Iterator[None]:
    """Serves the model at a given address."""
    own = () if model == "suffix" else OPTIONS
    process = warm.start("serve", str(model), "--listen", address, *own, *options)
    try:
        assert READY in process.stdout.readline()
        yield
    finally:
        stop(process)
        process.stdout.close()


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
            assert process.communicate(timeout=60)[1] == ""
            assert process.returncode == 0
        finally:
            process.kill()


def bridge_of(target: str, draft: str) -> AbstractContextManager[tuple[str, "subprocess.Popen[str]"]]:
    """Starts a bridge whose draft need not be reachable. Yields its address and its process."""
    addresses = ("--target", target, "--draft", draft, "--listen", "127.0.0.1:0")
    return launched("bridge", "bridge", *addresses, "--connect-timeout", "120", "--until-stdin-closes")


def test_a_bridge_starts_without_its_draft_and_takes_it_in(
    tiny_fleet: Fleet, tiny_models: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    at = free_address()
    started = time.monotonic()
    with bridge_of(tiny_fleet.target, at) as (address, _), Client(address) as client:
        assert time.monotonic() - started < 110
        alone = client.generate(PROMPT, max_tokens=60, speculation="lockstep")
        assert alone.started.draft == ""
        assert at in alone.finished.speculation.note
        assert client.generate(PROMPT, max_tokens=5, speculation="off").finished.speculation.note == ""
        with pytest.raises(CallError, match=f"configured at {at}") as caught:
            client.generate(PROMPT, draft="tiny-draft")
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAFT_AWAY")
        assert [(one.address, one.reachable) for one in client.status().endpoints] == [
            (tiny_fleet.target, True),
            (at, False),
        ]
        assert f"no usable service answers at {at}" in client.status().endpoints[1].problem
        assert [model.name for model in client.models()] == ["tiny-target"]
        with served(tiny_models[1], at):
            eventually(lambda: client.status().endpoints[1].reachable)
            result = client.generate(PROMPT, max_tokens=60, speculation="lockstep", draft="tiny-draft")
            assert result.text == alone.text
            assert did(result.finished.speculation, "draft").proposed_token_count > 0
            assert result.finished.speculation.note == ""
            with pytest.raises(CallError) as caught:
                client.generate(PROMPT, draft="nobody")
            assert caught.value.reason == "MODEL_NOT_FOUND"
        # Another model with another tokenizer takes its place at the same address.
        with served("suffix", at, "--role", "draft"):

            def replaced() -> bool:
                result = client.generate(PROMPT, max_tokens=60, speculation="lockstep")
                assert result.text == alone.text
                return result.started.draft == "suffix" and result.finished.speculation.note == ""

            eventually(replaced)
    lines = [line for line in capfd.readouterr().err.splitlines() if at in line]
    assert "requests go on without the draft" in lines[0]
    # Between these lines there may be others, if the bridge notices a service's end before the next one answers.
    taken = [line.split("can be used now: it is ")[1] for line in lines if "can be used now" in line]
    assert taken == ["tiny-draft", "suffix"], lines


def test_a_bridge_goes_on_without_a_draft_that_it_cannot_use(
    tiny_fleet: Fleet, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tiny_fleet.target
    with bridge_of(target, target) as (address, process), Client(address) as client:
        assert client.generate(PROMPT, max_tokens=5).started.draft == ""
        problems = [one.problem for one in client.status().endpoints]
        assert problems[0] == ""
        assert "--role draft" in problems[1]
        # The model at the address has another name than the requested one, or cannot be used as a draft.
        for name, reason in (("nobody", "MODEL_NOT_FOUND"), ("tiny-target", "DRAFT_AWAY")):
            with pytest.raises(CallError) as caught:
                client.generate(PROMPT, draft=name)
            assert caught.value.reason == reason
        # The bridge still tries to connect to the draft, and can be stopped.
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "--role draft" in line


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

        # A draft that hangs changes no text, and delays requests only briefly.
        os.kill(running.processes["draft"].pid, signal.SIGSTOP)
        for mode in ("opportunistic", "lockstep"):
            assert client.generate(PROMPT, max_tokens=100, speculation=mode).text == expected.text
        os.kill(running.processes["draft"].pid, signal.SIGCONT)

        # A killed draft changes no text, and is used again after its restart.
        running.processes["draft"].kill()
        running.processes["draft"].wait(60)
        result = client.generate(PROMPT, max_tokens=100, speculation="lockstep")
        assert result.text == expected.text
        note = result.finished.speculation.note
        assert "SERVICE_UNREACHABLE" in note or "no draft is connected" in note
        assert [one.reachable for one in client.status().endpoints] == [True, False]
        with served(draft, at_draft):
            # The bridge connects at its next attempt.
            def drafted() -> bool:
                result = client.generate(PROMPT, max_tokens=100, speculation="lockstep")
                assert result.text == expected.text
                proposed = any(one.proposed_token_count for one in result.finished.speculation.sources)
                return proposed and result.finished.speculation.note == ""

            eventually(drafted)

        # Without its target a generation fails with an error, even halfway through its text.
        target_process = running.processes["target"]
        with pytest.raises(CallError) as caught:
            for _ in range(50):  # a text may end before its target is stopped
                events = client.stream(PROMPT, speculation="off", ignore_eos=True)
                next(event for event in events if isinstance(event, bridge_pb2.GenerateDelta))
                with held(target_process.pid):
                    if client.status().active_count:
                        target_process.kill()
                        break
            list(events)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE")
        assert at in str(caught.value)
        running.processes["target"].wait(60)
        with pytest.raises(CallError, match=at):
            client.generate(PROMPT, max_tokens=5)
        with served(target, at):

            def served_again() -> bool:
                try:
                    assert client.generate(PROMPT, max_tokens=100).text == expected.text
                except CallError as error:
                    assert error.reason == "SERVICE_UNREACHABLE"
                    return False
                return True

            eventually(served_again)
        assert client.status().failed_count >= 2


def test_processes_are_not_waited_for_if_what_starts_them_for_tests_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "receives_a_command_and_ends"
    code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{code}' \"$3\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    server = warm._Server()
    with server._process, server._socket, pytest.raises(AssertionError, match="has ended"):
        server.start({}, [0])
