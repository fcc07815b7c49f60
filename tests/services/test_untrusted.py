"""Wrong tokenizers of model services are refused by name, and hostile ones do no harm."""

import asyncio
import hashlib
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter

import grpc
import pytest
from tokenizers import Tokenizer, decoders

from bridge.errors import TokenizerNotUnderstood, Unreachable, UnusableModel
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import bridge_pb2, model_pb2, model_pb2_grpc
from services.bridge import connection, endpoint
from services.bridge.gateway import Gateway
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.errors import ChecksumMismatch, DraftAway, ModelNotFound, SandboxBusy, SlowDownload
from services.sandbox import tokenizers
from services.sandbox.tokenizer_selftest import self_test
from services.sandbox.tokenizers import find_flaw
from tests.support import families
from tests.support.families import NAMES
from tests.support.ports import free_address
from tests.support.tiny import tokenizer_json
from tests.support.waiting import eventually


class Server(model_pb2_grpc.ModelServiceServicer):
    """Describes itself as a test demands, and counts the requests."""

    def __init__(self, content: bytes, role: int, sha256: str = "", name: str = "stranger") -> None:
        self._content, self.role, self._name = content, role, name
        self._sha256 = sha256 or hashlib.sha256(content).hexdigest()
        self.model_count = self.tokenizer_count = 0

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: object
    ) -> model_pb2.GetModelResponse:
        self.model_count += 1
        return model_pb2.GetModelResponse(
            model=model_pb2.Model(
                name=self._name,
                role=self.role,  # type: ignore[arg-type]
                context_length=100,
                vocabulary_size=5000,
                tokenizer_sha256=self._sha256,
            )
        )

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: object
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        self.tokenizer_count += 1
        for start in range(0, len(self._content), 1 << 16):
            yield model_pb2.GetTokenizerResponse(chunk=self._content[start : start + (1 << 16)])
        yield model_pb2.GetTokenizerResponse(sha256=self._sha256)


@asynccontextmanager
async def served(servicer: Server, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Yields the server's address."""
    server = grpc.aio.server()
    port = server.add_insecure_port(address)
    model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def stranger(content: bytes, role: int = model_pb2.ROLE_BOTH, sha256: str = "") -> AsyncIterator[str]:
    """Yields the address of a server with that tokenizer."""
    async with served(Server(content, role, sha256)) as address:
        yield address


async def connect(address: str, *, as_target: bool) -> Zoo:
    known = Zoo([address] if as_target else [], [] if as_target else [address])
    try:
        await known.connect()
        return known
    finally:
        await known.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_every_tokenizer_passes_the_self_test(name: str) -> None:
    flaw = self_test(families.vocabulary(name))
    assert bool(flaw) == name.startswith("bert"), flaw


def _fused(step: decoders.Decoder) -> bytes:
    """Returns a tokenizer whose decoder changes the whole text instead of each token."""
    tokenizer = Tokenizer.from_str(tokenizer_json("sentencepiece").decode())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), step])
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(("pattern", "content"), [(" ,", ","), ("wo", "WO"), (" '", "'")])
def test_a_decoder_that_changes_the_whole_text_is_for_drafts_only(pattern: str, content: str) -> None:
    # Whether the self-test finds it depends on where the tokens of its texts end.
    try:
        assert self_test(Vocabulary(_fused(decoders.Replace(pattern, content))))
    except TokenizerNotUnderstood as error:
        assert "byte table" in str(error)


def test_a_wrong_table_is_found_out() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    some = next(id_ for id_, data in enumerate(words.tokens) if data == b"the")
    words.tokens[some] = b"teh"
    with pytest.raises(TokenizerNotUnderstood, match="the"):
        self_test(words)


async def test_a_wordpiece_model_is_a_draft_and_no_target() -> None:
    async with stranger(tokenizer_json("wordpiece")) as address:
        known = await connect(address, as_target=False)
        assert known.draft("stranger") is not None
        with pytest.raises(TokenizerNotUnderstood, match=r"stranger .* can be a draft but not a target.*moves spaces"):
            await connect(address, as_target=True)


async def test_a_component_that_is_not_understood_is_named_with_its_model() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    spec["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    async with stranger(json.dumps(spec).encode()) as address:
        with pytest.raises(TokenizerNotUnderstood, match=r"stranger at .*'CTC'") as caught:
            await connect(address, as_target=True)
        assert caught.value.metadata == {"component": "decoder", "type": "CTC", "model": "stranger"}
        known = await connect(address, as_target=False)
        assert known.draft("") is None
        (status,) = await known.check()
        assert "'CTC'" in status.problem
        assert not status.reachable


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the bridge ask refused drafts again at once."""
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
async def test_a_refused_draft_is_read_again_when_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tokenizer_json("byte_level"), model_pb2.ROLE_TARGET)
    async with served(server) as address:
        known = Zoo([], [address])
        try:
            await known.connect()
            assert known.draft("") is None
            with pytest.raises(DraftAway, match=f"configured at {address} .*--role draft"):
                known.draft("stranger")
            with pytest.raises(ModelNotFound):
                known.draft("another")
            await asyncio.to_thread(eventually, lambda: server.model_count > 5)
            assert len(caplog.records) == 1
            server.role = model_pb2.ROLE_BOTH
            await asyncio.to_thread(eventually, lambda: known.draft("") is not None)
            assert server.tokenizer_count == 1
            assert len(caplog.records) == 2
        finally:
            await known.close()


@pytest.mark.usefixtures("impatient")
async def test_a_tokenizer_that_was_refused_is_not_fetched_again_before_its_server_goes_away() -> None:
    content = tokenizer_json("byte_level")
    wrong = Server(content, model_pb2.ROLE_BOTH, "0" * 64)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served(wrong))
        known = Zoo([], [server])
        stack.push_async_callback(known.close)
        await known.connect()
        await asyncio.to_thread(eventually, lambda: wrong.model_count > 5)
        assert wrong.tokenizer_count == 1
        (status,) = await known.check()
        assert "not 0000" in status.problem


@pytest.mark.parametrize("name", ["", "x" * 1000, "red\x1b[31m", "two\nlines"])
async def test_a_name_that_would_garble_a_log_is_refused(name: str) -> None:
    async with served(Server(tokenizer_json("byte_level"), model_pb2.ROLE_BOTH, name=name)) as address:
        with pytest.raises(UnusableModel, match="printable characters"):
            await connect(address, as_target=True)


async def test_a_checksum_that_would_garble_a_log_is_refused() -> None:
    async with stranger(tokenizer_json("byte_level"), sha256="two\nlines") as address:
        with pytest.raises(UnusableModel, match="64 hexadecimal digits"):
            await connect(address, as_target=True)


async def test_an_error_that_quotes_a_tokenizer_fits_into_a_log_and_a_status() -> None:
    async with stranger(_fused(decoders.Replace("wo", "w" * 4_000))) as address:
        known = await connect(address, as_target=False)
        (status,) = await known.check()
    assert "byte table" in status.problem and status.problem.endswith("report it if that does not help")
    assert len(status.problem) < 1000


@pytest.mark.parametrize("method", ["GetModel", "GetTokenizer"])
async def test_what_is_no_message_is_refused(method: str) -> None:
    async def garbage_stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"\xff" * 9

    async def model(request: bytes, context: object) -> bytes:
        if method == "GetModel":
            return b"\xff" * 9
        described = await Server(b"", model_pb2.ROLE_BOTH).GetModel(model_pb2.GetModelRequest(), None)
        return described.SerializeToString()

    handlers = {
        "GetModel": grpc.unary_unary_rpc_method_handler(model),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(garbage_stream),
    }
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("draftbridge.v1.ModelService", handlers),))
    await server.start()
    try:
        with pytest.raises(Unreachable, match="not a message of the contract"):
            await connect(f"127.0.0.1:{port}", as_target=True)
        known = await connect(f"127.0.0.1:{port}", as_target=False)
        assert known.draft("") is None
    finally:
        await server.stop(None)


async def test_services_that_hang_are_asked_side_by_side() -> None:
    count, content = 8, tokenizer_json("byte_level")
    known = Zoo([], [])
    async with AsyncExitStack() as stack:
        async with AsyncExitStack() as healthy:
            servers = [Server(content, model_pb2.ROLE_BOTH) for _ in range(count)]
            addresses = [await healthy.enter_async_context(served(server, free_address())) for server in servers]
            known = Zoo(addresses[:2], addresses[2:])
            stack.push_async_callback(known.close)
            await known.connect()
            assert all(one.reachable for one in await known.check())

        for address in addresses:
            host, port = address.split(":")
            # The system accepts connections for it, but nothing ever reads from them.
            stack.enter_context(socket.create_server((host, int(port))))
        started = perf_counter()
        answers = await BridgeServicer(Gateway(known)).GetStatus(bridge_pb2.GetStatusRequest(), None)
        assert perf_counter() - started < (count - 1) * endpoint.CHECK_SECONDS
        assert [one.address for one in answers.endpoints] == addresses
        assert not any(one.reachable for one in answers.endpoints)


async def test_a_checksum_that_is_not_the_contents_is_refused() -> None:
    async with stranger(tokenizer_json("byte_level"), sha256="0" * 64) as address:
        with pytest.raises(ChecksumMismatch, match="not 0000"):
            await connect(address, as_target=True)


async def test_a_tokenizer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TOKENIZER_LIMIT_BYTES", 1 << 20)
    async with stranger(b" " * (2 << 20)) as address:
        with pytest.raises(ChecksumMismatch, match="more than 1048576 bytes"):
            await connect(address, as_target=True)


async def test_a_tokenizer_of_which_nothing_more_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalling(Server):
        async def GetTokenizer(  # noqa: N802
            self, request: model_pb2.GetTokenizerRequest, context: object
        ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
            yield model_pb2.GetTokenizerResponse(chunk=b"{")
            await asyncio.Event().wait()

    monkeypatch.setattr(endpoint, "_PIECE_SECONDS", 1.0)
    async with served(Stalling(b"{}", model_pb2.ROLE_TARGET)) as address:
        with pytest.raises(SlowDownload, match=r"was being loaded, but after [01] bytes the next ones did not come"):
            await connect(address, as_target=True)


class SlowLink:
    """Sends a tokenizer in four pieces, each of which takes 45 seconds by the clock of the event loop, not really."""

    def __init__(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._content, self._passed = content, 0.0
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + self._passed)

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, **options: float
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        size = math.ceil(len(self._content) / 4)
        for start in range(0, len(self._content), size):
            self._passed += 45
            if self._passed > options.get("timeout", math.inf):
                raise TimeoutError("the time limit of the call is over")
            last = start + size >= len(self._content)
            sha256 = hashlib.sha256(self._content).hexdigest() if last else None
            yield model_pb2.GetTokenizerResponse(chunk=self._content[start : start + size], sha256=sha256)


async def test_a_tokenizer_may_take_long_on_a_slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_flaw(data: bytes) -> str:
        return ""

    monkeypatch.setattr(endpoint, "find_flaw", find_flaw)
    content, reader = tokenizer_json("byte_level"), endpoint.ModelReader()
    model = model_pb2.Model(tokenizer_sha256=hashlib.sha256(content).hexdigest())
    try:
        vocabulary, _ = await reader._vocabulary(SlowLink(content, monkeypatch), model, "far:1")  # type: ignore[arg-type]
        assert vocabulary.sha256 == model.tokenizer_sha256
    finally:
        await reader.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 1000,
        b"[" * 200_000,  # deeper than any parser accepts
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4000000000}, "unk_token": "a"}}',
    ],
    ids=["nothing", "zeros", "depth", "merges of nothing", "an id of billions"],
)
async def test_what_is_made_to_break_a_reader_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerNotUnderstood):
        await find_flaw(content)


async def test_a_tokenizer_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "CPU_LIMIT_SECONDS", 0.001)
    with pytest.raises(TokenizerNotUnderstood, match=r"more than 0\.001 s of processor time"):
        await find_flaw(tokenizer_json("byte_level"))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("script", "problem"),
    [("kill -9 $$", "because memory ran out"), ("exec sleep 600", "no answer within 0.5 s")],
    ids=["killed", "without processor time"],
)
async def test_a_tokenizer_whose_process_was_killed_or_got_no_time_is_read_again(
    script: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tokenizer_json("byte_level")
    with monkeypatch.context() as patched:
        patched.setattr(tokenizers, "command", lambda *_: ["sh", "-c", script])
        patched.setattr(tokenizers, "_WAIT_SECONDS", 0.5)
        with pytest.raises(SandboxBusy, match=f"cannot read the tokenizer now .*{problem}"):
            await find_flaw(content)
        async with stranger(content) as address:
            known = Zoo([], [address])
            try:
                await known.connect()
                (status,) = await known.check()
                assert problem in status.problem
                patched.undo()
                await asyncio.to_thread(eventually, lambda: known.draft("") is not None)
            finally:
                await known.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 1000}] * 3}}, "normalizer can turn"),
        ({"added_tokens": [
            {"id": 1000 + n, "content": "<" * n + "x", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for n in range(600)]}, "added tokens of"),
        ({"added_tokens": [
            {"id": 1000 + n, "content": chr(0x4E00 + n) * 1000, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for n in range(100)]}, "squared lengths"),
    ],
    ids=["growth", "lengths", "squares"],
)  # fmt: skip
async def test_a_tokenizer_that_would_take_the_bridge_down_later_is_refused_now(change: dict, message: str) -> None:
    spec = json.loads(tokenizer_json("byte_level")) | change
    with pytest.raises(TokenizerNotUnderstood, match=message):
        await find_flaw(json.dumps(spec).encode())


def test_a_library_that_panics_over_a_text_is_an_error_like_others() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    split = {"type": "Split", "pattern": {"Regex": "(?:z|zz)+q|."}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    words = Vocabulary(json.dumps(spec).encode())
    with pytest.raises(TokenizerNotUnderstood, match="crashed while encoding a text"):
        words.pieces(b"z" * 40 + b"! q")
