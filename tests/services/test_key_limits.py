"""What a key's limits apply to, and where a server's own token may go."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from draftbridge import CallError
from draftbridge.security import Credentials
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.config import ServerConfig
from services.rpc.security import warn_of_open_token
from services.rpc.server import Server

TOKEN = "alice-0123456789abcdef"
OWN = (("authorization", f"Bearer {TOKEN}"),)


class Slow(bridge_pb2_grpc.BridgeServiceServicer):
    """A bridge whose translations wait until `end` is set."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def Translate(self, request: object, context: object) -> bridge_pb2.TranslateResponse:  # noqa: N802
        self.begun.set()
        await self.end.wait()
        return bridge_pb2.TranslateResponse()

    async def Generate(self, request: object, context: object) -> bridge_pb2.GenerateResponse:  # noqa: N802
        yield bridge_pb2.GenerateResponse()


async def test_translations_are_limited_apart_from_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\ntoken = "{TOKEN}"\nconcurrent-requests = 1\n')
    server, slow = Server("127.0.0.1:0", ServerConfig.model_validate({"keys": keys})), Slow()
    server.register(bridge_pb2_grpc.add_BridgeServiceServicer_to_server, slow, None)
    await server._server.start()
    try:
        async with aio.insecure_channel(server.address) as channel, asyncio.timeout(30):
            stub, request = bridge_pb2_grpc.BridgeServiceStub(channel), bridge_pb2.TranslateRequest(text="x")
            first = stub.Translate(request, metadata=OWN)
            await slow.begun.wait()
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Translate(request, metadata=OWN, timeout=5)
            assert CallError.from_rpc(caught.value, "the bridge").reason == "KEY_LIMIT_REACHED"
            # A door asks for tokens' bytes in the middle of a request, with the same key.
            assert len([one async for one in stub.Generate(bridge_pb2.GenerateRequest(), metadata=OWN)]) == 1
            slow.end.set()
            await first
            await stub.Translate(request, metadata=OWN)
    finally:
        await server._server.stop(0)


def test_a_token_that_leaves_the_machine_unencrypted_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    own = {"token_file": Path("token"), "insecure": True}
    warn_of_open_token(Credentials(**own), ["127.0.0.1:1"])
    warn_of_open_token(Credentials(**own, tls=True), ["gpu-1:1"])
    assert not caplog.text
    warn_of_open_token(Credentials(**own), ["127.0.0.1:1", "gpu-1:50051"])
    assert "sent unencrypted to gpu-1:50051" in caplog.text
