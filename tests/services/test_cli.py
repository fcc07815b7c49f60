"""Tests the command as users see it: its output and its errors."""

import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.processes import Fleet
from services.cli.variables import misspelt
from services.engines.registry import engines
from services.rpc.server import PortTaken, check_free
from services.store.built_in import BUILT_IN
from tests.support.ports import free_address
from tests.support.warm import run as command

COMMANDS = ["pull", "serve", "bridge", "up", "generate", "models", "translate", "demo", "version", "doctor", "zoo"]


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the message of a command that failed as it should: with a status other than 0 and no stack trace."""
    output = done.stdout + done.stderr
    assert done.returncode not in (0, -signal.SIGSEGV), output
    assert "Traceback" not in output
    return " ".join(output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "version"], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "0.1.0"


def test_generate_streams_text_and_json(tiny_fleet: Fleet) -> None:
    done = command("generate", "The quick", "--server", tiny_fleet.bridge, "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "12 tokens in" in done.stderr
    done_json = command("generate", "The quick", "--server", tiny_fleet.bridge, "--max-tokens", "12", "--json")
    events = [json.loads(line) for line in done_json.stdout.splitlines()]
    assert [event["event"] for event in events][:1] == ["started"]
    assert events[-1]["event"] == "finished"
    assert "".join(event["text"] for event in events if event["event"] == "delta") + "\n" == done.stdout
    assert events[-1]["usage"]["generated_token_count"] == 12
    assert events[-1]["finish_reason"] == "FINISH_REASON_LENGTH" and events[-1]["speculation"]["mode"] == "MODE_AUTO"


def test_generate_takes_a_chat_and_all_its_options(tiny_fleet: Fleet) -> None:
    done = command(
        "generate", "hello", "--chat", "--server", tiny_fleet.bridge, "--max-tokens", "8", "--temperature", "0.8",
        "--top-p", "0.9", "--top-k", "20", "--seed", "5", "--stop", "zzz", "--speculation", "lockstep",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_generate_demands_a_form(tiny_fleet: Fleet, tmp_path: Path) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text('{"enum": ["öl", 12]}')
    lark.write_text('start: "<" /[a-c]{2}/ ">"')
    at = ("generate", "hello", "--server", tiny_fleet.bridge, "--max-tokens", "30")
    forms = {
        ("--regex", "[0-9]{3}-[a-c]"): r"[0-9]{3}-[a-c]\n",
        ("--json-object",): r'\{("[^\n]*|\})\n',
        ("--json-schema", str(schema)): r'("öl"|12)\n',
        ("--choice", "yes", "--choice", "no"): r"(yes|no)\n",
        ("--grammar", str(lark)): r"<[a-c]{2}>\n",
    }
    for options, form in forms.items():
        done = command(*at, *options)
        assert done.returncode == 0 and re.fullmatch(form, done.stdout), (options, done.stdout, done.stderr)
    assert "at most one of" in refused(command(*at, "--regex", "a", "--json-object"))


def test_models_lists_what_is_there(tiny_fleet: Fleet) -> None:
    done = command("models", "--server", tiny_fleet.bridge, COLUMNS="200")
    assert "tiny-target" in done.stdout
    assert "tiny-draft" in done.stdout
    assert "gemma-3-270m" in done.stderr
    for width in ("80", "40"):
        narrow = command("models", "--server", tiny_fleet.bridge, COLUMNS=width).stdout
        assert "…" not in narrow and "tokenizer" in narrow and "tiny-target" in narrow


TEXT = "The quick\tbrown 東京 🎉\n"


def test_translate_shows_two_segmentations_aligned(tiny_models: tuple[Path, Path]) -> None:
    target, draft = (str(path) for path in tiny_models)
    done = command("translate", "--from", target, "--to", draft, TEXT, COLUMNS="60", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    rows = [line[4:] for line in done.stdout.splitlines() if "│" in line]
    assert len(rows) % 2 == 0
    for above, below in zip(rows[::2], rows[1::2], strict=True):
        # They differ only in where tokens end.
        assert above.replace("│", " ").rstrip() == below.replace("│", " ").rstrip()
        assert len(above) <= 60
    assert f"{len(TEXT.encode())} bytes" in done.stdout
    assert done.stdout.count("tokens") == 2


def test_translate_as_json_is_the_same_with_a_bridge_and_without(
    tiny_fleet: Fleet, tiny_models: tuple[Path, Path]
) -> None:
    target, draft = tiny_models
    local = command("translate", "--from", str(target / "tokenizer.json"), "--to", str(draft), "--json", TEXT)
    asked = command(
        "translate", "--from", target.name, "--to", draft.name, "--server", tiny_fleet.bridge, "--json", TEXT
    )
    assert local.stdout == asked.stdout
    for tokens in json.loads(local.stdout).values():
        assert b"".join(bytes.fromhex(token["bytes"]) for token in tokens) == TEXT.encode()


def test_wrong_translations_are_refused(tiny_fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for arguments, expected in (
        (("--from", "nowhere", "--to", "tiny-draft", "--server", tiny_fleet.bridge, "x"), "no model 'nowhere'"),
        (("--from", str(tmp_path / "tokenizer.json"), "x"), "cannot read this as a tokenizer.json"),
        (("--from", str(tmp_path / "none.json"), "x"), "there is no model at"),
    ):
        assert expected in refused(command("translate", *arguments))


def test_wrong_generations_are_refused(tiny_fleet: Fleet) -> None:
    at = ("--server", tiny_fleet.bridge)
    assert "nothing to continue" in refused(command("generate", "", *at))
    assert "256" in refused(command("generate", "a b " * 300, *at))
    assert "does not fit" in refused(command("generate", "x", "--max-tokens", "1000", *at))
    assert "sampling.top_p must be" in refused(command("generate", "x", "--top-p", "7", *at))
    assert "opportunistic" in refused(command("generate", "x", "--speculation", "no", *at))
    assert "is not a bridge" in refused(command("generate", "x", "--server", tiny_fleet.target))
    assert "--max-tokens" in refused(command("generate", "x", "--max-tokens", "-3", *at))
    assert "HOST:PORT" in refused(command("generate", "x", "--server", ""))
    assert "valid UTF-8" in refused(
        subprocess.run(
            [sys.executable.encode(), b"-m", b"services.cli", b"generate", b"\xff\xfe", b"--server", at[1].encode()],
            capture_output=True, text=True, timeout=200, check=False,
        )
    )  # fmt: skip


def test_nobody_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    assert "nothing answers at" in refused(command("generate", "x", "--server", address))
    monkeypatch.setenv("DRAFTBRIDGE_CLIENT_SERVER", address)
    assert f"nothing answers at {address}" in refused(command("models"))
    misspelt = refused(command("models", DRAFTBRIDGE_CLIENT_SEVER=address))
    assert "DRAFTBRIDGE_CLIENT_SEVER is an unknown variable: use DRAFTBRIDGE_CLIENT_SERVER, or" in misspelt
    misspelt = refused(command("models", DRAFTBRIDGE_CLIENT_INSECURE="1"))
    assert "DRAFTBRIDGE_CLIENT_INSECURE is an unknown variable: use the option --insecure, or" in misspelt
    misspelt = refused(command("models", DRAFTBRIDGE_CLIENT_QQQ="1"))
    assert "use DRAFTBRIDGE_CLIENT_SERVER or DRAFTBRIDGE_CLIENT_SERVER_NAME or DRAFTBRIDGE_CLIENT_TLS or" in misspelt
    message = refused(command("bridge", "--target", address, "--connect-timeout", "0.3", "--listen", "127.0.0.1:0"))
    assert message.count(f"no usable service answers at {address}") == 1 and "requests go on" not in message


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DRAFTBRIDGE_SERVER_THREADS", "did you mean DRAFTBRIDGE_SERVE_THREADS?"),
        ("DRAFTBRIDGE_BRIDG_LISTEN", "did you mean DRAFTBRIDGE_BRIDGE_LISTEN?"),
        ("DRAFTBRIDGE_CLIENTSERVER", "did you mean DRAFTBRIDGE_CLIENT_SERVER?"),
        ("DRAFTBRIDGE_CACH", "did you mean DRAFTBRIDGE_CACHE?"),
        ("DRAFTBRIDGE_FOO", "unset it; the variables are DRAFTBRIDGE_CONFIG, DRAFTBRIDGE_CACHE and"),
    ],
)
def test_a_variable_that_nothing_reads_is_warned_of(variable: str, hint: str) -> None:
    done = command("version", **{variable: "1"})
    assert done.returncode == 0
    assert f"warning: {variable} is an unknown variable, which has no effect: {hint}" in done.stderr


def test_options_without_effect_are_refused() -> None:
    for option in (("--source", "suffix"), ("--num-assistant-tokens", "3")):
        assert "off uses no candidates" in refused(command("generate", "x", "--speculation", "off", *option))


def test_variables_that_something_reads_are_known() -> None:
    read = ("CACHE", "CONFIG", "SERVE_MODEL", "CLIENT_SERVER", "GUEST_BRIDGE", "TEST_DEEP", "FUZZ_CASES")
    assert not misspelt({f"DRAFTBRIDGE_{name}": "1" for name in (*read, "OTHER_PYTHON")} | {"PATH": "/"})


def test_a_bridge_refuses_a_server_in_the_wrong_role(tiny_fleet: Fleet) -> None:
    message = refused(command("bridge", "--target", tiny_fleet.draft, "--listen", "127.0.0.1:0"))
    assert "--role target" in message
    message = refused(command("bridge", "--target", tiny_fleet.target, "--draft", "nowhere", "--listen", "127.0.0.1:0"))
    assert "HOST:PORT" in message


def test_a_taken_port_is_said_so(tiny_fleet: Fleet, tiny_models: tuple[Path, Path]) -> None:
    message = refused(command("bridge", "--target", tiny_fleet.target, "--listen", tiny_fleet.draft))
    assert f"cannot listen on {tiny_fleet.draft}" in message
    message = refused(command("serve", str(tiny_models[0]), "--listen", tiny_fleet.draft))
    assert f"cannot listen on {tiny_fleet.draft}" in message
    assert "HOST:PORT" in refused(command("bridge", "--target", tiny_fleet.target, "--listen", "nonsense"))
    # Before it loads any model.
    up = ("up", "--target", str(tiny_models[0]), "--draft", "none", "--listen")
    assert f"cannot listen on {tiny_fleet.draft}" in refused(command(*up, tiny_fleet.draft))
    assert "HOST:PORT" in refused(command(*up, "nonsense"))
    assert "DRAFTBRIDGE_BRIDGE_INSECURE" in refused(command(*up, "0.0.0.0:0"))
    assert "DRAFTBRIDGE_BRIDGE_INSECURE" in refused(command(*up, "127.0.0.1:0", DRAFTBRIDGE_BRIDGE_HTTP="0.0.0.0:0"))
    message = refused(command(*up, "127.0.0.1:0", DRAFTBRIDGE_BRIDGE_METRICS=tiny_fleet.draft))
    assert f"cannot listen on {tiny_fleet.draft}" in message
    free = free_address()
    assert "--listen and --http have the same port" in refused(command(*up, free, "--http", free))


def test_an_address_that_this_machine_lacks_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking, nameless = "192.0.2.1:0", "name.invalid:0"  # of no machine: RFC 5737 and 2606
    for address in (lacking, nameless):
        with pytest.raises(PortTaken, match="this machine's"):
            check_free(address)
    # A name with an address that this machine has, and one that it lacks.
    found = [socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0] for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    check_free("localhost:0")


def cut_gguf() -> bytes:
    """Returns the beginning of a GGUF file that ends in the middle of its vocabulary."""

    def text(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 9) + text(b"general.architecture") + struct.pack("<I", 8)
    return (
        head + text(b"llama") + text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1000) + text(b"a") + b"\x05"
    )


def test_what_is_no_model_is_refused(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    cache = {"DRAFTBRIDGE_CACHE": str(tmp_path / "cache")}
    assert "gemma-3-270m" in refused(command("pull", "/nowhere/at/all", **cache))
    assert "gemma-3-270m" in refused(command("serve", "nobody/nothing", **cache))
    (tmp_path / "empty").mkdir()
    assert "config.json, tokenizer.json, *.safetensors" in refused(command("pull", str(tmp_path / "empty"), **cache))
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    assert "is not a GGUF file" in refused(command("pull", str(text), **cache))
    broken, cut = tmp_path / "broken.gguf", tmp_path / "cut.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    cut.write_bytes(cut_gguf())
    message = refused(command("serve", str(broken), **cache))
    assert "could not be converted" in message and "Traceback" not in message
    for engine in ("torch", "auto"):
        done = command("serve", str(cut), "--engine", engine, **cache)
        assert "failed" not in refused(done) and done.stderr.count("reading the tokenizer of") <= 1
        assert done.stderr.splitlines()[-1].startswith(f"error: {cut} is damaged or incomplete, because it ends before")
    assert "--role must be 'draft', 'target' or 'both'" in refused(
        command("serve", str(tiny_models[0]), "--role", "king")
    )
    assert "--dtype must be 'auto', 'float32'" in refused(command("serve", str(tiny_models[0]), "--dtype", "int3"))
    assert "--device cpu" in refused(command("serve", str(tiny_models[0]), "--device", "cuda:77"))


@pytest.mark.parametrize(
    ("engine", "device"), [("torch", "cuda:77"), ("torch", "meta"), ("openvino", "gpu.9"), ("ik_llama", "gpu")]
)
def test_a_device_is_looked_for_before_the_model(tmp_path: Path, engine: str, device: str) -> None:
    if not engines()[engine].installed:  # most engines are extras
        pytest.skip(f"{engine} is not installed")
    options = ("--engine", engine, "--device", device)
    message = refused(command("serve", str(tmp_path / "no.gguf"), *options, DRAFTBRIDGE_CACHE=str(tmp_path)))
    assert device in message and ("--device cpu" in message or "use one of these" in message)


def test_a_damaged_model_is_refused(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    def damaged(name: str, content: bytes) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tiny_models[0], place)
        (place / name).write_bytes(content)
        return str(place)

    config = (tiny_models[0] / "config.json").read_bytes()
    weights = (tiny_models[0] / "model.safetensors").read_bytes()
    at = ("--listen", "127.0.0.1:0")
    for model in (
        damaged("config.json", b"{nope"),
        damaged("config.json", config.replace(b'"llama"', b'"zebra"')),
        damaged("config.json", config.replace(b'"hidden_size": 32', b'"hidden_size": 48')),
        damaged("model.safetensors", weights[: len(weights) // 2]),
    ):
        assert "cannot be loaded" in (error := refused(command("serve", model, *at))) or "is not JSON" in error
    assert "tokenizer.json" in refused(command("serve", damaged("tokenizer.json", b"{}"), *at))


def test_a_cache_that_cannot_be_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "DRAFTBRIDGE_CACHE" in refused(command("pull", "gemma-3-270m", DRAFTBRIDGE_CACHE=str(file)))
    (kept := tmp_path / "models" / "gemma-3-270m").mkdir(parents=True)
    (kept / "gguf.sha256").write_text(BUILT_IN["gemma-3-270m"].sha256)
    assert "delete it" in refused(command("pull", "gemma-3-270m", DRAFTBRIDGE_CACHE=str(tmp_path)))


def test_a_directory_is_a_model_as_it_is(tiny_models: tuple[Path, Path]) -> None:
    assert command("pull", str(tiny_models[0])).stdout.strip() == str(tiny_models[0])


@pytest.mark.parametrize("module", ["services.cli.app", "services.bridge.server"])
def test_a_command_and_a_bridge_start_without_heavy_libraries(module: str) -> None:
    heavy = "{'torch', 'transformers', 'gguf', 'mistral_common', 'huggingface_hub', 'openvino', 'matplotlib'}"
    code = f"import sys, {module}; print(*{heavy} & {{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


STOPPED_DOWNLOAD = """
import os
import signal
from services.cli.app import app
from services.model import server

os.getpid = lambda: 1  # as the first process of a container
server.choose_engine = lambda *_: signal.raise_signal(signal.SIGTERM)
app(["serve", "smollm2-135m-instruct", "--listen", "127.0.0.1:0"])
"""


def test_serve_in_a_container_is_stopped_while_it_downloads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_DOWNLOAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
