"""Settings of the test suite, and fixtures of a running fleet of tiny models."""

import contextlib
import faulthandler
import gc
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from draftbridge import Client
from services.cli.processes import Fleet, fleet
from tests.support import warm
from tests.support.depth import DEEP

# Parallel tests share the cores, so that each test and each process that it starts computes with one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests must not download anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

warm.install()
# The tests and the libraries that they import make a million objects. By default, looking for garbage among them took
# up to a third of a file's processor time.
gc.set_threshold(50_000, 20, 50)

# One contract is inherited by the test classes of several engines.
_SUPPRESSED = [HealthCheck.too_slow, HealthCheck.differing_executors]
# Examples are the same in each run, so that a change fails only by what it changed; a deep run draws others.
settings.register_profile(
    "here",
    max_examples=100 if DEEP else 25,
    deadline=None,
    suppress_health_check=_SUPPRESSED,
    print_blob=True,
    derandomize=not DEEP,
)
settings.load_profile("here")

with contextlib.suppress(ImportError):  # environments of their own may lack it
    from httpx2._config import DEFAULT_TIMEOUT_CONFIG

    # Where a test sets no limit, it would be 5 seconds, which a busy machine may take for a request.
    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts one of the longest files first: it would otherwise run alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_up.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Shows the stacks of all threads and ends this process shortly before a test's limit.

    pytest-timeout does so too, but not while native code holds the interpreter's lock, and its text is lost in parallel
    runs.
    """
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout")
    errors = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(0.98 * float(limit), exit=True, file=errors)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<turn>tools\n{{ (tools | tojson)[:100] }}<eos>\n{% endif %}"
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}{{ (call | tojson)[:60] }}{% endfor %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def save_tiny_model(directory: Path, kind: str, seed: int, *, hidden_size: int = 32, padding: int = 8) -> Path:
    """Saves a random Llama with one of the tiny tokenizers, as a directory that can be served.

    `padding`: ids of its logits that the tokenizer does not have.
    """
    import torch
    import transformers

    from tests.support.tiny import tokenizer_json, vocabulary

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary(kind).size + padding,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes(tokenizer_json(kind))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": CHAT_TEMPLATE}))
    return directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the directories of a target and a draft with different tokenizers."""
    root = tmp_path_factory.mktemp("models")
    return (
        save_tiny_model(root / "tiny-target", "sentencepiece", 0),
        save_tiny_model(root / "tiny-draft", "byte_level", 1),
    )


@pytest.fixture(scope="session")
def tiny_fleet(tiny_models: tuple[Path, Path]) -> Iterator[Fleet]:
    """Runs target, draft and bridge as processes."""
    options = ("--dtype", "float32", "--threads", "1", "--slots", "3", "--queue", "2")
    target, draft = (str(path) for path in tiny_models)
    http = ("--http", "127.0.0.1:0")
    with fleet(target, draft, target_options=options, draft_options=options, bridge_options=http) as running:
        yield running


@pytest.fixture
def client(tiny_fleet: Fleet) -> Iterator[Client]:
    """Yields a client of the tiny fleet."""
    with Client(tiny_fleet.bridge) as client:
        yield client
