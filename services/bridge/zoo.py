"""The models that a bridge knows: where they are, what they are, and their tokenizers."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from cachetools import LRUCache
from grpc import aio

from bridge.errors import ChecksumMismatch, ModelNotFound, RoleNotServed, TokenizerNotUnderstood, Unreachable
from bridge.estimates import Estimates
from bridge.models import Model
from bridge.vocabulary import Vocabulary
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services import wire
from services.bridge.quarantine import flaw_of
from services.status import from_rpc_error

_ROLES = {model_pb2.ROLE_DRAFT: "draft", model_pb2.ROLE_TARGET: "target"}
# A tokenizer.json of a quarter of a million ids has 33 MB.
_TOKENIZER_LIMIT_BYTES = 256 << 20
# Models in use keep theirs; this is for those that come back.
_TOKENIZERS = 32


@dataclass(frozen=True)
class Endpoint:
    """A model service in the role that the bridge uses it in. `estimates`: what it costs, as a target."""

    address: str
    role: model_pb2.Role.ValueType
    channel: aio.Channel
    description: model_pb2.Model
    model: Model
    estimates: Estimates = field(default_factory=Estimates)


class Zoo:
    """Connects to model services and finds models by name."""

    def __init__(self, targets: Sequence[str], drafts: Sequence[str], timeout: float = 10.0) -> None:
        self._addresses = [(address, model_pb2.ROLE_TARGET) for address in targets]
        self._addresses += [(address, model_pb2.ROLE_DRAFT) for address in drafts]
        self._timeout = timeout
        self._vocabularies: LRUCache[str, tuple[Vocabulary, str]] = LRUCache(_TOKENIZERS)
        self.endpoints: list[Endpoint] = []

    async def connect(self) -> "Zoo":
        """Itself, when every service has said who it is. Raises `Unreachable`, `RoleNotServed`, ..."""
        for address, role in self._addresses:
            self.endpoints.append(await self._connect(address, role))
        return self

    async def close(self) -> None:
        """Closes the channels."""
        for endpoint in self.endpoints:
            await endpoint.channel.close()

    def target(self, name: str) -> Endpoint:
        """The target of that name, or the first if the name is empty. Raises `ModelNotFound`."""
        return self._find(name, model_pb2.ROLE_TARGET)

    def draft(self, name: str) -> Endpoint | None:
        """The draft of that name; if the name is empty the first, or None without drafts."""
        if not name and not self.of_role(model_pb2.ROLE_DRAFT):
            return None
        return self._find(name, model_pb2.ROLE_DRAFT)

    def model(self, name: str) -> Model:
        """Any model of that name. Raises `ModelNotFound`."""
        for endpoint in self.endpoints:
            if endpoint.model.name == name:
                return endpoint.model
        raise self._unknown(name, "model", self.endpoints)

    def of_role(self, role: model_pb2.Role.ValueType) -> list[Endpoint]:
        """Services that the bridge uses in a role."""
        return [endpoint for endpoint in self.endpoints if endpoint.role == role]

    def vocabularies(self) -> list[Vocabulary]:
        """The tokenizers in use, each once."""
        return list(
            {endpoint.model.vocabulary.sha256: endpoint.model.vocabulary for endpoint in self.endpoints}.values()
        )

    def _find(self, name: str, role: model_pb2.Role.ValueType) -> Endpoint:
        candidates = self.of_role(role)
        for endpoint in candidates:
            if name in ("", endpoint.model.name):
                return endpoint
        raise self._unknown(name, _ROLES[role], candidates)

    @staticmethod
    def _unknown(name: str, kind: str, known: Sequence[Endpoint]) -> ModelNotFound:
        names = ", ".join(dict.fromkeys(endpoint.model.name for endpoint in known)) or "none"
        return ModelNotFound(f"this bridge has no {kind} {name!r}: it has {names}", model=name)

    async def _connect(self, address: str, role: model_pb2.Role.ValueType) -> Endpoint:
        channel = open_channel(address)
        try:
            stub = model_pb2_grpc.ModelServiceStub(channel)
            answer = await stub.GetModel(model_pb2.GetModelRequest(), wait_for_ready=True, timeout=self._timeout)
            description = answer.model
            if description.role not in (role, model_pb2.ROLE_BOTH):
                raise RoleNotServed(address, description.name, _ROLES[role])
            vocabulary, flaw = await self._vocabulary(stub, description, address)
            if flaw and role == model_pb2.ROLE_TARGET:
                raise TokenizerNotUnderstood(
                    f"{description.name} at {address} can be a draft but no target: a target's text must be its "
                    f"tokens' bytes in a row, and {flaw}",
                    component="decoder",
                    model=description.name,
                )
            return Endpoint(address, role, channel, description, wire.read_model(description, vocabulary))
        except BaseException as error:
            await channel.close()
            if isinstance(error, aio.AioRpcError):
                raise from_rpc_error(error, address) from error
            raise

    async def _vocabulary(
        self, stub: "model_pb2_grpc.ModelServiceAsyncStub", description: model_pb2.Model, address: str
    ) -> tuple[Vocabulary, str]:
        """The model's tokenizer, fetched and tried once for each checksum, and what keeps it from being a target's."""
        sha256 = description.tokenizer_sha256
        if sha256 not in self._vocabularies:
            data, said = bytearray(), ""
            async for piece in stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=60):
                data += piece.chunk
                said = piece.sha256
                if len(data) > _TOKENIZER_LIMIT_BYTES:
                    raise ChecksumMismatch(f"{address} sends a tokenizer of more than {_TOKENIZER_LIMIT_BYTES} bytes")
            got = hashlib.sha256(data).hexdigest()
            if not got == said == sha256:
                raise ChecksumMismatch(
                    f"the tokenizer from {address} has SHA-256 {got}, not {sha256} as announced: restart that server",
                    expected=sha256,
                    got=got,
                )
            try:
                flaw = await flaw_of(bytes(data))
                vocabulary = await asyncio.to_thread(Vocabulary, bytes(data))
            except TokenizerNotUnderstood as error:
                raise TokenizerNotUnderstood(
                    f"{description.name} at {address}: {error}", **(error.metadata | {"model": description.name})
                ) from error
            await asyncio.to_thread(vocabulary.warm)
            self._vocabularies[sha256] = vocabulary, flaw
        return self._vocabularies[sha256]

    async def check(self, endpoint: Endpoint) -> str:
        """What is wrong with a service right now; empty if nothing."""
        stub = model_pb2_grpc.ModelServiceStub(endpoint.channel)
        try:
            answer = await stub.GetModel(model_pb2.GetModelRequest(), timeout=2.0)
        except aio.AioRpcError as error:
            return str(from_rpc_error(error, endpoint.address))
        if answer.model.tokenizer_sha256 != endpoint.description.tokenizer_sha256:
            return f"it now serves {answer.model.name} with another tokenizer: restart the bridge"
        return ""


def open_channel(address: str) -> aio.Channel:
    """A channel with the settings that streams of small messages want."""
    if ":" not in address:
        raise Unreachable(address, "an address is HOST:PORT")
    options: list[tuple[str, int]] = [
        # Messages are small but for tokenizers and prompts.
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.max_send_message_length", 64 << 20),
        ("grpc.enable_retries", 0),
        # A machine that goes away without a word is noticed within half a minute.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Two channels to one address would share a connection, and with it head-of-line blocking.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return aio.insecure_channel(address, options=options, compression=grpc.Compression.NoCompression)
