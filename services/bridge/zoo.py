"""The zoo: connections to all model services of a bridge, their models and tokenizers.

A bridge does not start without its targets. A draft that is unreachable or unusable is retried in the background.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextvars import Context
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
from draftbridge.security import Credentials
from draftbridge.v1 import bridge_pb2, model_pb2, model_pb2_grpc
from services.rpc import codec
from services.rpc.channel import open_channel
from services.rpc.status import RemoteError, from_rpc_error
from services.sandbox.templates import TemplateSandbox
from services.sandbox.tokenizers import find_flaw

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ROLES = {model_pb2.ROLE_DRAFT: "draft", model_pb2.ROLE_TARGET: "target"}
# For comparison, a tokenizer.json with 256,000 ids has 33 MB.
_TOKENIZER_LIMIT_BYTES = 256 << 20
# Tokenizers to keep, so that a model that returns is connected at once. Models in use keep their own.
_MAX_TOKENIZERS = 32
# How long `GetStatus` waits for each service.
_CHECK_SECONDS = 2.0
# At its start, a bridge waits this much longer than `timeout` for drafts: reading tokenizers takes time too.
_START_SECONDS = 20.0
# Minimum time between two tries to connect a draft. gRPC itself reconnects a channel every 0.2 to 2 seconds.
_RETRY_SECONDS = 1.0
_MAX_NAME_LENGTH = 256
# Log lines per draft: a peer that changes all the time must not fill the log.
_MAX_LOG_LINES = 8
# Reasons with which a draft's stream fails if the address serves another model than before.
_CHANGED = (ModelChanged.reason, ModelNotFound.reason)


@dataclass(frozen=True)
class Endpoint:
    """A connected model service, in the role that the bridge uses it in. `estimates`: measured costs of a target."""

    address: str
    role: model_pb2.Role.ValueType
    channel: aio.Channel
    description: model_pb2.Model
    model: Model
    estimates: TargetEstimates = field(default_factory=TargetEstimates)


@dataclass(eq=False)
class _Service:
    """A configured address, with its endpoint once it is connected.

    `problem`: why it is not connected. `refused`: the description of a service that was reached but cannot be used.
    `logged`: types of errors already in the log. `tried`: set after the first try to connect.
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

    def __init__(
        self,
        targets: Sequence[str],
        drafts: Sequence[str],
        timeout: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials
        self._addresses = [(address, model_pb2.ROLE_TARGET) for address in targets]
        self._addresses += [(address, model_pb2.ROLE_DRAFT) for address in drafts]
        self._timeout = timeout
        self._vocabularies: LRUCache[str, tuple[Vocabulary, str]] = LRUCache(_MAX_TOKENIZERS)
        self._sandbox = TemplateSandbox()
        self._reading = asyncio.Lock()
        self._services: list[_Service] = []

    async def connect(self) -> "Zoo":
        """Returns the zoo itself when all services were tried once, up to a time limit, and a target is connected.

        Raises `Unreachable` if no target answers, and `RoleNotServed`, `UnusableModel`, ... for one that cannot be a
        target. Other services that fail are logged and retried in the background.
        """
        for address, role in self._addresses:
            self._services.append(_Service(address, role, open_channel(address, self._credentials)))
        await self._connect_targets()
        drafts = self._of(model_pb2.ROLE_DRAFT)
        for service in drafts:
            self._connect_in_background(service)
        first_tries = [asyncio.create_task(service.tried.wait()) for service in drafts]
        try:
            if first_tries:
                await asyncio.wait(first_tries, timeout=self._timeout + _START_SECONDS)
        finally:
            for task in first_tries:
                task.cancel()
        return self

    async def _connect_targets(self) -> None:
        async def connect(service: _Service) -> None:
            service.endpoint = await self._take_in(service, await self._describe(service, self._timeout, wait=True))

        targets = self._of(model_pb2.ROLE_TARGET)
        results = await asyncio.gather(*map(connect, targets), return_exceptions=True)
        failed = [(one, error) for one, error in zip(targets, results, strict=True) if error]
        for service, error in failed:
            away = isinstance(error, Unreachable)
            if not (away and isinstance(error, Exception) and self.of_role(model_pb2.ROLE_TARGET)):
                raise error
            self._on_failed_try(service, error)
            service.tried.set()
            self._connect_in_background(service)

    async def close(self) -> None:
        """Stops connecting services, closes the channels, and ends the processes of the sandbox."""
        tasks = [service.task for service in self._services if service.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for service in self._services:
            await service.channel.close()
        await asyncio.to_thread(self._sandbox.close)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The connected services: targets, then drafts, each in the order of the configuration."""
        return [service.endpoint for service in self._services if service.endpoint]

    def target(self, name: str) -> Endpoint:
        """Returns the target with this name, or the first one if the name is empty. Raises `ModelNotFound`."""
        return self._find(name, model_pb2.ROLE_TARGET)

    def draft(self, name: str) -> Endpoint | None:
        """Returns the draft with this name. If the name is empty: the first draft, or None if no draft is connected.

        Raises `ModelNotFound`, or `DraftAway` if a configured draft that is not connected may have this name.
        """
        if not name and not self.of_role(model_pb2.ROLE_DRAFT):
            return None
        try:
            return self._find(name, model_pb2.ROLE_DRAFT)
        except ModelNotFound:
            # A draft that has never answered may have any name.
            for service in self._of(model_pb2.ROLE_DRAFT):
                if not service.endpoint and (service.refused is None or service.refused.name == name):
                    raise DraftAway(name, service.address, service.problem) from None
            raise

    @property
    def note_on_drafts(self) -> str:
        """Explains why requests run without a draft. Empty if a draft is connected, or if no draft is configured."""
        drafts = self._of(model_pb2.ROLE_DRAFT)
        if not drafts or self.of_role(model_pb2.ROLE_DRAFT):
            return ""
        addresses = ", ".join(service.address for service in drafts)
        return f"no draft is connected (configured: {addresses}); the target decoded alone"

    def model(self, name: str) -> Model:
        """Returns the first model with this name, of either role. Raises `ModelNotFound`."""
        for endpoint in self.endpoints:
            if endpoint.model.name == name:
                return endpoint.model
        raise self._unknown(name, "model", self.endpoints)

    def of_role(self, role: model_pb2.Role.ValueType) -> list[Endpoint]:
        """Returns the connected services of a role."""
        return [endpoint for endpoint in self.endpoints if endpoint.role == role]

    def vocabulary(self, sha256: str) -> Vocabulary | None:
        """Returns the tokenizer with this checksum, if it is known."""
        return self._vocabularies.get(sha256, (None, ""))[0]

    async def learn_vocabulary(self, data: bytes, description: model_pb2.Model) -> Vocabulary:
        """Returns the tokenizer that an engine has sent. Raises `ChecksumMismatch` or `TokenizerNotUnderstood`."""
        if (got := hashlib.sha256(data).hexdigest()) != description.tokenizer_sha256:
            raise ChecksumMismatch(
                f"the engine sent a tokenizer with SHA-256 {got} and named {description.tokenizer_sha256}: send the "
                "file that it uses, and name that",
                expected=description.tokenizer_sha256,
                got=got,
            )
        async with self._reading:
            self._vocabularies[got] = await self._read_tokenizer(data, description, "the engine")
        return self._vocabularies[got][0]

    def read_model(self, description: model_pb2.Model, vocabulary: Vocabulary) -> Model:
        """Returns a described model, which runs its chat template in the zoo's sandbox."""
        return replace(codec.read_model(description, vocabulary), run_template=self._sandbox)

    def vocabularies(self) -> list[Vocabulary]:
        """Returns the tokenizers in use, each once."""
        return list(
            {endpoint.model.vocabulary.sha256: endpoint.model.vocabulary for endpoint in self.endpoints}.values()
        )

    def connected(self) -> list[tuple[str, str, bool]]:
        """Returns the address and the role of each configured service, and whether it is connected."""
        return [(one.address, _ROLES[one.role], one.endpoint is not None) for one in self._services]

    async def check(self) -> list[bridge_pb2.Endpoint]:
        """Checks all configured services concurrently, and returns for each what is wrong with it now, if anything."""

        async def checked(one: _Service) -> bridge_pb2.Endpoint:
            problem = await self._check(one, one.endpoint) if one.endpoint else one.problem
            return bridge_pb2.Endpoint(address=one.address, role=one.role, reachable=not problem, problem=problem)

        return await asyncio.gather(*map(checked, self._services))

    def replicas(self, target: Endpoint) -> list[Endpoint]:
        """Returns the connected targets that serve the same model with the same tokenizer; at least this one."""
        identity = (target.model.name, target.model.vocabulary.sha256)
        found = [
            one
            for one in self.of_role(model_pb2.ROLE_TARGET)
            if (one.model.name, one.model.vocabulary.sha256) == identity
        ]
        return found or [target]

    def on_error(self, endpoint: Endpoint, error: DraftBridgeError) -> None:
        """Handles the error of a service's stream. If the address serves another model now, connects that instead."""
        for service in self._services:
            if service.endpoint is endpoint and error.reason in _CHANGED:
                service.problem = f"{endpoint.model.name} was replaced by another model, which is being connected"
                self._connect_in_background(service)

    def _of(self, role: model_pb2.Role.ValueType) -> list[_Service]:
        return [service for service in self._services if service.role == role]

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

    def _connect_in_background(self, service: _Service) -> None:
        """Tries to connect a service until that succeeds. Requests run without it meanwhile."""
        service.endpoint = service.refused = None
        # In a context of its own: this may be called in a request, whose id and trace it must not carry.
        service.task = asyncio.create_task(self._keep_trying(service), context=Context())

    async def _keep_trying(self, service: _Service) -> None:
        while not service.endpoint:
            try:
                await self._try(service)
            except Exception as error:  # no error of one service may stop the bridge
                self._on_failed_try(service, error)
            service.tried.set()
            if not service.endpoint:
                await asyncio.sleep(service.pause_seconds)

    async def _try(self, service: _Service) -> None:
        """Connects a service. One that was refused is retried only after it has changed or was unreachable."""
        service.pause_seconds = _RETRY_SECONDS
        try:
            # Only later tries wait for a service that is not there yet: the first one must not delay the start.
            description = await self._describe(service, self._timeout, wait=service.tried.is_set())
        except Exception:
            service.refused = None
            raise
        if description == service.refused:
            return
        started = perf_counter()
        try:
            service.endpoint = await self._take_in(service, description)
            if service.role == model_pb2.ROLE_DRAFT:  # another model or machine makes old estimates wrong
                for target in self.of_role(model_pb2.ROLE_TARGET):
                    target.estimates.drafts.pop(service.endpoint.model.name, None)
        except Exception as error:
            lost = isinstance(error, Unreachable | RemoteError)
            service.refused = None if lost else description
            # If refusing a tokenizer takes long, waiting as long limits the share of time that it costs.
            service.pause_seconds = max(perf_counter() - started, _RETRY_SECONDS)
            raise
        if service.logged:
            self._log(
                service,
                f"the {_ROLES[service.role]} at {service.address} can be used now: it is {service.endpoint.model.name}",
            )

    async def _describe(self, service: _Service, seconds: float, wait: bool = False) -> model_pb2.Model:
        """Gets a service's description within `seconds`. `wait`: also waits for a service that is not there yet."""
        stub = model_pb2_grpc.ModelServiceStub(service.channel)
        try:
            answer = await stub.GetModel(model_pb2.GetModelRequest(), wait_for_ready=wait, timeout=seconds)
        except aio.AioRpcError as error:
            if wait and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return await self._describe(service, _CHECK_SECONDS)  # without waiting, gRPC reports the reason
            raise from_rpc_error(error, service.address) from error
        return _parsed(answer, service.address).model

    async def _take_in(self, service: _Service, description: model_pb2.Model) -> Endpoint:
        """Returns a described service as an endpoint. Raises `RoleNotServed`, `UnusableModel`, ..."""
        name = description.name
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise UnusableModel(
                f"the model at {service.address} has an invalid name of {len(name)} characters: use --name to serve it "
                f"under 1 to {_MAX_NAME_LENGTH} printable characters"
            )
        if description.role not in (service.role, model_pb2.ROLE_BOTH):
            raise RoleNotServed(service.address, name, _ROLES[service.role])
        stub = model_pb2_grpc.ModelServiceStub(service.channel)
        try:
            vocabulary, flaw = await self._vocabulary(stub, description, service.address)
        except aio.AioRpcError as error:
            raise from_rpc_error(error, service.address) from error
        if flaw and service.role == model_pb2.ROLE_TARGET:
            raise TokenizerNotUnderstood(
                f"{name} at {service.address} can be a draft but not a target: a target's text must be its tokens' "
                f"bytes, concatenated, and {flaw}",
                component="decoder",
                model=name,
            )
        model = self.read_model(description, vocabulary)
        estimates = TargetEstimates(model.forward_costs)
        return Endpoint(service.address, service.role, service.channel, description, model, estimates)

    async def _vocabulary(
        self, stub: "model_pb2_grpc.ModelServiceAsyncStub", description: model_pb2.Model, address: str
    ) -> tuple[Vocabulary, str]:
        """Returns the model's tokenizer and why it cannot be a target's, or "". Fetches each checksum once."""
        sha256 = description.tokenizer_sha256
        if sha256 not in self._vocabularies:
            data, announced = bytearray(), ""
            async for piece in stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=60):
                data += _parsed(piece, address).chunk
                announced = piece.sha256
                if len(data) > _TOKENIZER_LIMIT_BYTES:
                    raise ChecksumMismatch(f"{address} sends a tokenizer of more than {_TOKENIZER_LIMIT_BYTES} bytes")
            got = hashlib.sha256(data).hexdigest()
            if not got == announced == sha256:
                raise ChecksumMismatch(
                    f"the tokenizer from {address} has SHA-256 {got}, not {sha256} as announced: restart that server",
                    expected=sha256,
                    got=got,
                )
            async with self._reading:  # another service with the same tokenizer may be connecting at the same time
                if sha256 not in self._vocabularies:
                    self._vocabularies[sha256] = await self._read_tokenizer(bytes(data), description, address)
        return self._vocabularies[sha256]

    @staticmethod
    async def _read_tokenizer(data: bytes, description: model_pb2.Model, address: str) -> tuple[Vocabulary, str]:
        try:
            flaw = await find_flaw(data)
            vocabulary = await asyncio.to_thread(Vocabulary, data)
        except TokenizerNotUnderstood as error:
            raise TokenizerNotUnderstood(
                f"{description.name} at {address}: {error}", **(error.metadata | {"model": description.name})
            ) from error
        return vocabulary, flaw

    async def _check(self, service: _Service, endpoint: Endpoint) -> str:
        """Returns what is wrong with a service now, or ""."""
        known = endpoint.description
        try:
            model = await self._describe(service, _CHECK_SECONDS)
        except DraftBridgeError as error:
            return str(error)
        if (model.name, model.tokenizer_sha256) != (known.name, known.tokenizer_sha256):
            return (
                f"{known.name} at {service.address} was replaced by another model or tokenizer: the next request that "
                "uses it connects the new one"
            )
        return ""

    def _on_failed_try(self, service: _Service, error: Exception) -> None:
        expected = isinstance(error, DraftBridgeError)
        service.problem = str(error) if expected else "an internal error occurred: see the bridge's log"
        if type(error) not in service.logged:
            role = _ROLES[service.role]
            text = f"requests go on without the {role} at {service.address} until it can be used: {service.problem}"
            self._log(service, text, None if expected else error)
            service.logged.add(type(error))

    @staticmethod
    def _log(service: _Service, text: str, error: Exception | None = None) -> None:
        service.log_lines += 1
        if service.log_lines <= _MAX_LOG_LINES:
            _log.warning(text, exc_info=error)


def _parsed(answer: T | None, address: str) -> T:
    """Returns the answer. Raises `Unreachable` if it is None, which gRPC returns for an answer that it cannot parse."""
    if answer is None:
        raise Unreachable(address, "its answer is not a message of the contract")
    return answer
