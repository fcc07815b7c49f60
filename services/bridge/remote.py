"""Implements the ports of `bridge` for drafts and targets over gRPC streams."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from grpc import StatusCode, aio

from bridge.errors import ProtocolViolation, TargetFault, Unreachable
from bridge.ports import Candidates, Grant, Pass, Proposal, Run, Sync
from bridge.sampling.sampler import SamplingParameters
from bridge.text.models import Model
from draftbridge.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from services.rpc import codec
from services.rpc.status import from_rpc_error
from services.traces import outgoing_metadata

# Tokens of a message. A peer that follows the protocol sends fewer, because neither offers nor credit are this large.
_MAX_TOKENS = 1024
# Tokens of a message with log probabilities; more if more were offered.
_MAX_REPORTED_TOKENS = 64
# Messages that may wait to be sent. With more, the peer is considered to have stopped reading.
_MAX_UNSENT = 256
# Messages that may wait to be read, and their bytes. A peer that keeps to its credit sends fewer.
_MAX_UNREAD, _MAX_UNREAD_BYTES = 1024, 16 << 20

_PER_DRAFT_TOKEN = ("confidence", "runner_up_ids", "runner_up_confidence")


class _Stream:
    """One bidirectional call.

    `send` does not wait for the peer, because a draft that hangs must not delay the target. It yields to the writer
    once, so that the message is sent before the caller continues. Sending on a failed call does nothing; reading raises
    the reason. `per_token`: the repeated fields that have one entry for each of a message's `token_ids`.
    `alternatives`: the most log probabilities of other tokens that a target may send for each.

    A task receives all messages, and only the end of the call ends it: gRPC never frees the memory of a read that is
    cancelled (grpc/grpc issue 43360).
    """

    def __init__(
        self,
        call: "aio.StreamStreamCall[Any, Any]",
        address: str,
        opening: Any,
        per_token: Sequence[str],
        alternatives: int = 0,
    ) -> None:
        self._call = call
        self._address = address
        self._per_token, self._alternatives = per_token, alternatives
        self.max_reported_tokens = _MAX_REPORTED_TOKENS
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._outbox.put_nowait(opening)
        self._writer = asyncio.create_task(self._write())
        # Messages, and last the error or `aio.EOF`.
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._unread_bytes = 0
        self._closed = False
        self._receiver = asyncio.create_task(self._receive())

    async def send(self, message: Any) -> None:
        if self._outbox.qsize() >= _MAX_UNSENT:
            raise Unreachable(self._address, "it has stopped reading its stream")
        self._outbox.put_nowait(message)
        await asyncio.sleep(0)

    async def _write(self) -> None:
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._outbox.get())

    async def _receive(self) -> None:
        end: Any = aio.EOF
        try:
            async for message in self._call:
                if self._closed:  # the next read would fail, whose memory gRPC does not free either
                    return
                self._unread_bytes += 0 if message is None else message.ByteSize()
                if self._inbox.qsize() >= _MAX_UNREAD or self._unread_bytes > _MAX_UNREAD_BYTES:
                    self._call.cancel()
                    end = ProtocolViolation(f"{self._address} has sent more than its credit allows")
                    break
                if excess := self._excess(message):
                    self._call.cancel()
                    end = ProtocolViolation(f"{self._address} has sent {excess} in one message")
                    break
                self._inbox.put_nowait(message)
        except aio.AioRpcError as error:
            end = from_rpc_error(error, self._address)
            if error.code() is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
                end = ProtocolViolation(f"{self._address} has sent a message above the limit of size")
        except asyncio.CancelledError:
            if self._closed:
                raise
            end = Unreachable(self._address, "its channel was closed")
        except Exception as error:  # raised again by `read`
            end = error
        self._inbox.put_nowait(end)

    async def read(self) -> AsyncIterator[Any]:
        while (message := await self._inbox.get()) is not aio.EOF:
            if isinstance(message, Exception):
                raise message
            if message is None:
                raise ProtocolViolation(f"{self._address} has sent a message that cannot be parsed")
            self._unread_bytes -= message.ByteSize()
            yield message

    def _excess(self, message: Any) -> str:
        """Returns what a message has too much of, or "". Converting all of it would hold up everybody."""
        if message is None:
            return ""
        count = max(len(message.token_ids), *(len(getattr(message, field)) for field in self._per_token))
        if count > _MAX_TOKENS:
            return f"{count} tokens"
        others = [len(one.top_logprobs) for one in message.logprobs] if "logprobs" in self._per_token else []
        if max(others, default=0) > self._alternatives:
            return f"{max(others)} alternatives to a token"
        return f"{sum(others)} alternatives" if sum(others) > self.max_reported_tokens * self._alternatives else ""

    def close(self) -> None:
        self._closed = True
        self._writer.cancel()
        self._call.cancel()


class RemoteDrafter:
    """Implements `bridge.ports.Drafter`."""

    def __init__(
        self, channel: aio.Channel, address: str, model: Model, sampling: SamplingParameters, seed: int
    ) -> None:
        opening = draft_pb2.DraftOpen(
            sampling=codec.write_sampling(sampling),
            seed=seed,
            model=model.name,
            tokenizer_sha256=model.vocabulary.sha256,
        )
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft(metadata=outgoing_metadata())
        self._stream = _Stream(call, address, draft_pb2.DraftRequest(open=opening), _PER_DRAFT_TOKEN)

    async def sync(self, sync: Sync) -> None:
        """See `Drafter`."""
        await self._stream.send(codec.write_sync(sync))

    async def grant(self, epoch: int, credit: int) -> None:
        """See `Drafter`."""
        await self._stream.send(draft_pb2.DraftRequest(grant=draft_pb2.DraftGrant(epoch=epoch, credit=credit)))

    async def proposals(self) -> AsyncIterator[Proposal]:
        """See `Drafter`."""
        async for message in self._stream.read():
            yield codec.read_proposal(message)

    def close(self) -> None:
        """Ends the stream, and with it the session at the other end."""
        self._stream.close()


class RemoteVerifier:
    """Implements `bridge.ports.Verifier`."""

    def __init__(
        self,
        channel: aio.Channel,
        address: str,
        model: Model,
        sampling: SamplingParameters,
        seed: int,
        logprobs: int | None,
    ) -> None:
        opening = target_pb2.VerifyOpen(
            sampling=codec.write_sampling(sampling),
            seed=seed,
            model=model.name,
            tokenizer_sha256=model.vocabulary.sha256,
            logprobs=logprobs,
        )
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(metadata=outgoing_metadata())
        self._stream = _Stream(call, address, target_pb2.VerifyRequest(open=opening), ("logprobs",), logprobs or 0)

    async def run(self, run: Run) -> None:
        """See `Verifier`."""
        await self._stream.send(codec.write_run(run))

    async def candidates(self, candidates: Candidates) -> None:
        """See `Verifier`."""
        self._stream.max_reported_tokens = max(self._stream.max_reported_tokens, len(candidates.token_ids) + 1)
        await self._stream.send(codec.write_candidates(candidates))

    async def grant(self, grant: Grant) -> None:
        """See `Verifier`."""
        await self._stream.send(codec.write_grant(grant))

    async def passes(self) -> AsyncIterator[Pass]:
        """See `Verifier`."""
        try:
            async for message in self._stream.read():
                yield codec.read_pass(message)
        except ProtocolViolation as error:  # the target's, not the client's
            raise TargetFault(str(error)) from error

    def close(self) -> None:
        """Ends the stream, and with it the session at the other end."""
        self._stream.close()
