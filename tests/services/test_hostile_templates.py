"""Chat templates of model servers that take too long or too much, in real processes: no other request notices."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from draftbridge import Client
from draftbridge.errors import read_report
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.cli.processes import Fleet, fleet, launched, serve
from services.sandbox.templates import TIME_LIMIT_SECONDS
from tests.conftest import CHAT_TEMPLATE
from tests.support.template_bombs import MEMORY_BOMBS, SURROGATE, TEXT_BOMBS, TIME_BOMBS
from tests.support.waiting import eventually

BOMBS = {
    "memory": MEMORY_BOMBS["times"],
    "ljust": MEMORY_BOMBS["ljust"],
    "time": TIME_BOMBS["loops over texts"],
    "text": TEXT_BOMBS["100 MB in pieces"],
    "surrogate": SURROGATE,
}


def served_with(template: str, model: Path, directory: Path) -> str:
    """Returns a copy of the model with another chat template."""
    shutil.copytree(model, directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return str(directory)


@pytest.fixture(scope="module")
def hostile(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Runs a target and a draft whose templates contain bombs, each triggered by a message with its name."""
    target, draft = tiny_models
    root = tmp_path_factory.mktemp("hostile")
    bombs = "".join(f"{{% if messages[0].content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items())
    of_draft = f"{{% if messages[0].content == 'draft' %}}{BOMBS['time']}{{% endif %}}"
    options = ("--dtype", "float32", "--threads", "1")
    with fleet(
        served_with(bombs + CHAT_TEMPLATE, target, root / "target"),
        served_with(of_draft + CHAT_TEMPLATE, draft, root / "draft"),
        target_options=options,
        draft_options=options,
    ) as running:
        yield running


def asking(content: str) -> bridge_pb2.GenerateRequest:
    chat = bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage(role="user", content=content)])
    return bridge_pb2.GenerateRequest(chat=chat, max_tokens=5)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bridge_outlives_every_template(hostile: Fleet, name: str) -> None:
    with grpc.insecure_channel(hostile.bridge) as channel, Client(hostile.bridge) as client:
        call = bridge_pb2_grpc.BridgeServiceStub(channel).Generate(asking(name), timeout=30 * TIME_LIMIT_SECONDS)
        # A prompt needs no template, and does not wait for one.
        assert client.generate("The quick brown fox", max_tokens=5).text
        if name == "time":
            assert not call.done()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        report = read_report(caught.value.trailing_metadata())
        assert report is not None
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert report.reason == ("UNUSABLE_MODEL" if name == "surrogate" else "TEMPLATE_LIMIT_EXCEEDED")
        assert "fix the template" in report.message
        # The same template works with another chat.
        assert client.generate(messages=[{"role": "user", "content": "hello"}], max_tokens=5).text


def test_a_target_goes_on_without_a_draft_whose_template_hangs(hostile: Fleet) -> None:
    with Client(hostile.bridge) as client:
        result = client.generate(messages=[{"role": "user", "content": "draft"}], max_tokens=5)
        assert result.text
        assert "template takes more than 3 s" in result.finished.speculation.note


@pytest.fixture(scope="module")
def hanging(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of a target whose template hangs for some chats."""
    bombs = "".join(
        f"{{% if messages[0].content == '{name}' %}}{TIME_BOMBS[name]}{{% endif %}}"
        for name in ("loops in loops", "power")
    )
    model = served_with(bombs + CHAT_TEMPLATE, tiny_models[0], tmp_path_factory.mktemp("hanging") / "model")
    with serve(model, "--dtype", "float32", "--threads", "1") as (address, _):
        yield address


@pytest.mark.parametrize("content", ["hello", "loops in loops", "power"])
def test_no_process_of_the_sandbox_outlives_its_bridge(hanging: str, content: str) -> None:
    """The process may wait for a chat, run a template, or run a function that blocks all threads."""
    arguments = ("bridge", "--target", hanging, "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with launched("bridge", *arguments) as (address, process), grpc.insecure_channel(address) as channel:
        call = bridge_pb2_grpc.BridgeServiceStub(channel).Generate(asking(content), timeout=60)
        children = psutil.Process(process.pid).children
        eventually(lambda: len(children()) == 1)
        (child,) = children()
        if content == "hello":
            list(call)
        else:
            eventually(lambda: child.cpu_times().user > 0.5)
        process.kill()
        assert not psutil.wait_procs([child], timeout=60)[1]
