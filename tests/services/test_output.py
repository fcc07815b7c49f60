"""What commands print on full disks, on terminals without Unicode, and if Ctrl-C or an error comes in between."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from draftbridge import CallError
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.cli import connection, demo, terminal
from services.cli.app import app
from services.cli.fitted import Fitted


class Scripted(bridge_pb2_grpc.BridgeServiceServicer):
    """A bridge that generates one text, or fails in the middle of it if that is the prompt."""

    def Generate(  # noqa: N802
        self, request: bridge_pb2.GenerateRequest, context: Any
    ) -> Iterator[bridge_pb2.GenerateResponse]:
        yield bridge_pb2.GenerateResponse(started=bridge_pb2.GenerateStarted(target="one"))
        yield bridge_pb2.GenerateResponse(delta=bridge_pb2.GenerateDelta(text="a party é 🎉"))
        if request.prompt == "fail":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield bridge_pb2.GenerateResponse(finished=bridge_pb2.GenerateFinished())

    def ListModels(  # noqa: N802
        self, request: bridge_pb2.ListModelsRequest, context: Any
    ) -> bridge_pb2.ListModelsResponse:
        return bridge_pb2.ListModelsResponse()


@pytest.fixture(scope="module")
def bridge() -> Iterator[str]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(Scripted(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None)


# A shell starts background jobs so that they ignore Ctrl-C, and these tests may be one.
_HEEDING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def run(*words: str, stdout: Any = subprocess.PIPE, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs a module in a process of its own, which reads its environment itself, and heeds Ctrl-C."""
    command = [sys.executable, "-c", _HEEDING, sys.executable, "-m", *words]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )


class Answering:
    """Stands in for the client of a bridge with one service."""

    def __init__(self, *_: object) -> None:
        self._model = model_pb2.Model(name="one", engine="[odd] engine", device="gpu[0]")

    def __enter__(self) -> "Answering":
        return self

    def __exit__(self, *_: object) -> None: ...

    def models(self) -> list[model_pb2.Model]:
        return [self._model]

    def services(self) -> list[bridge_pb2.ServiceState]:
        return [bridge_pb2.ServiceState(address="[fd00::2]:50051", model=self._model)]

    def pairs(self, _: str) -> list[bridge_pb2.Pair]:
        return []


@pytest.mark.parametrize("words", [("models",), ("zoo", "show")])
def test_addresses_and_names_are_printed_as_they_are(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "Client", Answering)
    shown = CliRunner().invoke(app, [*words, "--server", "[fd00::1]:50050"]).output
    assert "[fd00::1]:50050" in shown and "[odd] engine" in shown
    assert ("gpu[0]" if words == ("models",) else "[fd00::2]:50051") in shown


def test_no_text_becomes_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    text = "d[:100:] at 127.0.0.1:100:x"
    terminal.report(text)
    terminal.warn(text)
    events = demo._printed(terminal.out, iter([bridge_pb2.GenerateDelta(text=text)]))
    assert len(list(events)) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (text, f"{text}\nwarning: {text}\n")


@pytest.mark.parametrize("width", [200, 110, 90, 70, 40, 30])
def test_a_table_is_readable_at_any_width(width: int) -> None:
    cells = ("127.0.0.1:50051", "target", "smollm2-135m-instruct", "12.3 / 15.1 ms", "[bold]it[/] has not answered yet")
    names = ("service", "role", "model", "1 / 8 tokens", "problem")
    table = Table(*names, title="a title")
    table.add_row(*cells)
    table.add_row(*cells[:4], "")
    console = Console(width=width, file=io.StringIO())
    console.print(Fitted(table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width and "…" not in text and "title" in text
    if width >= 40:
        assert all(word in text for one in (*names, *cells) for word in re.sub(r"\[.*?\]", "", one).split())
    assert ("┃" in text) == (width >= 110)


@pytest.mark.parametrize("words", [("generate", "x"), ("generate", "x", "--json"), ("models",), ("engines",)])
def test_a_full_disk_is_one_line_of_error(bridge: str, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run("services.cli", *words, stdout=full, DRAFTBRIDGE_CLIENT_SERVER=bridge)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the output cannot be written (No space left on device)")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [("generate", "x"), ("models",), ("version",)])
def test_a_closed_pipe_has_the_same_status_in_every_command(bridge: str, words: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run("services.cli", *words, stdout=write_end, DRAFTBRIDGE_CLIENT_SERVER=bridge)
    os.close(write_end)
    assert done.returncode == 1 and "error" not in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_with_standard_streams_that_are_closed(bridge: str, closed: str) -> None:
    words = ("-m", "services.cli", "generate", "x", "--server", bridge)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *words], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr


def test_a_terminal_without_unicode_shows_escapes(bridge: str) -> None:
    words = ("services.cli", "generate", "x", "--server", bridge)
    done = run(*words, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "a party \\xe9 \\U0001f389\n"), done.stderr
    done = run(*words, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout.splitlines()[1])["text"] == "a party é 🎉"


def test_an_error_in_mid_stream_begins_on_a_line_of_its_own(bridge: str) -> None:
    result = CliRunner().invoke(app, ["generate", "fail", "--server", bridge])
    assert isinstance(result.exception, CallError)
    assert result.output == "a party é 🎉\n"


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (("services.cli", "version"), "typer"),
        (("services.cli", "serve", "suffix", "--role", "draft", "--listen", "127.0.0.1:0"), "prometheus_client"),
        (("services.cli", "serve", "none", "--engine", "torch", "--device", "cpu"), "torch"),
        (("services.cli", "bridge", "--listen", "127.0.0.1:0"), "prometheus_client"),
        (("services.cli", "http", "--listen", "127.0.0.1:0"), "prometheus_client"),
        (("services.store.convert", "a.gguf", "b"), "gguf"),
    ],
    ids=lambda given: given[1] if isinstance(given, tuple) else given,
)
def test_ctrl_c_during_the_imports_prints_nothing(tmp_path: Path, words: tuple[str, ...], slow: str) -> None:
    # It sleeps until the signal arrives.
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    (tmp_path / f"{slow}.py").write_text(interrupted)
    done = run(*words, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
