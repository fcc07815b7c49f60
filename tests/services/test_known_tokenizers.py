"""A bridge tries each large tokenizer in a process of its own once, not at each start."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.errors import TokenizerNotUnderstood
from draftbridge.v1 import model_pb2
from services.bridge import endpoint, known_tokenizers
from tests.support.tiny import tokenizer_json

CONTENT = tokenizer_json("byte_level")
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(endpoint, "MIN_SECONDS", -1.0)
    return tmp_path / "cache"


def memories(cache: Path) -> list[Path]:
    return list(cache.rglob("*.json"))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was tried in a process of its own."""
    found: list[bytes] = []

    async def find_flaw(data: bytes) -> str:
        found.append(data)
        return "its decoder trims every token"

    monkeypatch.setattr(endpoint, "find_flaw", find_flaw)
    return found


async def flaw_at_start() -> str:
    """Returns the flaw that a bridge finds that has just started."""

    async def pieces(request: object) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        yield model_pb2.GetTokenizerResponse(chunk=CONTENT, sha256=SHA256)

    reader = endpoint.ModelReader()
    try:
        link, model = SimpleNamespace(GetTokenizer=pieces), model_pb2.Model(name="m", tokenizer_sha256=SHA256)
        vocabulary, flaw = await reader._vocabulary(link, model, "here:1")  # type: ignore[arg-type]
        assert vocabulary.sha256 == SHA256
        return flaw
    finally:
        await reader.close()


async def test_a_tokenizer_is_tried_once(tried: list[bytes]) -> None:
    assert [await flaw_at_start() for _ in range(3)] == ["its decoder trims every token"] * 3
    assert tried == [CONTENT]


async def test_another_library_or_self_test_tries_it_again(tried: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    await flaw_at_start()
    monkeypatch.setattr(known_tokenizers, "version", lambda _: "99")
    await flaw_at_start()
    monkeypatch.setattr(known_tokenizers, "_RULE", 99)
    await flaw_at_start()
    await flaw_at_start()
    assert len(tried) == 3


async def test_a_small_tokenizer_is_not_remembered(tried: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MIN_SECONDS", 60.0)
    await flaw_at_start()
    await flaw_at_start()
    assert len(tried) == 2


async def test_a_tokenizer_that_does_harm_is_tried_each_time(
    cache: Path, tried: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(data: bytes) -> str:
        tried.append(data)
        raise TokenizerNotUnderstood("it exceeds the limits", component="file")

    monkeypatch.setattr(endpoint, "find_flaw", refuse)
    for _ in range(2):
        with pytest.raises(TokenizerNotUnderstood):
            await flaw_at_start()
    assert len(tried) == 2
    assert not memories(cache)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"flaw": 1}', b"\xff"])
def test_a_damaged_memory_is_replaced(cache: Path, tried: list[bytes], content: bytes) -> None:
    asyncio.run(flaw_at_start())
    (file,) = memories(cache)
    file.write_bytes(content)
    assert asyncio.run(flaw_at_start()) == asyncio.run(flaw_at_start()) == "its decoder trims every token"
    assert len(tried) == 2


def test_without_a_place_for_it_nothing_is_remembered(cache: Path, tried: list[bytes]) -> None:
    cache.write_text("a file")
    assert asyncio.run(flaw_at_start()) == asyncio.run(flaw_at_start()) == "its decoder trims every token"
    assert len(tried) == 2
