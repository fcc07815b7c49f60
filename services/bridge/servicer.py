"""BridgeService: requests to `bridge.generation`, its results to responses."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from time import perf_counter_ns
from typing import Any

from grpc import aio

from bridge.errors import DraftBridgeError, EmptyPrompt, InvalidField, TokenOutOfRange
from bridge.generation import Delta, Finished, Started, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Proposal
from bridge.request import Request, check
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.suffix_memory import SuffixMemory
from bridge.text.chat import Chat
from bridge.text.translation import segment, translate
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.bridge.remote import RemoteDrafter, RemoteVerifier
from services.bridge.zoo import Endpoint, Zoo
from services.rpc import codec
from services.version import VERSION


class _ZooDrafter(RemoteDrafter):
    """A draft of the zoo, which learns if another model has taken its place."""

    def __init__(self, zoo: Zoo, endpoint: Endpoint, sampling: SamplingParameters, seed: int) -> None:
        super().__init__(endpoint.channel, endpoint.address, endpoint.model, sampling, seed)
        self._zoo, self._endpoint = zoo, endpoint

    async def proposals(self) -> AsyncIterator[Proposal]:
        """See `Drafter`."""
        try:
            async for proposal in super().proposals():
                yield proposal
        except DraftBridgeError as error:
            self._zoo.on_draft_error(self._endpoint, error)
            raise


class BridgeServicer(bridge_pb2_grpc.BridgeServiceServicer):
    """What applications talk to. gRPC asks for these method names."""

    def __init__(self, zoo: Zoo, memory: SuffixMemory | None = None) -> None:
        self._zoo, self._memory = zoo, memory
        self._started_ns = perf_counter_ns()
        self._totals = bridge_pb2.SpeculationStatistics()
        self._active = self._finished = self._failed = self._cancelled = 0

    async def Generate(  # noqa: N802
        self, request: bridge_pb2.GenerateRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[bridge_pb2.GenerateResponse]:
        """See the contract."""
        self._active += 1
        try:
            async for response in self._generate(request):
                yield response
            self._finished += 1
        except Exception:
            self._failed += 1
            raise
        except BaseException:  # the client has gone
            self._cancelled += 1
            raise
        finally:
            self._active -= 1

    async def _generate(self, message: bridge_pb2.GenerateRequest) -> AsyncIterator[bridge_pb2.GenerateResponse]:
        request = _read_request(message)
        check(request)
        target = self._zoo.target(message.target)
        off = request.speculation.mode is Mode.OFF
        draft = None if off else self._zoo.draft(message.draft)
        note = "" if off or draft else self._zoo.note_on_drafts
        with ExitStack() as stack:
            stack.enter_context(target.estimates.request())
            verifier = stack.enter_context(
                closing(
                    RemoteVerifier(
                        target.channel,
                        target.address,
                        target.model,
                        request.sampling,
                        request.seed,
                        request.logprobs,
                    )
                )
            )
            drafter = None
            if draft is not None:
                sampling = request.sampling.for_draft(request.speculation.draft_temperature)
                drafter = stack.enter_context(closing(_ZooDrafter(self._zoo, draft, sampling, request.seed)))
            draft_model = draft.model if draft else None
            events = generate(request, target.model, verifier, draft_model, drafter, target.estimates, self._memory)
            async for event in events:
                match event:
                    case Started(prompt_token_count):
                        yield bridge_pb2.GenerateResponse(
                            started=bridge_pb2.GenerateStarted(
                                target=target.model.name,
                                draft=draft_model.name if draft_model else "",
                                seed=request.seed,
                                prompt_token_count=prompt_token_count,
                            )
                        )
                    case Delta():
                        yield bridge_pb2.GenerateResponse(delta=codec.write_delta(event))
                    case Finished():
                        finished = codec.write_finished(event)
                        finished.speculation.note = finished.speculation.note or note
                        codec.add_statistics(self._totals, finished.speculation)
                        yield bridge_pb2.GenerateResponse(finished=finished)

    async def GetStatus(  # noqa: N802
        self, request: bridge_pb2.GetStatusRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.GetStatusResponse:
        """See the contract."""
        endpoints = await self._zoo.check()
        return bridge_pb2.GetStatusResponse(
            version=VERSION,
            uptime_ns=perf_counter_ns() - self._started_ns,
            active_count=self._active,
            finished_count=self._finished,
            failed_count=self._failed,
            cancelled_count=self._cancelled,
            endpoints=endpoints,
            speculation=self._totals,
            prefix_caches=[codec.write_prefix_cache(vocabulary) for vocabulary in self._zoo.vocabularies()],
            suffix_memory=codec.write_suffix_memory(self._memory),
        )

    async def ListModels(  # noqa: N802
        self, request: bridge_pb2.ListModelsRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.ListModelsResponse:
        """See the contract."""
        by_address = {endpoint.address: endpoint.description for endpoint in self._zoo.endpoints}
        return bridge_pb2.ListModelsResponse(models=by_address.values())

    async def ListPairs(  # noqa: N802
        self, request: bridge_pb2.ListPairsRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.ListPairsResponse:
        """See the contract."""
        return bridge_pb2.ListPairsResponse(
            pairs=[
                bridge_pb2.Pair(
                    target=target.model.name,
                    draft=draft.model.name,
                    same_tokenizer=target.model.vocabulary.sha256 == draft.model.vocabulary.sha256,
                )
                for target in self._zoo.of_role(model_pb2.ROLE_TARGET)
                for draft in self._zoo.of_role(model_pb2.ROLE_DRAFT)
            ]
        )

    async def Translate(  # noqa: N802
        self, request: bridge_pb2.TranslateRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> bridge_pb2.TranslateResponse:
        """See the contract."""
        source, target = self._zoo.model(request.source), self._zoo.model(request.target)
        match request.WhichOneof("input"):
            case "text":
                data = request.text.encode()
                source_ids, target_ids = await asyncio.gather(
                    *(asyncio.to_thread(segment, one.vocabulary, data) for one in (source, target))
                )
            case "token_ids":
                source_ids = list(request.token_ids.token_ids)
                for id_ in source_ids:
                    if id_ >= source.vocabulary.size or source.vocabulary.tokens[id_] is None:
                        raise TokenOutOfRange(id_, source.vocabulary.size, source.name)
                target_ids = await asyncio.to_thread(translate, source_ids, source, target)
            case _:
                raise InvalidField("input", "a text or token ids", "neither")
        return bridge_pb2.TranslateResponse(
            source_tokens=codec.write_spans(source.vocabulary, source_ids),
            target_tokens=codec.write_spans(target.vocabulary, target_ids),
        )


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
        tenant=message.tenant,
    )
