"""The models that a bridge knows: where they are, what they are, and their tokenizers.

A bridge needs its targets when it starts. It does not need its drafts: one that is away, or of no use, is asked again
in the background until it can be taken in.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

import grpc
from cachetools import LRUCache
from grpc import aio

from bridge.errors import (
    ChecksumMismatch,
    DraftAway,
    DraftBridgeError,
    ModelChanged,
    ModelNotFound,
    RoleNotServed,
    TokenizerNotUnderstood,
    Unreachable,
    UnusableModel,
)
from bridge.planning.estimates import TargetEstimates
from bridge.text.models import Model
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import bridge_pb2, model_pb2, model_pb2_grpc
from services.rpc import codec
from services.rpc.status import RemoteError, from_rpc_error
from services.sandbox.templates import TemplateSandbox
from services.sandbox.tokenizers import flaw_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ROLES = {model_pb2.ROLE_DRAFT: "draft", model_pb2.ROLE_TARGET: "target"}
# What a model service may send at a time: a piece of a tokenizer is the largest. Parsing more would hold up the event
# loop for longer than a pass of a fast target takes.
_MAX_MESSAGE_BYTES = (1 << 18) + (64 << 10)
# A tokenizer.json of a quarter of a million ids has 33 MB.
_TOKENIZER_LIMIT_BYTES = 256 << 20
# Models in use keep theirs; this is for those that come back.
_TOKENIZERS = 32
# How long `GetStatus` waits for each service.
_CHECK_SECONDS = 2.0
# What a bridge that starts allows its drafts beyond the time to answer, for their tokenizers on a busy machine.
_START_SECONDS = 20.0
# The least between two tries to take in a draft. While nobody is there, its channel tries to connect every two seconds.
_RETRY_SECONDS = 1.0
_MAX_NAME_LENGTH = 256
# Lines that the log gets about one draft: a peer that changes all the time must not fill it.
_MAX_LOG_LINES = 8
# What a stream to a draft fails with where another model is served now than was taken in.
_CHANGED = (ModelChanged.reason, ModelNotFound.reason)


@dataclass(frozen=True)
class Endpoint:
    """A model service in the role that the bridge uses it in. `estimates`: what it costs, as a target."""

    address: str
    role: model_pb2.Role.ValueType
    channel: aio.Channel
    description: model_pb2.Model
    model: Model
    estimates: TargetEstimates = field(default_factory=TargetEstimates)


@dataclass(eq=False)
class _Place:
    """An address that the bridge was told of, and the service there, once it is taken in.

    `problem`: why it is not. `refused`: what the service says of itself, if that much is known of one that is of no
    use. `logged`: kinds of errors that the log has about it. `tried`: set after the first try to take it in.
    """

    address: str
    role: model_pb2.Role.ValueType
    channel: aio.Channel
    endpoint: Endpoint | None = None
    problem: str = "it has not answered yet"
    refused: model_pb2.Model | None = None
    logged: set[type[Exception]] = field(default_factory=set)
    log_lines: int = 0
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    pause_seconds: float = _RETRY_SECONDS
    task: "asyncio.Task[None] | None" = None


class Zoo:
    """Connects to model services and finds models by name."""

    def __init__(self, targets: Sequence[str], drafts: Sequence[str], timeout: float = 10.0) -> None:
        self._addresses = [(address, model_pb2.ROLE_TARGET) for address in targets]
        self._addresses += [(address, model_pb2.ROLE_DRAFT) for address in drafts]
        self._timeout = timeout
        self._vocabularies: LRUCache[str, tuple[Vocabulary, str]] = LRUCache(_TOKENIZERS)
        self._sandbox = TemplateSandbox()
        self._reading = asyncio.Lock()
        self._places: list[_Place] = []

    async def connect(self) -> "Zoo":
        """Itself, when every target has said who it is, and every draft that answers has been taken in or refused.

        Raises `Unreachable`, `RoleNotServed`, ... for a target. A draft that is away or of no use is logged and asked
        again in the background.
        """
        for address, role in self._addresses:
            self._places.append(_Place(address, role, open_channel(address)))
        for place in self._of(model_pb2.ROLE_TARGET):
            place.endpoint = await self._take_in(place, await self._describe(place, self._timeout, wait=True))
        drafts = self._of(model_pb2.ROLE_DRAFT)
        for place in drafts:
            self._await(place)
        first_tries = [asyncio.create_task(place.tried.wait()) for place in drafts]
        try:
            if first_tries:
                await asyncio.wait(first_tries, timeout=self._timeout + _START_SECONDS)
        finally:
            for task in first_tries:
                task.cancel()
        return self

    async def close(self) -> None:
        """Stops asking for drafts, closes the channels, and ends the processes of the sandbox."""
        tasks = [place.task for place in self._places if place.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in self._places:
            await place.channel.close()
        await asyncio.to_thread(self._sandbox.close)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The services that are taken in: targets first, and else in the order in which the bridge was told of them."""
        return [place.endpoint for place in self._places if place.endpoint]

    def target(self, name: str) -> Endpoint:
        """The target of that name, or the first if the name is empty. Raises `ModelNotFound`."""
        return self._find(name, model_pb2.ROLE_TARGET)

    def draft(self, name: str) -> Endpoint | None:
        """The draft of that name; if the name is empty, the first, or None if none is there.

        Raises `ModelNotFound`, or `DraftAway` if the bridge waits for a draft that may have this name.
        """
        if not name and not self.of_role(model_pb2.ROLE_DRAFT):
            return None
        try:
            return self._find(name, model_pb2.ROLE_DRAFT)
        except ModelNotFound:
            # A draft that never answered may have any name.
            for place in self._of(model_pb2.ROLE_DRAFT):
                if not place.endpoint and (place.refused is None or place.refused.name == name):
                    raise DraftAway(name, place.address, place.problem) from None
            raise

    @property
    def note_on_drafts(self) -> str:
        """Why requests go on without a draft, in words; empty if one is there, or if the bridge was told of none."""
        drafts = self._of(model_pb2.ROLE_DRAFT)
        if not drafts or self.of_role(model_pb2.ROLE_DRAFT):
            return ""
        addresses = ", ".join(place.address for place in drafts)
        return f"the draft at {addresses} is not there; the target went on alone"

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

    async def check(self) -> list[bridge_pb2.Endpoint]:
        """All services that the bridge was told of, and what is wrong with each right now. They are asked at once."""

        async def checked(place: _Place) -> bridge_pb2.Endpoint:
            problem = await self._check(place, place.endpoint) if place.endpoint else place.problem
            return bridge_pb2.Endpoint(address=place.address, role=place.role, reachable=not problem, problem=problem)

        return await asyncio.gather(*(checked(place) for place in self._places))

    def on_draft_error(self, endpoint: Endpoint, error: DraftBridgeError) -> None:
        """Takes note that a stream to a draft failed. If there is another model now, that one is taken in instead."""
        for place in self._places:
            if place.endpoint is endpoint and error.reason in _CHANGED:
                place.problem = f"{endpoint.model.name} was replaced by another model, which is being read"
                self._await(place)

    def _of(self, role: model_pb2.Role.ValueType) -> list[_Place]:
        return [place for place in self._places if place.role == role]

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

    def _await(self, place: _Place) -> None:
        """Asks for a draft in the background until it is taken in; requests go on without it meanwhile."""
        place.endpoint = place.refused = None
        place.task = asyncio.create_task(self._ask_for(place))

    async def _ask_for(self, place: _Place) -> None:
        while not place.endpoint:
            try:
                await self._try(place)
            except Exception as error:  # whatever it is, it costs the draft only
                self._leave_out(place, error)
            place.tried.set()
            if not place.endpoint:
                await asyncio.sleep(place.pause_seconds)

    async def _try(self, place: _Place) -> None:
        """Takes a draft in. One that was refused is not read again before it changes, or goes away and comes back."""
        place.pause_seconds = _RETRY_SECONDS
        try:
            # The first time it is there or not; later it is waited for, so that it is noticed as soon as it comes.
            description = await self._describe(place, self._timeout, wait=place.tried.is_set())
        except Exception:
            place.refused = None
            raise
        if description == place.refused:
            return
        started = perf_counter()
        try:
            place.endpoint = await self._take_in(place, description)
            for target in self.of_role(model_pb2.ROLE_TARGET):  # it may compute elsewhere now, or be another model
                target.estimates.drafts.pop(place.endpoint.model.name, None)
        except Exception as error:
            lost = isinstance(error, Unreachable | RemoteError)
            place.refused = None if lost else description
            # A tokenizer that takes long to be refused must not keep the bridge busy.
            place.pause_seconds = max(perf_counter() - started, _RETRY_SECONDS)
            raise
        if place.logged:
            self._log(place, f"the draft at {place.address} can be used now: it is {place.endpoint.model.name}")

    async def _describe(self, place: _Place, seconds: float, wait: bool = False) -> model_pb2.Model:
        """What a service says of itself, within so many seconds. `wait`: even if nobody is there at first."""
        stub = model_pb2_grpc.ModelServiceStub(place.channel)
        try:
            answer = await stub.GetModel(model_pb2.GetModelRequest(), wait_for_ready=wait, timeout=seconds)
        except aio.AioRpcError as error:
            raise from_rpc_error(error, place.address) from error
        return _parsed(answer, place.address).model

    async def _take_in(self, place: _Place, description: model_pb2.Model) -> Endpoint:
        """The service at a place, ready to be used. Raises `RoleNotServed`, `UnusableModel`, ..."""
        name = description.name
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise UnusableModel(
                f"the model at {place.address} has a name of {len(name)} characters: serve it under one of 1 to "
                f"{_MAX_NAME_LENGTH} printable characters, with --name"
            )
        if description.role not in (place.role, model_pb2.ROLE_BOTH):
            raise RoleNotServed(place.address, name, _ROLES[place.role])
        stub = model_pb2_grpc.ModelServiceStub(place.channel)
        try:
            vocabulary, flaw = await self._vocabulary(stub, description, place.address)
        except aio.AioRpcError as error:
            raise from_rpc_error(error, place.address) from error
        if flaw and place.role == model_pb2.ROLE_TARGET:
            raise TokenizerNotUnderstood(
                f"{name} at {place.address} can be a draft but no target: a target's text must be its tokens' bytes in "
                f"a row, and {flaw}",
                component="decoder",
                model=name,
            )
        model = replace(codec.read_model(description, vocabulary), run_template=self._sandbox)
        estimates = TargetEstimates(model.forward_costs)
        return Endpoint(place.address, place.role, place.channel, description, model, estimates)

    async def _vocabulary(
        self, stub: "model_pb2_grpc.ModelServiceAsyncStub", description: model_pb2.Model, address: str
    ) -> tuple[Vocabulary, str]:
        """The model's tokenizer, fetched and tried once for each checksum, and what keeps it from being a target's."""
        sha256 = description.tokenizer_sha256
        if sha256 not in self._vocabularies:
            data, said = bytearray(), ""
            async for piece in stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=60):
                data += _parsed(piece, address).chunk
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
            async with self._reading:  # services that share a tokenizer may come at the same time
                if sha256 not in self._vocabularies:
                    self._vocabularies[sha256] = await self._understood(bytes(data), description, address)
        return self._vocabularies[sha256]

    @staticmethod
    async def _understood(data: bytes, description: model_pb2.Model, address: str) -> tuple[Vocabulary, str]:
        try:
            flaw = await flaw_of(data)
            vocabulary = await asyncio.to_thread(Vocabulary, data)
        except TokenizerNotUnderstood as error:
            raise TokenizerNotUnderstood(
                f"{description.name} at {address}: {error}", **(error.metadata | {"model": description.name})
            ) from error
        return vocabulary, flaw

    async def _check(self, place: _Place, endpoint: Endpoint) -> str:
        """What is wrong with a service right now; empty if nothing."""
        known = endpoint.description
        try:
            model = await self._describe(place, _CHECK_SECONDS)
        except DraftBridgeError as error:
            return str(error)
        if (model.name, model.tokenizer_sha256) != (known.name, known.tokenizer_sha256):
            is_draft = place.role == model_pb2.ROLE_DRAFT
            remedy = "the next request that uses it makes the bridge read it" if is_draft else "restart the bridge"
            return f"{known.name} at {place.address} was replaced by another model or tokenizer: {remedy}"
        return ""

    def _leave_out(self, place: _Place, error: Exception) -> None:
        ours = isinstance(error, DraftBridgeError)
        place.problem = str(error) if ours else "an internal error occurred; the bridge's log has it whole"
        if type(error) not in place.logged:
            text = f"requests go on without the draft at {place.address} until it can be used: {place.problem}"
            self._log(place, text, None if ours else error)
            place.logged.add(type(error))

    @staticmethod
    def _log(place: _Place, text: str, error: Exception | None = None) -> None:
        place.log_lines += 1
        if place.log_lines <= _MAX_LOG_LINES:
            _log.warning(text, exc_info=error)


def _parsed(answer: T | None, address: str) -> T:
    """An answer, for which gRPC gives None if it could not be parsed."""
    if answer is None:
        raise Unreachable(address, "its answer is no message of the contract")
    return answer


def open_channel(address: str) -> aio.Channel:
    """A channel with the settings that streams of small messages want."""
    if ":" not in address:
        raise Unreachable(address, "an address is HOST:PORT")
    options: list[tuple[str, int]] = [
        # Messages are small but for tokenizers and prompts.
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
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
