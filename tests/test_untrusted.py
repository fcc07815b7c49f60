"""Tokenizers from other processes: wrong ones are refused by name, hostile ones do no harm."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from tokenizers import Tokenizer, decoders

from bridge.errors import ChecksumMismatch, TokenizerNotUnderstood
from bridge.probes import prove
from bridge.vocabulary import Vocabulary
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.bridge import zoo
from services.bridge.quarantine import flaw_of
from services.bridge.zoo import Zoo
from tests import families
from tests.families import NAMES
from tests.tiny import tokenizer_json


class Server(model_pb2_grpc.ModelServiceServicer):
    """Says of itself what it is told to."""

    def __init__(self, content: bytes, role: int, sha256: str = "") -> None:
        self._content, self._role = content, role
        self._sha256 = sha256 or hashlib.sha256(content).hexdigest()

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: object
    ) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(
            model=model_pb2.Model(
                name="stranger",
                role=self._role,  # type: ignore[arg-type]
                context_length=100,
                vocabulary_size=5000,
                tokenizer_sha256=self._sha256,
            )
        )

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: object
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        for start in range(0, len(self._content), 1 << 16):
            yield model_pb2.GetTokenizerResponse(chunk=self._content[start : start + (1 << 16)])
        yield model_pb2.GetTokenizerResponse(sha256=self._sha256)


@asynccontextmanager
async def stranger(content: bytes, role: int = model_pb2.ROLE_BOTH, sha256: str = "") -> AsyncIterator[str]:
    """The address of a server with that tokenizer."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    model_pb2_grpc.add_ModelServiceServicer_to_server(Server(content, role, sha256), server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def connect(address: str, *, as_target: bool) -> Zoo:
    known = Zoo([address] if as_target else [], [] if as_target else [address])
    try:
        await known.connect()
        return known
    finally:
        await known.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_every_tokenizer_stands_its_probes(name: str) -> None:
    flaw = prove(families.vocabulary(name))
    assert bool(flaw) == name.startswith("bert"), flaw


def _fused(step: decoders.Decoder) -> bytes:
    """A tokenizer whose decoder does something to the whole text, not to a token."""
    tokenizer = Tokenizer.from_str(tokenizer_json("sentencepiece").decode())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), step])
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(("pattern", "content"), [(" ,", ","), ("wo", "WO"), (" '", "'")])
def test_a_decoder_that_changes_the_whole_text_is_for_drafts_only(pattern: str, content: str) -> None:
    # Whether a probe meets it depends on where its tokens end.
    try:
        assert prove(Vocabulary(_fused(decoders.Replace(pattern, content))))
    except TokenizerNotUnderstood as error:
        assert "byte table" in str(error)


def test_a_wrong_table_is_found_out() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    some = next(id_ for id_, data in enumerate(words.tokens) if data == b"the")
    words._spelled[some] = b"teh"
    with pytest.raises(TokenizerNotUnderstood, match="the"):
        prove(words)


async def test_a_wordpiece_model_is_a_draft_and_no_target() -> None:
    async with stranger(tokenizer_json("wordpiece")) as address:
        known = await connect(address, as_target=False)
        assert known.draft("stranger") is not None
        with pytest.raises(TokenizerNotUnderstood, match=r"stranger .* can be a draft but no target.*moves spaces"):
            await connect(address, as_target=True)


async def test_a_component_that_is_not_understood_is_named_with_its_model() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    spec["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    async with stranger(json.dumps(spec).encode()) as address:
        with pytest.raises(TokenizerNotUnderstood, match=r"stranger at .*'CTC'") as caught:
            await connect(address, as_target=False)
        assert caught.value.metadata == {"component": "decoder", "type": "CTC", "model": "stranger"}


async def test_a_checksum_that_is_not_the_contents_is_refused() -> None:
    async with stranger(tokenizer_json("byte_level"), sha256="0" * 64) as address:
        with pytest.raises(ChecksumMismatch, match="not 0000"):
            await connect(address, as_target=True)


async def test_a_tokenizer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_TOKENIZER_LIMIT_BYTES", 1 << 20)
    async with stranger(b" " * (2 << 20)) as address:
        with pytest.raises(ChecksumMismatch, match="more than 1048576 bytes"):
            await connect(address, as_target=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 1000,
        b"[" * 200_000,  # deeper than any parser likes
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4000000000}, "unk_token": "a"}}',
    ],
    ids=["nothing", "zeros", "depth", "merges of nothing", "an id of billions"],
)
async def test_what_is_made_to_break_a_reader_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerNotUnderstood):
        await flaw_of(content)


async def test_a_tokenizer_that_takes_for_ever_is_given_up() -> None:
    with pytest.raises(TokenizerNotUnderstood, match=r"more than 0\.01 s"):
        await flaw_of(tokenizer_json("byte_level"), time_limit=0.01)


def test_dropout_of_a_training_run_is_left_out() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    spec["model"]["dropout"] = 0.9
    words = Vocabulary(json.dumps(spec).encode())
    text = b"The quick brown fox jumps over the lazy dog"
    assert words.pieces(text).ids == families.vocabulary("gpt-2").pieces(text).ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 1000}] * 3}}, "normalizer can make"),
        ({"added_tokens": [
            {"id": 1000 + n, "content": "<" * n + "x", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for n in range(600)]}, "added tokens of"),
    ],
    ids=["growth", "lengths"],
)  # fmt: skip
async def test_a_tokenizer_that_would_take_the_bridge_down_later_is_refused_now(change: dict, said: str) -> None:
    spec = json.loads(tokenizer_json("byte_level")) | change
    with pytest.raises(TokenizerNotUnderstood, match=said):
        await flaw_of(json.dumps(spec).encode())


def test_a_library_that_panics_over_a_text_is_an_error_like_others() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    split = {"type": "Split", "pattern": {"Regex": "(?:z|zz)+q|."}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    words = Vocabulary(json.dumps(spec).encode())
    with pytest.raises(TokenizerNotUnderstood, match="broke down over a text"):
        words.pieces(b"z" * 40 + b"! q")
