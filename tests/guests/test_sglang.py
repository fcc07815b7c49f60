"""SGLang's server itself, with a real model and the algorithm DRAFTBRIDGE.

Its kernels for CPUs have stand-ins (`standin`), so these tests show that texts are right, not how fast they come.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.cli.processes import launched, serve
from tests.support.sglang_server import Completion, SglangServer, sglang_server
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)
MODEL, DRAFT = "smollm2-135m-instruct", "gemma-3-270m"
OURS = ("--speculative-algorithm", "DRAFTBRIDGE", "--speculative-num-draft-tokens", "8")
# Prompts are read in chunks, and six requests need more memory than this for their keys and values.
CROWDED = ("--chunked-prefill-size", "16", "--max-total-tokens", "360")
PROMPTS = (
    "Repeat after me: the quick brown fox jumps over the lazy dog.\nthe quick brown fox jumps over the lazy dog.\nthe",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "List: 1, 2, 3, 4, 5, 6, 7, 8,",
    "Once upon a time there was a",
    "import os\nimport sys\nimport json\nimport",
    "Q: What is 2+2?\nA: 4\nQ: What is 3+3?\nA: 6\nQ: What is 4+4?\nA:",
)
MAX_TOKENS = 32


def generated(server: SglangServer) -> list[Completion]:
    """Runs all prompts together."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, MAX_TOKENS), PROMPTS))


def texts(server: SglangServer) -> list[tuple[int, ...]]:
    return [one.ids for one in generated(server)]


@pytest.fixture(scope="module")
def model() -> str:
    from services.store.resolve import resolve

    return str(resolve(MODEL, print))


@pytest.fixture(scope="module")
def plain(sglang_python: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Returns the texts of SGLang without candidates."""
    with sglang_server(sglang_python, model, tmp_path_factory.mktemp("plain") / "log") as server:
        return [server.complete(prompt, MAX_TOKENS).ids for prompt in PROMPTS]


@dataclass
class Setup:
    """A server whose candidates come from a bridge and a draft that are processes."""

    server: SglangServer
    bridge: "subprocess.Popen[str]"
    draft: "subprocess.Popen[str]"
    restart_bridge: Callable[[], "subprocess.Popen[str]"]

    def recovers(self, plain: list[tuple[int, ...]]) -> None:
        """Candidates return, and change no text."""

        def returned() -> bool:
            found = generated(self.server)
            assert [one.ids for one in found] == plain
            return sum(one.accepted_count for one in found) > 0

        eventually(returned, 60)


@pytest.fixture
def setup(sglang_python: Path, model: str, plain: list[tuple[int, ...]], tmp_path: Path) -> Iterator[Setup]:
    # Only one server at a time: SGLang computes even while it waits, so a second one would take minutes for each text.
    with ExitStack() as stack:
        draft_address, draft = stack.enter_context(serve(DRAFT, "--role", "draft", "--threads", "1"))

        def start(listen: str = "127.0.0.1:0") -> tuple[str, "subprocess.Popen[str]"]:
            options = ("--draft", draft_address, "--listen", listen, "--until-stdin-closes")
            return stack.enter_context(launched("bridge", "bridge", *options))

        address, bridge = start()
        environment = {"DRAFTBRIDGE_GUEST_BRIDGE": address, "DRAFTBRIDGE_GUEST_DEADLINE_MS": "20"}
        own = sglang_server(sglang_python, model, tmp_path / "log", *OURS, environment=environment)
        server = stack.enter_context(own)
        yield Setup(server, bridge, draft, lambda: start(address)[1])


def test_texts_and_faults_with_a_bridge(setup: Setup, plain: list[tuple[int, ...]]) -> None:
    setup.recovers(plain)
    alone = [setup.server.complete(prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert [one.ids for one in alone] == plain
    assert sum(one.verify_count for one in alone) < 0.8 * sum(map(len, plain))
    for process in (setup.bridge, setup.draft):
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert texts(setup.server) == plain
        finally:
            os.kill(process.pid, signal.SIGCONT)
        setup.recovers(plain)
    for place, prompt in enumerate(PROMPTS):
        setup.server.abandon(prompt, 200, after=0.1 * place)
    assert texts(setup.server) == plain
    setup.bridge.kill()
    assert texts(setup.server) == plain
    setup.bridge.wait()
    setup.bridge = setup.restart_bridge()
    setup.recovers(plain)
    words = setup.server.log.read_text(errors="replace")
    assert words.count(", with the draft ") >= 2, "it connects anew after the bridge was killed"
    assert "bug in DraftBridge" not in words


def test_candidates_without_a_bridge(
    sglang_python: Path, model: str, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    environment = {"DRAFTBRIDGE_GUEST_BRIDGE": "local"}
    options = (*OURS, *CROWDED)
    with sglang_server(sglang_python, model, tmp_path / "log", *options, environment=environment) as server:
        for _ in range(2):
            found = generated(server)
            assert [one.ids for one in found] == plain
        assert sum(one.verify_count for one in found) < 0.9 * sum(map(len, plain))
        schema = {"type": "object", "properties": {"age": {"enum": [21, 42]}}, "required": ["age"]}
        grammatical = server.complete("A person as JSON:", 40, json_schema=json.dumps(schema))
        assert json.loads(grammatical.text)["age"] in (21, 42) and grammatical.verify_count
        assert "bug in DraftBridge" not in server.log.read_text(errors="replace")


def test_tensor_parallel(sglang_python: Path, tmp_path: Path) -> None:
    """Of two ranks, one asks and both verify."""
    from services.store.resolve import resolve

    model = str(resolve("qwen2.5-coder-0.5b-instruct", print))  # its heads can be shared by two
    both = {"DRAFTBRIDGE_GUEST_BRIDGE": "local", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    found = []
    for name, options in (("plain", ()), ("ours", OURS)):
        log = tmp_path / name
        with sglang_server(sglang_python, model, log, "--tp-size", "2", *options, environment=both) as server:
            found.append([server.complete(prompt, 12) for prompt in PROMPTS[:2]])
    alone, ours = found
    assert [one.ids for one in ours] == [one.ids for one in alone]
    assert sum(one.accepted_count for one in ours) > 0
