"""What a key's limits apply to, and where a server's own token may go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bridge.generation import Delta
from bridge.request import Request
from draftbridge import CallError
from draftbridge.security import Credentials
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2, sampling_pb2
from services.bridge.remote_gateway import RemoteGateway
from services.config import ServerConfig
from services.errors import KeyLimitReached
from services.metrics import HttpMetrics
from services.rpc.security import warn_of_open_token
from services.rpc.server import Server
from services.rpc.status import RemoteError
from services.traces import Traces

TOKEN = "alice-0123456789abcdef"
OWN = (("authorization", f"Bearer {TOKEN}"),)


class Slow(bridge_pb2_grpc.BridgeServiceServicer):
    """A bridge whose translations of texts wait until `end` is set. It generates one token."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def ListModels(self, request: object, context: object) -> bridge_pb2.ListModelsResponse:  # noqa: N802
        state, role = bridge_pb2.ServiceState.STATE_AVAILABLE, model_pb2.ROLE_TARGET
        service = bridge_pb2.ServiceState(role=role, state=state, model=model_pb2.Model(name="m"))
        return bridge_pb2.ListModelsResponse(services=[service])

    async def Translate(  # noqa: N802
        self, request: bridge_pb2.TranslateRequest, context: object
    ) -> bridge_pb2.TranslateResponse:
        if request.text:
            self.begun.set()
            await self.end.wait()
        spans = [bridge_pb2.TokenSpan(token_id=id_, data=b"x") for id_ in request.token_ids.token_ids]
        return bridge_pb2.TranslateResponse(source_tokens=spans)

    async def Generate(self, request: object, context: object) -> bridge_pb2.GenerateResponse:  # noqa: N802
        yield bridge_pb2.GenerateResponse(started=bridge_pb2.GenerateStarted(target="m"))
        token = sampling_pb2.TokenLogprobs(logprob=-1.0)
        yield bridge_pb2.GenerateResponse(delta=bridge_pb2.GenerateDelta(text="x", token_ids=[5], logprobs=[token]))


@asynccontextmanager
async def limited(tmp_path: Path) -> AsyncIterator[tuple[Slow, str]]:
    """A bridge whose only key has room for one request, and one translation, at once."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\ntoken = "{TOKEN}"\nconcurrent-requests = 1\n')
    server, slow = Server("127.0.0.1:0", ServerConfig.model_validate({"keys": keys})), Slow()
    server.register(bridge_pb2_grpc.add_BridgeServiceServicer_to_server, slow, None)
    await server._server.start()
    try:
        async with asyncio.timeout(60):
            yield slow, server.address
    finally:
        await server._server.stop(0)


class Listing(bridge_pb2_grpc.BridgeServiceServicer):
    """A bridge with several services, some of which are away. `count`: how often it was asked for them."""

    count = 0

    async def ListModels(self, request: object, context: object) -> bridge_pb2.ListModelsResponse:  # noqa: N802
        self.count += 1
        states = bridge_pb2.ServiceState
        services = [
            states(role=role, state=state, model=model_pb2.Model(name=name, context_length=length))
            for role, state, name, length in (
                (model_pb2.ROLE_TARGET, states.STATE_AWAY, "z", 1),
                (model_pb2.ROLE_TARGET, states.STATE_AVAILABLE, "b", 1),
                (model_pb2.ROLE_TARGET, states.STATE_AWAY, "a", 1),
                (model_pb2.ROLE_TARGET, states.STATE_AVAILABLE, "a", 2),
                (model_pb2.ROLE_DRAFT, states.STATE_AVAILABLE, "y", 1),
                (model_pb2.ROLE_DRAFT, states.STATE_AWAY, "c", 1),
                (model_pb2.ROLE_DRAFT, states.STATE_AVAILABLE, "x", 1),
            )
        ]
        return bridge_pb2.ListModelsResponse(services=services)


async def test_a_door_of_its_own_lists_models_in_the_bridge_s_order() -> None:
    server, listing = aio.server(), Listing()
    bridge_pb2_grpc.add_BridgeServiceServicer_to_server(listing, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    door = RemoteGateway(f"127.0.0.1:{port}", Credentials(), HttpMetrics(), Traces())
    try:
        (targets, drafts), *_ = await asyncio.gather(*(door.served() for _ in range(5)))
        assert listing.count == 1, "requests that arrive together ask once"
        assert [(one.name, one.context_length) for one in targets] == [("b", 1), ("a", 2)]
        assert drafts == ["y", "x"]
        assert (await door.served_target("")).name == "z", "the default, also while it is away"
    finally:
        await door.close()
        await server.stop(0)


async def test_translations_are_limited_apart_from_requests(tmp_path: Path) -> None:
    async with limited(tmp_path) as (slow, address), aio.insecure_channel(address) as channel:
        stub, request = bridge_pb2_grpc.BridgeServiceStub(channel), bridge_pb2.TranslateRequest(text="x")
        first = stub.Translate(request, metadata=OWN)
        await slow.begun.wait()
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Translate(request, metadata=OWN, timeout=30)
        assert CallError.from_rpc(caught.value, "the bridge").reason == "KEY_LIMIT_REACHED"
        # A door asks for tokens' bytes in the middle of a request, with the same key.
        assert len([one async for one in stub.Generate(bridge_pb2.GenerateRequest(), metadata=OWN)]) == 2
        slow.end.set()
        await first
        await stub.Translate(request, metadata=OWN)


async def outcome(call: Any) -> str:
    """Returns the reason of a call's error, empty if there is none."""
    try:
        await call
    except aio.AioRpcError as error:
        return CallError.from_rpc(error, "the bridge").reason
    return ""


async def test_a_call_counts_while_its_message_arrives(tmp_path: Path) -> None:
    async with limited(tmp_path) as (_, address), aio.insecure_channel(address) as channel:
        # On the wire, a stream of one message is the same as a message, which this client does not send yet.
        translate = channel.stream_unary("/draftbridge.v1.BridgeService/Translate")
        calls = [translate(metadata=OWN) for _ in range(2)]
        outcomes = [asyncio.create_task(outcome(one)) for one in calls]
        (refused,), _ = await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result() == "KEY_LIMIT_REACHED"
        (admitted,) = (one for one in calls if not one.done())
        await admitted.write(b"")
        await admitted.done_writing()
        assert sorted(await asyncio.gather(*outcomes)) == ["", "KEY_LIMIT_REACHED"]
        without = translate(metadata=OWN)
        await without.done_writing()
        assert await outcome(without) == "PROTOCOL_VIOLATION"


async def test_a_call_whose_message_does_not_arrive_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.gate._MESSAGE_SECONDS", (0.1, 0.1))
    async with limited(tmp_path) as (_, address), aio.insecure_channel(address) as channel:
        translate = channel.stream_unary("/draftbridge.v1.BridgeService/Translate")
        for _ in range(2):  # the first one counts no more when it has ended
            assert await outcome(translate(metadata=OWN)) == "PROTOCOL_VIOLATION"


@pytest.mark.parametrize(("seconds", "shown"), [(0.01, "0.1 s"), (1.0, "1.0 s"), (177.61, "177.7 s")])
def test_the_delay_in_the_text_is_not_shorter_than_the_delay(seconds: float, shown: str) -> None:
    error = KeyLimitReached("alice", "6000 tokens a minute", seconds)
    assert f"try again in {shown}, " in str(error)
    assert float(error.metadata["retry_seconds"]) == seconds


async def test_a_segmentation_does_not_end_an_answer_of_the_same_door(tmp_path: Path) -> None:
    async with limited(tmp_path) as (slow, address):
        gateway = RemoteGateway(address, Credentials(token=TOKEN, insecure=True), HttpMetrics(), Traces())

        async def deltas() -> list[object]:
            return [one async for one in gateway.generate(Request("a", logprobs=0)) if isinstance(one, Delta)]

        segmentation = asyncio.create_task(gateway.segment("x", ["m"]))
        await slow.begun.wait()
        answer = asyncio.create_task(deltas())
        await asyncio.wait([answer], timeout=0.2)
        assert not answer.done(), "the bytes of its token are refused for now"
        slow.end.set()
        assert len(await answer) == 1 and (await gateway.served_target("m")).spelling.token_bytes(5) == b"x"
        await segmentation
        await gateway.close()


async def test_an_answer_ends_if_the_bytes_of_its_tokens_are_refused_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise answers that fill a bridge's limit of calls would wait for one another for ever."""
    async with limited(tmp_path) as (slow, address):
        gateway = RemoteGateway(address, Credentials(token=TOKEN, insecure=True), HttpMetrics(), Traces())
        segmentation = asyncio.create_task(gateway.segment("x", ["m"]))
        await slow.begun.wait()
        monkeypatch.setattr("services.bridge.remote_gateway._TIMEOUT_SECONDS", 2.0)
        with pytest.raises(RemoteError, match="limit"):
            [one async for one in gateway.generate(Request("a", logprobs=0))]
        slow.end.set()
        await segmentation
        await gateway.close()


def test_a_token_that_leaves_the_machine_unencrypted_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    own = {"token_file": Path("token"), "insecure": True}
    warn_of_open_token(Credentials(**own), ["127.0.0.1:1"])
    warn_of_open_token(Credentials(**own, tls=True), ["gpu-1:1"])
    assert not caplog.text
    warn_of_open_token(Credentials(**own), ["127.0.0.1:1", "gpu-1:50051"])
    assert "sent unencrypted to gpu-1:50051" in caplog.text
