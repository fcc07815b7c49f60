"""A bridge tests each large tokenizer in a process of its own once, not at each start."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.errors import TokenizerNotUnderstood
from draftbridge.v1 import model_pb2
from services.bridge import endpoint, tested_tokenizers
from tests.support.tiny import tokenizer_json

SMALL = tokenizer_json("byte_level")
# White space before the end, which makes another file of the same tokenizer.
LARGE = SMALL[:-1] + b" " * tested_tokenizers.LARGE_BYTES + SMALL[-1:]
FLAW = "its decoder trims every token"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what is remembered."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers.json"


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tokenizers that were tested in a process of their own."""
    found: list[int] = []

    async def find_flaw(data: bytes) -> str:
        found.append(len(data))
        return FLAW

    monkeypatch.setattr(endpoint, "find_flaw", find_flaw)
    return found


def flaw_at_start(content: bytes = LARGE) -> str:
    """Returns the flaw of a tokenizer that a bridge that has just started gets from a service."""
    sha256 = hashlib.sha256(content).hexdigest()

    async def pieces(request: object) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        yield model_pb2.GetTokenizerResponse(chunk=content, sha256=sha256)

    async def connect() -> str:
        reader = endpoint.ModelReader()
        try:
            link, model = SimpleNamespace(GetTokenizer=pieces), model_pb2.Model(name="m", tokenizer_sha256=sha256)
            vocabulary, flaw = await reader._vocabulary(link, model, "here:1")  # type: ignore[arg-type]
            assert vocabulary.sha256 == sha256
            return flaw
        finally:
            await reader.close()

    return asyncio.run(connect())


def test_a_large_tokenizer_is_tested_once(tested: list[int]) -> None:
    assert [flaw_at_start() for _ in range(3)] == [FLAW] * 3
    assert tested == [len(LARGE)]


def test_the_real_test_of_a_large_tokenizer_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flaw_at_start() == ""
    monkeypatch.delattr(endpoint, "find_flaw")
    assert flaw_at_start() == ""


def test_a_small_tokenizer_is_tested_at_each_start(tested: list[int], memory: Path) -> None:
    assert flaw_at_start(SMALL) == flaw_at_start(SMALL) == FLAW
    assert len(tested) == 2
    assert not memory.exists()


def test_a_tokenizer_of_an_engine_is_always_tested(tested: list[int]) -> None:
    flaw_at_start()
    asyncio.run(endpoint.ModelReader.read_tokenizer(LARGE, model_pb2.Model(name="m"), "the engine"))
    assert len(tested) == 2


def test_another_test_or_library_tests_it_again(tested: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    flaw_at_start()
    tested_tokenizers._tested_by.cache_clear()
    monkeypatch.setattr(tested_tokenizers, "version", lambda _: "99")
    try:
        flaw_at_start()
        flaw_at_start()
    finally:
        tested_tokenizers._tested_by.cache_clear()
    assert len(tested) == 2


def test_a_tokenizer_that_is_refused_is_tested_each_time(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []

    async def refuse(data: bytes) -> str:
        tested.append(len(data))
        raise TokenizerNotUnderstood("it exceeds the limits", component="file")

    monkeypatch.setattr(endpoint, "find_flaw", refuse)
    for _ in range(2):
        with pytest.raises(TokenizerNotUnderstood):
            flaw_at_start()
    assert len(tested) == 2
    assert not memory.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 200_000,
        b" " * (2 << 20),
        b'{"tested_by": "another version", "flaws": {"SHA256": ""}}',
        b'{"tested_by": "TESTED_BY", "flaws": {"SHA256": 1}}',
        b'{"tested_by": "TESTED_BY", "flaws": {"SHA256": "two\\nlines"}}',
        b'{"tested_by": "TESTED_BY", "flaws": ["SHA256"]}',
    ],
)
def test_a_damaged_memory_is_replaced(memory: Path, tested: list[int], content: bytes) -> None:
    content = content.replace(b"TESTED_BY", tested_tokenizers._tested_by().encode())
    memory.parent.mkdir()
    memory.write_bytes(content.replace(b"SHA256", hashlib.sha256(LARGE).hexdigest().encode()))
    assert flaw_at_start() == flaw_at_start() == FLAW
    assert len(tested) == 1


def test_the_latest_are_kept(memory: Path) -> None:
    for number in range(100):
        tested_tokenizers.remember(str(number), "")
    kept = json.loads(memory.read_text())["flaws"]
    assert list(kept) == [str(number) for number in range(36, 100)]
    assert os.listdir(memory.parent) == [memory.name]


@pytest.mark.parametrize("directory", ["a file", "a directory in place of the memory"])
def test_without_a_place_nothing_is_remembered(memory: Path, tested: list[int], directory: str) -> None:
    if directory == "a file":
        memory.parent.write_text("")
    else:
        memory.mkdir(parents=True)
    assert flaw_at_start() == flaw_at_start() == FLAW
    assert len(tested) == 2
    assert not memory.parent.is_dir() or os.listdir(memory.parent) == [memory.name]


def test_bridges_of_other_users_may_read_a_shared_cache(memory: Path) -> None:
    before = os.umask(0o022)
    try:
        tested_tokenizers.remember("0", "")
    finally:
        os.umask(before)
    assert memory.stat().st_mode & 0o777 == 0o644
