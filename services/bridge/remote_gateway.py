"""Runs requests on a bridge elsewhere, over gRPC: the backend of a door in a process of its own."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import grpc
from cachetools import LRUCache
from grpc import aio

from bridge.errors import DraftBridgeError, InvalidField
from bridge.generation import Delta, Finished
from bridge.request import Request, check
from draftbridge.security import Credentials, open_aio_channel
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.bridge.backend import Opened, ServedModel, ServiceState
from services.bridge.listing import read_states
from services.bridge.pairing import Wish
from services.bridge.shared import Shared
from services.bridge.zoo import no_such
from services.errors import KeyLimitReached, ModelNotFound, Overloaded
from services.metrics import HttpMetrics
from services.rpc import client_codec
from services.rpc.channel import options
from services.rpc.status import RemoteError, from_rpc_error
from services.traces import Traces, outgoing_metadata

_MAX_MESSAGE_BYTES = 64 << 20
_TIMEOUT_SECONDS = 10.0
# How long a list of models is used before the bridge is asked again.
_LIST_SECONDS = 1.0
# The time after which a call that the bridge had no room for is repeated.
_REFUSED_SECONDS = 0.05
# Tokenizers whose tokens' bytes are kept, and tokens of each.
_MAX_TOKENIZERS, _MAX_TOKENS = 16, 300_000


class _Tokens:
    """The bytes and names of the tokens of one model that were needed so far."""

    def __init__(self) -> None:
        self._known: LRUCache[int, tuple[bytes, str]] = LRUCache(_MAX_TOKENS)

    def token_bytes(self, id_: int) -> bytes:
        """See `Spelling`."""
        return self._known.get(id_, (b"", ""))[0]

    def name(self, id_: int) -> str:
        """See `Spelling`."""
        return self._known.get(id_, (b"", ""))[1]

    def unknown(self, ids: Iterable[int]) -> list[int]:
        return [id_ for id_ in dict.fromkeys(ids) if id_ not in self._known]

    def add(self, spans: Iterable[bridge_pb2.TokenSpan]) -> None:
        for one in spans:
            self._known[one.token_id] = (one.data, one.name)


class RemoteGateway:
    """Runs requests on the bridge at `address`. It need not be there yet: requests fail until it is."""

    def __init__(self, address: str, credentials: Credentials, metrics: HttpMetrics, traces: Traces) -> None:
        self.metrics, self.traces = metrics, traces
        self._address, self._credentials = address, credentials
        self._tokens: LRUCache[str, _Tokens] = LRUCache(_MAX_TOKENIZERS)
        self._served_now = Shared(self._list, _LIST_SECONDS)
        # Also those that are away: a request for one is not for an unknown model.
        self._targets: dict[str, ServedModel] = {}
        self._channel: aio.Channel | None = None

    @property
    def _stub(self) -> "bridge_pb2_grpc.BridgeServiceAsyncStub":
        # Opened in the event loop that serves. A stub is cheap.
        if self._channel is None:
            self._channel = open_aio_channel(self._address, self._credentials, options(_MAX_MESSAGE_BYTES))
        return bridge_pb2_grpc.BridgeServiceStub(self._channel)

    async def close(self) -> None:
        """Ends all calls and the connection."""
        if self._channel:
            await self._channel.close()

    async def served(self) -> tuple[list[ServedModel], list[str]]:
        """See `Backend`."""
        return await self._served_now.get()

    async def _list(self) -> tuple[list[ServedModel], list[str]]:
        try:
            answer = await self._stub.ListModels(
                bridge_pb2.ListModelsRequest(), timeout=_TIMEOUT_SECONDS, metadata=outgoing_metadata()
            )
        except aio.AioRpcError as error:
            raise self._converted(error) from error
        usable, away = (
            {(one.role, one.model.name): one.model for one in reversed(answer.services) if one.state == state}
            for state in (bridge_pb2.ServiceState.STATE_AVAILABLE, bridge_pb2.ServiceState.STATE_AWAY)
        )
        known = away | usable  # of services with the same name, one that can be used counts
        configured = dict.fromkeys((one.role, one.model.name) for one in answer.services if one.model.name)
        keys = [key for key in configured if key in known]
        self._targets = {name: self._served(known[role, name]) for role, name in keys if role == model_pb2.ROLE_TARGET}
        targets = [one for name, one in self._targets.items() if (model_pb2.ROLE_TARGET, name) in usable]
        drafts = [name for role, name in keys if role == model_pb2.ROLE_DRAFT and (role, name) in usable]
        return targets, drafts

    async def served_target(self, name: str) -> ServedModel:
        """See `Backend`."""
        await self.served()
        for one in self._targets.values():
            if name in ("", one.name):
                return one
        raise ModelNotFound(no_such(name, ", ".join(self._targets)), model=name)

    async def check(self) -> list[ServiceState]:
        """See `Backend`. The bridge itself comes first."""
        try:
            answer = await self._stub.GetStatus(
                bridge_pb2.GetStatusRequest(), timeout=_TIMEOUT_SECONDS, metadata=outgoing_metadata()
            )
        except aio.AioRpcError as error:
            return [ServiceState(self._address, str(self._converted(error)), is_missed=True)]
        return [ServiceState(self._address, "", is_missed=False), *read_states(answer.endpoints)]

    async def segment(self, text: str, models: Sequence[str]) -> list[list[tuple[int, bytes]]]:
        """See `Backend`."""
        answer = await self._translate(bridge_pb2.TranslateRequest(text=text, source=models[0], target=models[-1]))
        rows = (answer.source_tokens, answer.target_tokens)[: len(models)]
        return [[(one.token_id, one.data) for one in row] for row in rows]

    async def generate(
        self, request: Request, target_name: str = "", wish: Wish | None = None
    ) -> AsyncGenerator[Opened | Delta | Finished, None]:
        """See `Backend`."""
        check(request)
        message = client_codec.write_request(request, target_name)
        wish = wish or Wish()
        message.draft = wish.draft
        message.drafts.extend(wish.drafts)
        message.workload = wish.workload
        call = self._stub.Generate(message, metadata=outgoing_metadata())
        target = ""
        try:
            while (response := await _read(call)) is not aio.EOF:
                match response.WhichOneof("event"):
                    case "started":
                        started, target = response.started, response.started.target
                        yield Opened(target, started.draft, started.seed, started.prompt_token_count)
                    case "delta":
                        if response.delta.logprobs:
                            await self._spell(target, response.delta)
                        yield client_codec.read_delta(response.delta)
                    case "finished":
                        yield client_codec.read_finished(response.finished)
        except aio.AioRpcError as error:
            raise _too_large(error, "the prompt") or self._converted(error) from error
        finally:
            call.cancel()

    async def _spell(self, model: str, delta: bridge_pb2.GenerateDelta) -> None:
        """Makes sure that the bytes of all tokens of a delta are known."""
        served = self._targets.get(model) or await self.served_target(model)
        tokens = served.spelling
        assert isinstance(tokens, _Tokens)
        tops = [top.token_id for one in delta.logprobs for top in one.top_logprobs]
        if unknown := tokens.unknown([*delta.token_ids, *tops]):
            ids = bridge_pb2.TokenIds(token_ids=unknown)
            request = bridge_pb2.TranslateRequest(token_ids=ids, source=model, target=model)
            until = time.monotonic() + _TIMEOUT_SECONDS
            while True:
                try:
                    tokens.add((await self._translate(request)).source_tokens)
                    return
                except RemoteError as error:
                    # Calls of this door's other clients must not end an answer that has begun. But if all calls that
                    # the bridge admits are such answers, none would ever end.
                    full = error.reason in (KeyLimitReached.reason, Overloaded.reason)
                    if not full or time.monotonic() > until:
                        raise
                await asyncio.sleep(_REFUSED_SECONDS)

    async def _translate(self, request: bridge_pb2.TranslateRequest) -> bridge_pb2.TranslateResponse:
        try:
            return await self._stub.Translate(request, timeout=_TIMEOUT_SECONDS, metadata=outgoing_metadata())
        except aio.AioRpcError as error:
            raise _too_large(error, "text") or self._converted(error) from error

    def _served(self, model: model_pb2.Model) -> ServedModel:
        tokens = self._tokens.get(model.tokenizer_sha256)
        if tokens is None:
            self._tokens[model.tokenizer_sha256] = tokens = _Tokens()
        chats, eos = bool(model.chat_template), tuple(model.special_ids.eos)
        return ServedModel(model.name, model.context_length, chats, eos, tokens)

    def _converted(self, error: aio.AioRpcError) -> DraftBridgeError:
        found = from_rpc_error(error, self._address)
        # The model is one that the client named, as in a gateway of this process.
        if isinstance(found, RemoteError) and found.reason == ModelNotFound.reason:
            return ModelNotFound(str(found), **found.metadata)
        return found


async def _read(call: "aio.UnaryStreamCall[Any, bridge_pb2.GenerateResponse]") -> Any:
    """Returns the next answer of a call, or `aio.EOF`.

    Only the end of the call ends the reading: gRPC never frees the memory of a read that is cancelled (grpc/grpc issue
    43360).
    """
    reading = asyncio.ensure_future(call.read())
    # After a client has left, nobody awaits the reading, and its error is of no interest.
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(reading)


def _too_large(error: aio.AioRpcError, field: str) -> InvalidField | None:
    """Returns the error of a message that exceeds the bridge's limit, because of a field; None for other errors."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or "larger than max" not in (error.details() or ""):
        return None
    return InvalidField(field, "small enough for a message to the bridge, whose limit is --message-limit")
