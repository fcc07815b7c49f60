"""Reads a model service's description and its tokenizer, which is fetched once for each checksum."""

import asyncio
import hashlib
import re
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import TypeVar

import grpc
from cachetools import LRUCache
from grpc import aio

from bridge.errors import TokenizerNotUnderstood, Unreachable, UnusableModel
from bridge.planning.estimates import TargetEstimates
from bridge.text.models import Model
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.bridge import tested_tokenizers
from services.config_values import MAX_NAME_LENGTH
from services.errors import ChecksumMismatch, RoleNotServed, SlowDownload
from services.rpc import codec
from services.rpc.status import from_rpc_error
from services.sandbox.templates import TemplateSandbox
from services.sandbox.tokenizers import find_flaw

T = TypeVar("T")

ROLES = {model_pb2.ROLE_DRAFT: "draft", model_pb2.ROLE_TARGET: "target"}
# How long a description that is needed at once may take: for `GetStatus`, and for a reason why a service is away.
CHECK_SECONDS = 2.0
# For comparison, a tokenizer.json with 256,000 ids has 33 MB.
_TOKENIZER_LIMIT_BYTES, _MAX_TOKENIZER_PIECES = 256 << 20, 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
# How long one piece of a tokenizer may take, and all of them. Our servers send pieces of 256 KiB.
_PIECE_SECONDS, _DOWNLOAD_SECONDS = 60.0, 1800.0
# Tokenizers to keep, so that a model that returns is connected at once. Models in use keep their own.
_MAX_TOKENIZERS = 32
# Chat templates of engines whose processes are kept.
_MAX_GUEST_TEMPLATES = 8
# No tokenizer has more ids; logits of more columns would exhaust the memory of every process.
_MAX_VOCABULARY_SIZE = 1 << 24
# The most items of each list of a description, and characters of each text: requests and tokens take time for each.
_MAX_COSTS, _MAX_END_IDS, _MAX_COMPUTE_UNITS, _MAX_CHARACTERS = 64, 1024, 4096, 256


@dataclass(frozen=True)
class Endpoint:
    """A connected model service, in the role that the bridge uses it in. `estimates`: measured costs of a target."""

    address: str
    role: model_pb2.Role.ValueType
    channel: aio.Channel
    description: model_pb2.Model
    model: Model
    estimates: TargetEstimates = field(default_factory=TargetEstimates)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Returns what replicas have in common: name, revision and tokenizer."""
        return self.model.name, self.description.revision, self.model.vocabulary.sha256


class ModelReader:
    """Reads models from their services."""

    def __init__(self) -> None:
        self._vocabularies: LRUCache[str, tuple[Vocabulary, str]] = LRUCache(_MAX_TOKENIZERS)
        self._sandbox = TemplateSandbox()
        # Apart, so that templates that engines name cannot hold up those of services.
        self._guest_sandbox = TemplateSandbox(max_templates=_MAX_GUEST_TEMPLATES)
        self._reading = asyncio.Lock()

    async def close(self) -> None:
        """Ends the processes of the sandbox."""
        for sandbox in (self._sandbox, self._guest_sandbox):
            await asyncio.to_thread(sandbox.close)

    async def describe(
        self, channel: aio.Channel, address: str, seconds: float, *, wait: bool = False
    ) -> tuple[model_pb2.Model, int]:
        """Returns a service's description, and the nanoseconds that the call took. `seconds`: the time limit.

        `wait`: also waits for a service that is not there yet. Raises `Unreachable` and the service's own errors.
        """
        stub, started = model_pb2_grpc.ModelServiceStub(channel), perf_counter_ns()
        try:
            answer = await stub.GetModel(model_pb2.GetModelRequest(), wait_for_ready=wait, timeout=seconds)
        except aio.AioRpcError as error:
            if wait and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                # Without waiting, gRPC reports the reason.
                return await self.describe(channel, address, CHECK_SECONDS)
            raise from_rpc_error(error, address) from error
        return _parsed(answer, address).model, perf_counter_ns() - started

    async def endpoint(
        self, channel: aio.Channel, address: str, role: model_pb2.Role.ValueType, description: model_pb2.Model
    ) -> Endpoint:
        """Returns a described service as an endpoint. Raises `RoleNotServed`, `UnusableModel`, ..."""
        name = description.name
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise UnusableModel(
                f"the model at {address} has an invalid name of {len(name)} characters: use --name to serve it "
                f"under 1 to {MAX_NAME_LENGTH} printable characters"
            )
        if description.role not in (role, model_pb2.ROLE_BOTH):
            raise RoleNotServed(address, name, ROLES[role])
        if not _SHA256.fullmatch(description.tokenizer_sha256):
            raise UnusableModel(
                f"{name} at {address} describes its tokenizer by something else than a SHA-256 of 64 hexadecimal "
                "digits in lower case: serve it with a server that follows the contract"
            )
        try:
            vocabulary, flaw = await self._vocabulary(model_pb2_grpc.ModelServiceStub(channel), description, address)
        except aio.AioRpcError as error:
            raise from_rpc_error(error, address) from error
        _check_vocabulary(description, vocabulary, address)
        if flaw and role == model_pb2.ROLE_TARGET:
            raise TokenizerNotUnderstood(
                f"{name} at {address} can be a draft but not a target: a target's text must be its tokens' "
                f"bytes, concatenated, and {flaw}",
                component="decoder",
                model=name,
            )
        model = self.model(description, vocabulary)
        return Endpoint(address, role, channel, description, model, TargetEstimates(model.forward_costs))

    def model(self, description: model_pb2.Model, vocabulary: Vocabulary) -> Model:
        """Returns a described model, which runs its chat template in the sandbox."""
        return replace(codec.read_model(description, vocabulary), run_template=self._sandbox)

    def guest_model(self, description: model_pb2.Model, vocabulary: Vocabulary) -> Model:
        """Returns the model that an engine describes."""
        return replace(codec.read_model(description, vocabulary), run_template=self._guest_sandbox)

    def vocabulary(self, sha256: str) -> Vocabulary | None:
        """Returns the tokenizer with this checksum, if it is known."""
        return self._vocabularies.get(sha256, (None, ""))[0]

    async def _vocabulary(
        self, stub: "model_pb2_grpc.ModelServiceAsyncStub", description: model_pb2.Model, address: str
    ) -> tuple[Vocabulary, str]:
        """Returns the model's tokenizer and why it cannot be a target's, or "". Fetches each checksum once."""
        sha256 = description.tokenizer_sha256
        if (found := self._vocabularies.get(sha256)) is None:
            data, announced = await _download(stub, address)
            got = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
            if not got == announced == sha256:
                raise ChecksumMismatch(
                    f"the tokenizer from {address} has SHA-256 {got}, not {sha256} as announced: restart that server",
                    expected=sha256,
                    got=got,
                )
            is_large = len(data) >= tested_tokenizers.LARGE_BYTES
            known = await asyncio.to_thread(tested_tokenizers.known_flaw, sha256) if is_large else None
            async with self._reading:  # another service with the same tokenizer may be connecting at the same time
                is_new = (found := self._vocabularies.get(sha256)) is None
                if found is None:
                    found = await self.read_tokenizer(bytes(data), description, address, known)
                    self._vocabularies[sha256] = found
            if is_new and is_large and known is None:  # after the lock, because a disk may hang
                await asyncio.to_thread(tested_tokenizers.remember, sha256, found[1])
        return found

    @staticmethod
    async def read_tokenizer(
        data: bytes, description: model_pb2.Model, address: str, known_flaw: str | None = None
    ) -> tuple[Vocabulary, str]:
        """Returns a tokenizer and why it cannot be a target's, or "".

        Tests it in a process of its own first; `known_flaw`: what that returned earlier, None if it is not known.
        Raises `TokenizerNotUnderstood`, and `SandboxBusy` if the process was ended by the system, or got too little
        processor time.
        """
        try:
            flaw = await find_flaw(data) if known_flaw is None else known_flaw
            vocabulary = await asyncio.to_thread(Vocabulary, data)
        except TokenizerNotUnderstood as error:
            raise TokenizerNotUnderstood(
                f"{description.name} at {address}: {error}", **(error.metadata | {"model": description.name})
            ) from error
        return vocabulary, flaw


async def _download(stub: "model_pb2_grpc.ModelServiceAsyncStub", address: str) -> tuple[bytearray, str]:
    """Returns the bytes of a service's tokenizer, and the checksum that it announces for them.

    The whole may take long on a slow network, but not each piece. Raises `ChecksumMismatch` or `SlowDownload`.
    """
    data, announced, count, now = bytearray(), "", 0, asyncio.get_running_loop().time
    deadline = now() + _DOWNLOAD_SECONDS
    try:
        async with asyncio.timeout(_PIECE_SECONDS) as limit:
            async for piece in stub.GetTokenizer(model_pb2.GetTokenizerRequest()):
                limit.reschedule(min(now() + _PIECE_SECONDS, deadline))
                data += _parsed(piece, address).chunk
                announced, count = piece.sha256, count + 1
                if len(data) > _TOKENIZER_LIMIT_BYTES or count > _MAX_TOKENIZER_PIECES:
                    raise ChecksumMismatch(
                        f"{address} sends a tokenizer of more than {_TOKENIZER_LIMIT_BYTES} bytes or "
                        f"{_MAX_TOKENIZER_PIECES} pieces"
                    )
    except TimeoutError:
        raise SlowDownload(address, f"after {len(data)} bytes the next ones did not come in time") from None
    return data, announced


def excess_of(description: model_pb2.Model) -> tuple[str, int, int] | None:
    """Returns a field that is longer than that of any model, the most that it may have, and what it has; or None."""
    lengths = [
        ("forward_costs", _MAX_COSTS, len(description.forward_costs)),
        ("special_ids.eos", _MAX_END_IDS, len(description.special_ids.eos)),
        ("compute_units", _MAX_COMPUTE_UNITS, len(description.compute_units)),
    ]
    texts = ("revision", "engine", "device", "dtype")
    lengths += [(name, _MAX_CHARACTERS, len(getattr(description, name))) for name in texts]
    return next((one for one in lengths if one[2] > one[1]), None)


def _check_vocabulary(description: model_pb2.Model, vocabulary: Vocabulary, address: str) -> None:
    """Raises `UnusableModel` for a description that cannot be true of a model with this tokenizer."""
    size, ids = description.vocabulary_size, description.special_ids
    special = [*ids.eos, *([ids.bos] if ids.HasField("bos") else ()), *([ids.pad] if ids.HasField("pad") else ())]
    if not 0 < size <= _MAX_VOCABULARY_SIZE:
        problem = f"a vocabulary of {size} ids"
    elif wrong := [id_ for id_ in special if id_ >= max(size, vocabulary.size)]:
        problem = f"the special id {wrong[0]} and a vocabulary of {size} ids"
    elif description.context_length < 2:
        problem = f"a context of {description.context_length} tokens"
    elif excess := excess_of(description):
        problem = f"a {excess[0]} of length {excess[2]}, where {excess[1]} is the most"
    else:
        return
    raise UnusableModel(
        f"{description.name} at {address} reports {problem}, which cannot be true: serve its own tokenizer and "
        "configuration with the weights"
    )


def _parsed(answer: T | None, address: str) -> T:
    """Returns the answer. Raises `Unreachable` if it is None, which gRPC returns for an answer that it cannot parse."""
    if answer is None:
        raise Unreachable(address, "its answer is not a message of the contract")
    return answer


def key_of(endpoint: Endpoint) -> str:
    """Identifies a model by everything that its speed and text depend on."""
    one = endpoint.description
    return "|".join((one.name, one.revision, one.engine, one.device, one.dtype, one.tokenizer_sha256[:12]))
