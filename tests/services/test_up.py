"""Tests that `draftbridge up` starts a fleet, and leaves nothing running however it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from draftbridge import CallError, Client, Credentials
from services.cli.app import app
from services.cli.processes import READY, Announcements, ProcessFailed, draft_threads, fleet, launched
from services.cli.zoo import running as zoo
from services.errors import ModelNotFound
from services.rpc.server import HURRIED_SECONDS
from services.store.built_in import SUFFIX
from tests.support.ports import free_address
from tests.support.secure import ALICE, KEYS
from tests.support.waiting import held

COMMANDS = ["pull", "serve", "bridge", "up", "generate", "models", "translate", "demo", "version", "doctor", "zoo"]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Starts a process in a session of its own, and kills it however the block ends: its children then end, too."""
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def up(tiny_models: tuple[Path, Path]) -> Iterator[tuple[subprocess.Popen[str], str, list[psutil.Process]]]:
    """`draftbridge up` on a tiny model with the draft that needs none, ready, and its bridge's address and children."""
    models = ("--target", str(tiny_models[0]), "--draft", "suffix", "--dtype", "float32")
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "up", *models, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"DRAFTBRIDGE_BRIDGE_GRACE": "120"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    reader.start()
    ready = next(line for line in process.stdout if READY in line)
    yield process, ready.removeprefix(READY).strip(), psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    reader.join(60)
    assert not reader.is_alive(), "a child has kept its standard error"
    process.stdout.close()
    process.stderr.close()


# `test_up_with_the_draft_that_needs_no_model` sends SIGINT.
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
def test_up_leaves_nothing_behind(
    up: tuple[subprocess.Popen[str], str, list[psutil.Process]], signal_: signal.Signals
) -> None:
    process, _, children = up
    assert len(children) == 3
    process.send_signal(signal_)
    process.wait(120)
    if signal_ is not signal.SIGKILL:
        assert process.returncode == 0
    # A killed process cannot stop them, but their standard input ends.
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE], "children outlived their parent"


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
def test_up_lets_requests_end_after_sigterm_until_another_signal(
    up: tuple[subprocess.Popen[str], str, list[psutil.Process]], signal_: signal.Signals
) -> None:
    process, address, children = up
    target = next(one for one in children if "target" in one.cmdline())
    with Client(address) as client:
        events = client.stream("The quick", max_tokens=200, ignore_eos=True)
        next(events)
        with held(target.pid):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2 * HURRIED_SECONDS)
            if signal_ is signal.SIGINT:
                process.send_signal(signal_)
                with pytest.raises(CallError):
                    list(events)
        if signal_ is signal.SIGTERM:
            assert list(events)[-1].usage.generated_token_count == 200  # type: ignore[union-attr]
    assert process.wait(120) == 0


def test_a_target_that_was_killed_may_have_lacked_memory(tiny_models: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--target", str(tiny_models[0]), "--draft", "none"]
    command += ["--listen", "127.0.0.1:0", "--dtype", "float32"]
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        next(line for line in process.stdout if READY in line)
        target = next(one for one in psutil.Process(process.pid).children() if "serve" in one.cmdline())
        target.kill()
        assert process.wait(120) == 1
        assert "the target has ended by signal 9, probably because memory ran out: free some" in process.stderr.read()


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_up_is_stopped_while_it_starts(tiny_models: tuple[Path, Path], signal_: signal.Signals) -> None:
    models = [
        word for role, path in zip(("--target", "--draft"), tiny_models, strict=True) for word in (role, str(path))
    ]
    command = [sys.executable, "-m", "services.cli", "up", *models, "--listen", "127.0.0.1:0"]
    with started(command, stdout=subprocess.DEVNULL) as process:
        while not (children := psutil.Process(process.pid).children()):
            assert process.poll() is None
        process.send_signal(signal_)
        assert process.wait(120) == 0
    assert not psutil.wait_procs(children, timeout=120)[1]


STOPPED_DOWNLOAD = """
import signal
import sys
from services.cli.app import app
from services.store import resolve

resolve.resolve = lambda *_, **__: signal.raise_signal(int(sys.argv[1]))
app(["up", "--listen", "127.0.0.1:0"])
"""


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_up_is_stopped_while_it_downloads(signal_: signal.Signals) -> None:
    command = [sys.executable, "-c", STOPPED_DOWNLOAD, str(int(signal_))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--engine", "toch"], "--engine must be one of .*, got 'toch'"),
        (["up", "--dtype", "float3"], "--dtype must be .*, got 'float3'"),
        (["up", "--engine", "torch", "--dtype", "float32", "--draft", "suffix"], "a download"),
        (["up", "--engine", "llamacpp", "--dtype", "float32"], "--dtype must be auto with --engine llamacpp"),
        (["bench", "--engine", "toch"], "--engine must be one of .*, got 'toch'"),
        (["bench", "--draft-engine", "toch"], "--engine must be one of .*, got 'toch'"),
        (["bench", "--weights", "int3"], "--weights must be .*, got 'int3'"),
        (["zoo", "measure", "--engine", "toch"], "--engine must be one of .*, got 'toch'"),
    ],
)
def test_options_are_checked_before_a_model_is_downloaded(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **options: object) -> None:
        raise ModelNotFound("a download")

    monkeypatch.setattr("services.store.resolve.resolve", download)
    monkeypatch.setattr("services.cli.processes.StopSignals", object)  # those of the tests stay
    monkeypatch.chdir(tmp_path)
    listen = ["--listen", "127.0.0.1:0"] if words[0] == "up" else []
    result = CliRunner().invoke(app, [*words, *listen])
    assert re.search(message, str(result.exception)), result.output


THREADS = str(draft_threads())


@pytest.mark.parametrize(
    ("words", "variables", "target", "draft", "listen"),
    [
        ("up", {}, "--engine auto", f"--engine auto --threads {THREADS}", None),
        ("up", {"SERVE_ENGINE": "torch", "SERVE_THREADS": "3", "SERVE_DTYPE": "float32"}, "", "", None),
        ("up", {"BRIDGE_LISTEN": "127.0.0.1:0"}, "--engine auto", f"--engine auto --threads {THREADS}", None),
        ("up --engine torch", {"SERVE_ENGINE": "openvino", "SERVE_THREADS": "3"}, *["--engine torch"] * 2, None),
        ("up --listen 127.0.0.1:0 --draft suffix", {}, "--engine auto", "", "127.0.0.1:0"),
        ("bench", {"SERVE_ENGINE": "torch", "SERVE_WEIGHTS": "full"}, "", f"--threads {THREADS}", ""),
        ("bench --draft-engine torch", {"SERVE_THREADS": "3"}, "--engine auto", "--engine torch", ""),
    ],
)
def test_what_variables_set_is_not_overridden_by_defaults(
    words: str, variables: dict[str, str], target: str, draft: str, listen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"BRIDGE_LISTEN": free_address()} | variables).items():
        monkeypatch.setenv(f"DRAFTBRIDGE_{name}", value)
    given: dict[str, Any] = {}

    def started(*_: object, **options: object) -> None:
        given.update(options)
        raise KeyboardInterrupt

    for module in ("processes", "bench_command"):
        monkeypatch.setattr(f"services.cli.{module}.fleet", started)
        monkeypatch.setattr(f"services.cli.{module}.fetch", lambda *_, **__: None)
    monkeypatch.setattr("services.cli.processes.StopSignals", object)  # those of the tests stay
    CliRunner().invoke(app, words.split())
    assert (" ".join(given["target_options"]), " ".join(given["draft_options"])) == (target, draft)
    assert given.get("listen", "") == listen


def test_a_zoo_takes_its_engine_from_the_environment_unless_an_option_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    @contextmanager
    def server(*words: str, **_: object) -> Iterator[tuple[str, None]]:
        started.append(" ".join(words))
        yield "127.0.0.1:1", None

    for name in ("serve", "launched"):
        monkeypatch.setattr(zoo, name, server)
    monkeypatch.setattr(zoo, "fetch", lambda *_, **__: None)
    for variable, engine, words in (
        ("", None, "--engine auto"),
        ("torch", None, ""),
        ("torch", "auto", "--engine auto"),
    ):
        if variable:
            monkeypatch.setenv("DRAFTBRIDGE_SERVE_ENGINE", variable)
        with zoo._fleet(["a"], ["suffix"], engine):
            assert started[:2] == [f"a --role target --name a {words}".strip(), "suffix --role draft --name suffix"]
        started.clear()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def watched(announced: Announcements, **scripts: str) -> ExitStack:
    """Watches processes that run scripts; they end with the returned context."""
    with ExitStack() as stack:
        for name, script in scripts.items():
            process = stack.enter_context(started([sys.executable, "-c", script], **PIPES))
            announced.watch(name, process)
        return stack.pop_all()


def test_a_server_that_prints_much_holds_up_nobody(tmp_path: Path) -> None:
    done, announced = tmp_path / "done", Announcements()
    os.mkfifo(done)
    chatty = f"print('x' * 1_000_000); open({str(done)!r}, 'w').close(); print('listening on b:1')"
    # It is ready only after the other one has printed everything.
    patient = f"open({str(done)!r}).read(); print('listening on a:1')"
    with watched(announced, a=patient, b=chatty):
        announced.wait_for("a", "b")
    assert announced.addresses == {"a": "a:1", "b": "b:1"}


def test_a_server_that_ends_is_reported_while_another_one_starts() -> None:
    announced = Announcements()
    with (  # the first one waits for a line that never comes
        watched(announced, a="input()", b="print('listening on b:1')", c="raise SystemExit(3)"),
        pytest.raises(ProcessFailed, match="the c did not start: see its message above"),
    ):
        announced.wait_for("a", "b", "c")


HELD_DOWNLOAD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import huggingface_hub
from services.cli.__main__ import main

def snapshot_download(*_, **__):
    with ThreadPoolExecutor(1) as pool:  # which waits for the thread, as that of the library does
        pool.submit(lambda: (print("downloading", flush=True), Event().wait())).result()

huggingface_hub.snapshot_download = snapshot_download
main()
"""


@pytest.mark.parametrize(
    ("words", "signal_"),
    [
        (["pull", "us/model"], signal.SIGINT),
        (["up", "--target", "us/model", "--listen", "127.0.0.1:0"], signal.SIGINT),
        (["up", "--target", "us/model", "--listen", "127.0.0.1:0"], signal.SIGTERM),
    ],
)
def test_a_download_from_the_hub_is_stopped_at_once(words: list[str], signal_: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELD_DOWNLOAD, *words]
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "downloading\n"
            process.send_signal(signal_)
            assert process.wait(60) == -signal_
        finally:
            process.kill()


LOST_SIGNAL = """
import signal
from services.cli.processes import StopSignals

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

stop = StopSignals()
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("raised")
stop.asked = None
Interrupted()  # the exception goes no further than the destructor
print("asked" if stop.asked else "lost")
"""


def test_a_signal_whose_exception_is_lost_is_still_known() -> None:
    done = subprocess.run([sys.executable, "-c", LOST_SIGNAL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["raised", "asked"]


def test_up_with_the_draft_that_needs_no_model(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    """Both of its model servers would take the port for metrics, and its bridge has nothing to show to them."""
    command = [sys.executable, "-m", "services.cli", "up", "--target", str(tiny_models[0]), "--draft", "suffix"]
    command += ["--listen", "127.0.0.1:0", "--dtype", "float32"]
    (file := tmp_path / "draftbridge.toml").write_text(f'[serve]\nmetrics = "{free_address()}"\n')
    (keys := tmp_path / "keys.toml").write_text(KEYS)
    environment = os.environ | {
        "DRAFTBRIDGE_BRIDGE_HTTP": "127.0.0.1:0", "DRAFTBRIDGE_BRIDGE_SERVICE_CA": "/nowhere.pem",
        "DRAFTBRIDGE_SERVE_TLS_CERTIFICATE": "/nowhere.pem", "DRAFTBRIDGE_SERVE_KEYS": "/nowhere.toml",
        "DRAFTBRIDGE_CONFIG": str(file), "DRAFTBRIDGE_BRIDGE_KEYS": str(keys),
    }  # fmt: skip
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = ""
        for line in process.stdout:
            output += line
            if READY in line:
                break
        assert "draft   suffix at " in output
        address = output.split(READY)[1].strip()
        with Client(address, Credentials(token=ALICE)) as client:
            assert client.generate("The quick", max_tokens=5).started.draft == "suffix"
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert len(children) == 3 and not psutil.wait_procs(children, timeout=120)[1]
        errors = process.stderr.read()
        assert "page and OpenAI's protocol: http://" in errors, "its bridge reads the environment"
        assert f"--server {address} --token-file FILE " in errors


def test_what_is_measured_has_none_of_the_users_settings(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, tiny_models)
    for name, value in {
        "CONFIG": "/nowhere.toml", "BRIDGE_TLS_CERTIFICATE": "/nowhere.pem", "BRIDGE_DRAFT": "127.0.0.1:1",
        "SERVE_NAME": "same", "SERVE_METRICS": free_address(), "SERVE_TLS_CERTIFICATE": "/nowhere.pem",
        "SERVE_KEYS": "/nowhere.toml",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"DRAFTBRIDGE_{name}", value)
    with fleet(target, SUFFIX) as running, Client(running.bridge) as client:
        assert [one.model.name for one in client.services()] == ["tiny-target", "suffix"]
    with zoo._fleet([target], [draft], "torch") as (bridge, _), Client(bridge) as client:
        assert [one.model.name for one in client.services()] == ["tiny-target", "tiny-draft"]


def test_a_process_is_stopped_though_another_one_has_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the output would last as long as the other process, and no signal would end that."""
    code = "import subprocess, sys; other = subprocess.Popen(['sleep', '60'])\n"
    (tmp_path / "leaves_another.py").write_text(f"{code}print('{READY}', other.pid, flush=True); sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with launched("a process", module="leaves_another") as (pid, process):
        pass
    other = psutil.Process(int(pid))
    assert process.poll() is not None and other.name() == "sleep"
    other.kill()
