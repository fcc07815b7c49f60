"""BridgeService: converts between protobuf messages and the gateway's requests and events."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import islice
from time import perf_counter_ns
from typing import Any

from grpc import aio

from bridge.errors import DraftBridgeError, EmptyPrompt, InvalidField, TokenOutOfRange, require
from bridge.generation import Delta, Finished
from bridge.planning.planner import SpeculationParameters
from bridge.request import MAX_STOP_STRINGS, Request, check_tenant
from bridge.text.chat import Chat
from bridge.text.models import Model
from bridge.text.translation import segment, translate
from bridge.threads import run, threads_for
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.bridge.backend import Opened
from services.bridge.gateway import Gateway, Running, check_bytes
from services.bridge.listing import write_pair, write_service
from services.bridge.pairing import Wish
from services.logs import request_id
from services.rpc import codec
from services.rpc.gate import CALLER
from services.version import VERSION

# Generations in progress that `GetStatus` lists.
_MAX_RUNNING = 100
# Requests are converted in a thread. One message may hold millions of values; these counts are checked before.
_MAX_MESSAGES, _MAX_CHOICES, _MAX_NAMES = 1 << 16, 1 << 16, 64
# The most tokens of each model in a translation: gRPC writes the answer in the event loop, and a text has millions.
_MAX_SPANS = 1 << 18
# The ids of a list while no model is known, whose request fails for that reason.
_MAX_IDS = 1 << 16


class BridgeServicer(bridge_pb2_grpc.BridgeServiceServicer):
    """Serves the gateway over gRPC, which prescribes the names of the methods."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._zoo = gateway, gateway.zoo
        self._totals = bridge_pb2.SpeculationStatistics()
        self._generated_token_count = 0
        gateway.observers.append(self._add)

    def _add(self, event: Finished) -> None:
        codec.add_statistics(self._totals, codec.write_finished(event).speculation)
        self._generated_token_count += event.generated_token_count

    async def Generate(  # noqa: N802
        self, request: bridge_pb2.GenerateRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[bridge_pb2.GenerateResponse]:
        """See the contract."""
        try:
            converted = await self._read(request)
            wish = Wish.of(request.draft, request.drafts, request.workload)
        except DraftBridgeError as error:
            self._gateway.refuse(error)
        events = self._gateway.generate(converted, request.target, wish=wish)
        async with aclosing(events):
            async for event in events:
                match event:
                    case Opened():
                        started = bridge_pb2.GenerateStarted(**vars(event), request_id=request_id.get())
                        yield bridge_pb2.GenerateResponse(started=started)
                    case Delta():
                        yield bridge_pb2.GenerateResponse(delta=codec.write_delta(event))
                    case Finished():
                        yield bridge_pb2.GenerateResponse(finished=codec.write_finished(event))

    async def _read(self, request: bridge_pb2.GenerateRequest) -> Request:
        known = [one.known.model for one in self._zoo.connections if one.known]  # also of services that are away
        vocabulary_size = max((one.vocabulary_size for one in known), default=_MAX_IDS)
        _check_counts(request, self._gateway.prompt_limit_bytes, vocabulary_size)
        return await run(threads_for(request.ByteSize()), _read_request, request)

    async def GetStatus(  # noqa: N802
        self, request: bridge_pb2.GetStatusRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.GetStatusResponse:
        """See the contract."""
        endpoints, counts = await self._zoo.check(), self._gateway.counts
        now = perf_counter_ns()
        return bridge_pb2.GetStatusResponse(
            version=VERSION,
            uptime_ns=now - self._gateway.started_ns,
            active_count=counts.active,
            finished_count=counts.finished,
            failed_count=counts.failed + counts.refused,
            refused_count=counts.refused,
            cancelled_count=counts.cancelled,
            endpoints=endpoints,
            speculation=self._totals,
            prefix_caches=[codec.write_prefix_cache(vocabulary) for vocabulary in self._zoo.vocabularies()],
            ngram_memory=codec.write_ngram_memory(self._gateway.memory),
            generated_token_count=self._generated_token_count,
            running=[_write_running(one, now) for one in islice(self._gateway.running, _MAX_RUNNING)],
        )

    async def ListModels(  # noqa: N802
        self, request: bridge_pb2.ListModelsRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.ListModelsResponse:
        """See the contract."""
        by_address = {endpoint.address: endpoint.description for endpoint in self._zoo.endpoints}
        services = [write_service(one, self._zoo.conflict(one)) for one in self._zoo.connections]
        return bridge_pb2.ListModelsResponse(models=by_address.values(), services=services)

    async def ListPairs(  # noqa: N802
        self, request: bridge_pb2.ListPairsRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.ListPairsResponse:
        """See the contract."""
        pairing = self._gateway.pairing
        await pairing.compare_vocabularies()
        answer = bridge_pb2.ListPairsResponse()
        for one in pairing.states(request.workload):
            answer.pairs.append(write_pair(one))
            await asyncio.sleep(0)
        return answer

    async def Translate(  # noqa: N802
        self, request: bridge_pb2.TranslateRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.TranslateResponse:
        """See the contract."""
        source, target = self._zoo.model(request.source), self._zoo.model(request.target)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidField("input", "a text or token ids", "neither")
        size = len(request.text.encode()) if kind == "text" else 4 * len(request.token_ids.token_ids)
        limit = self._gateway.prompt_limit_bytes
        check_bytes(kind, size, limit)
        return await run(threads_for(size), _translated, request, source, target, limit)


def _write_running(running: Running, now_ns: int) -> bridge_pb2.RunningGeneration:
    speculation = codec.write_statistics(running.statistics)
    speculation.ClearField("note")  # it may quote the chat of another client, by the words of a draft's template
    return bridge_pb2.RunningGeneration(
        target=running.target,
        draft=running.draft,
        elapsed_ns=now_ns - running.started_ns,
        generated_token_count=running.metrics.generated_token_count,
        speculation=speculation,
    )


def _translated(
    request: bridge_pb2.TranslateRequest, source: Model, target: Model, limit_bytes: int
) -> bridge_pb2.TranslateResponse:
    """Returns the text or the ids in the tokens of both models. Raises `TokenOutOfRange` or `InvalidField`."""
    if request.HasField("text"):
        source_ids, target_ids = (_segmented(request.text, one) for one in (source, target))
    else:
        source_ids, spelled = list(request.token_ids.token_ids), source.vocabulary.token_bytes
        for id_ in source_ids:
            if id_ >= source.vocabulary.size or id_ in source.vocabulary.missing:
                raise TokenOutOfRange(id_, source.vocabulary.size, source.name)
        check_bytes("token_ids", sum(len(spelled(id_)) for id_ in source_ids), limit_bytes)
        _check_spans("token_ids", len(source_ids), source)
        target_ids = translate(source_ids, source, target)
        _check_spans("token_ids", len(target_ids), target)
    return codec.write_translation(source.vocabulary, source_ids, target.vocabulary, target_ids)


def _segmented(text: str, model: Model) -> list[int]:
    _check_spans("text", model.vocabulary.min_count(text, None, _MAX_SPANS + 1), model)
    ids = segment(model.vocabulary, text.encode())
    _check_spans("text", len(ids), model)
    return ids


def _check_spans(field: str, count: int, model: Model) -> None:
    allowed = f"at most {_MAX_SPANS} tokens of {model.name}"
    require(count <= _MAX_SPANS, InvalidField, field, allowed, f"at least {count}")


def _check_counts(message: bridge_pb2.GenerateRequest, prompt_limit_bytes: int, vocabulary_size: int) -> None:
    """Raises `InvalidField` for a request that would take long to convert: that would hold up all others."""
    sampling = message.sampling
    size = message.chat.ByteSize() if message.HasField("chat") else 4 * len(message.token_ids.token_ids)
    check_bytes("the prompt", size, prompt_limit_bytes)
    for field, values, limit, what in (
        ("chat.messages", message.chat.messages, _MAX_MESSAGES, "messages"),
        ("stop", message.stop, MAX_STOP_STRINGS, "strings"),
        ("drafts", message.drafts, _MAX_NAMES, "names"),
        ("speculation.sources", message.speculation.sources, _MAX_NAMES, "names"),
        ("sampling.logit_bias", sampling.logit_bias, vocabulary_size, "ids"),
        ("sampling.stop_token_ids", sampling.stop_token_ids, vocabulary_size, "ids"),
        ("sampling.choice", sampling.choice.texts, _MAX_CHOICES, "texts"),
    ):
        if len(values) > limit:
            raise InvalidField(field, f"at most {limit} {what}", f"{len(values)} {what}")


def _read_request(message: bridge_pb2.GenerateRequest) -> Request:
    input_: str | Chat | tuple[int, ...]
    match message.WhichOneof("input"):
        case "prompt":
            input_ = message.prompt
        case "chat":
            input_ = codec.read_chat(message.chat)
        case "token_ids":
            input_ = tuple(message.token_ids.token_ids)
        case _:
            raise EmptyPrompt
    check_tenant(message.tenant, int("/" in message.tenant))  # an HTTP door puts its own client's key before it
    speculation = message.speculation
    assistant_tokens = speculation.num_assistant_tokens if speculation.HasField("num_assistant_tokens") else None
    return Request(
        input=input_,
        sampling=codec.read_sampling(message.sampling),
        seed=message.sampling.seed if message.sampling.HasField("seed") else secrets.randbits(64),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        speculation=SpeculationParameters(
            mode=codec.read_mode(speculation.mode),
            num_assistant_tokens=assistant_tokens,
            assistant_confidence_threshold=speculation.assistant_confidence_threshold,
            draft_temperature=speculation.draft_temperature if speculation.HasField("draft_temperature") else None,
            sources=tuple(speculation.sources),
        ),
        reports_progress=message.reports_progress,
        # A key cannot name the tenants of another key.
        tenant=f"{CALLER.get()}/{message.tenant}" if CALLER.get() and message.tenant else message.tenant,
    )
