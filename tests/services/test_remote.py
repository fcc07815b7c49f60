"""Streams to peers: they end with an error if the peer sends too much or the channel closes, and leave nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from time import thread_time
from typing import Any

import pytest
from grpc import aio

from bridge.errors import DraftBridgeError, ProtocolViolation, Unreachable
from bridge.sampling.sampler import SamplingParameters
from draftbridge.v1 import bridge_pb2, draft_pb2, draft_pb2_grpc, sampling_pb2, target_pb2, target_pb2_grpc
from services.bridge.remote import RemoteDrafter, RemoteVerifier, _Stream
from services.rpc.channel import _MAX_MESSAGE_BYTES
from services.rpc.codec import add_statistics
from tests.support import tiny

MODEL = tiny.model("byte_level")
ALTERNATIVES = [sampling_pb2.TopLogprob(token_id=5, logprob=-1.0)] * 20_000


class Draft(draft_pb2_grpc.DraftServiceServicer):
    """Answers every stream with one message."""

    def __init__(self, answer: draft_pb2.DraftResponse) -> None:
        self._answer = answer

    async def Draft(self, request_iterator: object, context: object) -> AsyncIterator[draft_pb2.DraftResponse]:  # noqa: N802
        yield self._answer


class Flood(draft_pb2_grpc.DraftServiceServicer):
    """Answers every stream with messages without end. `cancelled` is set when the client cancels one."""

    def __init__(self, token_count: int = 1) -> None:
        self._token_ids = [5] * token_count
        self.cancelled = asyncio.Event()

    async def Draft(self, request_iterator: object, context: object) -> AsyncIterator[draft_pb2.DraftResponse]:  # noqa: N802
        try:
            while True:
                yield draft_pb2.DraftResponse(epoch=1, token_ids=self._token_ids)
        finally:
            self.cancelled.set()


class Silent(draft_pb2_grpc.DraftServiceServicer):
    """Answers no stream."""

    async def Draft(self, request_iterator: object, context: object) -> AsyncIterator[draft_pb2.DraftResponse]:  # noqa: N802
        await asyncio.Event().wait()
        yield draft_pb2.DraftResponse()


class Target(target_pb2_grpc.TargetServiceServicer):
    """Answers every stream with one message."""

    def __init__(self, answer: target_pb2.VerifyResponse) -> None:
        self._answer = answer

    async def Verify(self, request_iterator: object, context: object) -> AsyncIterator[target_pb2.VerifyResponse]:  # noqa: N802
        yield self._answer


@asynccontextmanager
async def connected(peer: draft_pb2_grpc.DraftServiceServicer | Target) -> AsyncIterator[aio.Channel]:
    server = aio.server()
    if isinstance(peer, draft_pb2_grpc.DraftServiceServicer):
        draft_pb2_grpc.add_DraftServiceServicer_to_server(peer, server)
    else:
        target_pb2_grpc.add_TargetServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize(
    "answer",
    [
        draft_pb2.DraftResponse(epoch=1, token_ids=[5] * 2000),
        draft_pb2.DraftResponse(epoch=1, token_ids=[5], confidence=[0.5] * 70_000),
        draft_pb2.DraftResponse(epoch=1, token_ids=[5], runner_up_ids=[5] * 70_000),
        draft_pb2.DraftResponse(epoch=1, token_ids=[5], runner_up_confidence=[0.5] * 70_000),
        draft_pb2.DraftResponse(epoch=1, token_ids=[5] * 400_000),
        target_pb2.VerifyResponse(token_ids=[5] * 300_000),
        target_pb2.VerifyResponse(token_ids=[5] * 400_000),
        target_pb2.VerifyResponse(token_ids=[5], logprobs=[target_pb2.VerifyResponse().logprobs.add()] * 100_000),
        target_pb2.VerifyResponse(token_ids=[5], logprobs=[sampling_pb2.TokenLogprobs(top_logprobs=ALTERNATIVES)]),
        target_pb2.VerifyResponse(
            token_ids=[5] * 350, logprobs=[sampling_pb2.TokenLogprobs(top_logprobs=ALTERNATIVES[:100])] * 350
        ),
    ],
    ids=[
        "tokens",
        "confidences",
        "runners-up",
        "confidences of runners-up",
        "a giant message",
        "a target's tokens",
        "a target's giant message",
        "log probabilities",
        "alternatives",
        "alternatives to many tokens",
    ],
)
async def test_a_message_with_too_much_is_refused_and_holds_up_nobody(
    answer: draft_pb2.DraftResponse | target_pb2.VerifyResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(message: object) -> None:
        raise AssertionError("it was converted")

    for name in ("read_proposal", "read_pass"):
        monkeypatch.setattr(f"services.bridge.remote.codec.{name}", convert)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            started = thread_time()  # of the processor, whatever else the machine does
            await asyncio.sleep(0)
            longest = max(longest, thread_time() - started)

    peer = Draft(answer) if isinstance(answer, draft_pb2.DraftResponse) else Target(answer)
    async with connected(peer) as channel, asyncio.timeout(30):
        if isinstance(peer, Draft):
            stream: RemoteDrafter | RemoteVerifier = RemoteDrafter(channel, "peer:1", MODEL, SamplingParameters(), 0)
        else:
            stream = RemoteVerifier(channel, "peer:1", MODEL, SamplingParameters(), 0, 100)
        watching = asyncio.create_task(watch())
        with closing(stream), pytest.raises(DraftBridgeError) as caught:
            async for _ in stream.proposals() if isinstance(stream, RemoteDrafter) else stream.passes():
                raise AssertionError("it was taken")
        watching.cancel()
    assert caught.value.reason == ("PROTOCOL_VIOLATION" if isinstance(peer, Draft) else "TARGET_FAULT"), caught.value
    # Parsing a refused message took 1 to 4 ms where this was written; converting the longest took a second.
    assert longest < 0.1


class Call:
    """A call whose peer sends nothing. `outcome` is how the read of its messages ended."""

    def __init__(self) -> None:
        self.outcome = ""
        self._cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[None]:
        self.outcome = "cancelled"
        await self._cancelled.wait()
        self.outcome = "ended by the call"
        for message in ():
            yield message

    async def write(self, message: object) -> None: ...

    def cancel(self) -> None:
        self._cancelled.set()


async def test_no_read_of_a_stream_is_cancelled() -> None:
    """gRPC never frees the memory of a read that is cancelled."""
    call: Any = Call()
    stream, others = _Stream(call, "peer:1", draft_pb2.DraftRequest(), ("confidence",)), asyncio.all_tasks()
    reader = asyncio.ensure_future(anext(stream.read()))
    await asyncio.sleep(0)
    reader.cancel()
    stream.close()
    await asyncio.wait({reader, *others - {asyncio.current_task()}}, timeout=60)
    assert call.outcome == "ended by the call"


@pytest.mark.parametrize(
    ("token_count", "held", "fault"), [(1, 1024, "more than its credit"), (2000, 0, "2000 tokens in one")]
)
async def test_a_flood_that_nobody_reads_is_cut_off(token_count: int, held: int, fault: str) -> None:
    flood = Flood(token_count)
    async with connected(flood) as channel, asyncio.timeout(30):
        with closing(RemoteDrafter(channel, "peer:1", MODEL, SamplingParameters(), 0)) as drafter:
            await flood.cancelled.wait()
            assert drafter._stream._inbox.qsize() == held + 1, "the messages and the error"
            with pytest.raises(ProtocolViolation, match=fault):
                async for _ in drafter.proposals():
                    pass


async def test_large_messages_that_nobody_reads_are_cut_off() -> None:
    """A message may be large without having many tokens: by fields that this version of the contract lacks."""

    class Large(Flood):
        async def Draft(self, request_iterator: object, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:  # noqa: N802
            # Field 1000, of bytes; the number of its kind and the length are variable integers.
            unknown = b"\xc2\x3e" + b"\x80\x80\x10" + bytes(1 << 18)
            try:
                while True:
                    yield draft_pb2.DraftResponse.FromString(unknown)
            finally:
                self.cancelled.set()

    flood = Large(1)
    async with connected(flood) as channel, asyncio.timeout(30):
        with closing(RemoteDrafter(channel, "peer:1", MODEL, SamplingParameters(), 0)) as drafter:
            await flood.cancelled.wait()
            assert drafter._stream._inbox.qsize() <= (16 << 20) // (1 << 18) + 1
            with pytest.raises(ProtocolViolation, match="more than its credit"):
                async for _ in drafter.proposals():
                    pass


async def test_a_channel_that_closes_ends_its_streams_with_an_error() -> None:
    async with connected(Silent()) as channel, asyncio.timeout(30):
        with closing(RemoteDrafter(channel, "peer:1", MODEL, SamplingParameters(), 0)) as drafter:
            reader = asyncio.ensure_future(anext(aiter(drafter.proposals())))
            await drafter._stream._call.wait_for_connection()
            await channel.close()
            with pytest.raises(Unreachable, match="closed"):
                await reader


def test_totals_stop_at_the_largest_number_that_they_hold() -> None:
    totals, one = bridge_pb2.SpeculationStatistics(), bridge_pb2.SpeculationStatistics(num_drafts=2**64 - 1)
    one.verify_ns = 2**64 - 1
    one.sources.add(name="draft", compute_ns=2**64 - 1)
    for _ in range(3):
        add_statistics(totals, one)
    assert totals == one
