"""The gateway: runs requests on the models of the zoo, whichever protocol they arrive by."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import NoReturn

import grpc

from bridge.errors import DraftBridgeError, InvalidField, ProtocolViolation, require
from bridge.generation import Delta, Finished, Started, generate
from bridge.ports import Proposal, TextGrammar
from bridge.request import Request, check
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.learned import LearnedSource
from bridge.sources.ngrams import NgramMemory
from bridge.sources.source import Draft
from bridge.statistics import Statistics
from bridge.text.models import Model
from bridge.text.translation import segment
from bridge.threads import run, threads_for
from draftbridge.v1 import model_pb2
from services.bridge.backend import Opened, ServedModel, ServiceState
from services.bridge.draft_choice import DraftChooser
from services.bridge.endpoint import Endpoint, key_of
from services.bridge.listing import read_states
from services.bridge.pairing import Pairing, Wish
from services.bridge.remote import RemoteDrafter, RemoteVerifier
from services.bridge.replicas import Balancer, ResumingVerifier, blocks_of, is_broken
from services.bridge.zoo import Zoo
from services.errors import BridgeBusy, GrammarNotSupported, PairRefused
from services.grammars.store import ByteGrammars
from services.metrics import BridgeMetrics, RequestMetrics
from services.rpc.status import code_of
from services.traces import NO_TRACES, Stages, Traces

# The codes of requests that are the client's mistake, or exceed a limit: nothing is broken.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)
# The size of a prompt that takes as long to check as one bias of a logit.
_BIAS_BYTES = 16
_NO_MEMORY = "this bridge does not learn from the outputs of tenants: start it with --ngram-memory"


@dataclass
class RequestCounts:
    """Numbers of requests, running and by how they ended. `cancelled`: the client left before the end.

    `refused`: the request was invalid or not for these models, or a limit was reached. `failed`: any other error.
    """

    active: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0

    @contextmanager
    def request(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """Counts the block as one request. `on_end` receives its outcome: the name of a count."""
        outcome = "cancelled"  # or closed before its end
        self.active += 1
        try:
            yield
            outcome = "finished"
        except Exception as error:
            limited = isinstance(error, DraftBridgeError) and code_of(error) in _REFUSALS
            outcome = "refused" if limited or isinstance(error, GrammarNotSupported | PairRefused) else "failed"
            raise
        finally:
            self.active -= 1
            setattr(self, outcome, getattr(self, outcome) + 1)
            on_end(outcome)


@dataclass(eq=False)
class Running:
    """A request in progress. `target` is empty while the prompt is being encoded."""

    statistics: Statistics
    metrics: RequestMetrics
    started_ns: int
    target: str = ""

    @property
    def draft(self) -> str:
        """Returns the draft that took over last, or ""."""
        return next(reversed(self.statistics.drafts), "")


def check_bytes(field: str, size: int, limit_bytes: int) -> None:
    """Raises `InvalidField` for a field that would take long to tokenize."""
    allowed = f"at most {limit_bytes} bytes long on this bridge (--prompt-limit)"
    require(size <= limit_bytes, InvalidField, field, allowed, size)


class BalancedDrafter(RemoteDrafter):
    """A draft of the zoo, which learns of its faults, and whose requests, failures and prompts a balancer counts."""

    def __init__(
        self,
        zoo: Zoo,
        endpoint: Endpoint,
        sampling: SamplingParameters,
        seed: int,
        balancer: Balancer,
        prompt: Sequence[bytes],
        request: object,
    ) -> None:
        super().__init__(endpoint.channel, endpoint.address, endpoint.model, sampling, seed)
        self._zoo, self._endpoint = zoo, endpoint
        self._balancer, self._request, self._closed = balancer, request, False
        balancer.opened(endpoint, prompt)

    async def proposals(self) -> AsyncIterator[Proposal]:
        """See `Drafter`."""
        try:
            async for proposal in super().proposals():
                self._balancer.on_success(self._endpoint)
                yield proposal
        except DraftBridgeError as error:
            self._zoo.on_error(self._endpoint, error)  # the address may serve another model now
            if is_broken(error) and not self._closed:
                self._balancer.on_failure(self._endpoint, self._request)
            raise

    def on_fault(self, error: DraftBridgeError) -> None:
        """Avoids a replica that breaks the contract or hangs, which its stream does not report."""
        if isinstance(error, ProtocolViolation):
            self._zoo.refuse(self._endpoint, f"it broke the contract: {error}")
        else:
            self._balancer.on_failure(self._endpoint, self._request)

    def close(self) -> None:
        """Ends the stream, and with it the session at the other end. May be called twice."""
        if not self._closed:
            self._closed = True
            self._balancer.closed(self._endpoint, self._request)
        super().close()


class Gateway:
    """Runs requests on a zoo. `memory` keeps what tenants' outputs taught. `observers` receive every `Finished`."""

    def __init__(
        self,
        zoo: Zoo,
        memory: NgramMemory | None = None,
        *,
        max_requests: int = 256,
        prompt_limit_bytes: int = 4 << 20,
        metrics: BridgeMetrics | None = None,
        traces: Traces = NO_TRACES,
        chooser: DraftChooser | None = None,
    ) -> None:
        self.zoo, self.memory = zoo, memory
        self.pairing = Pairing(zoo, chooser)
        self._max_requests, self.prompt_limit_bytes = max_requests, prompt_limit_bytes
        self.started_ns = perf_counter_ns()
        self.counts = RequestCounts()
        self._balancer = Balancer()
        zoo.on_retired = self._on_retired
        # In the order of their arrival.
        self.running: dict[Running, None] = {}
        self.observers: list[Callable[[Finished], None]] = []
        self.metrics, self.traces = metrics or BridgeMetrics(), traces
        self._grammars = ByteGrammars()

    def close(self) -> None:
        """Ends the process that tries grammars."""
        self._grammars.close()

    def _on_retired(self, address: str) -> None:
        self._balancer.retire(address)
        self.pairing.balancer.retire(address)

    @contextmanager
    def _request(self) -> Iterator[Running]:
        """Counts the block as one request in every respect."""
        statistics = Statistics()
        running = Running(statistics, self.metrics.request(statistics), perf_counter_ns())
        self.running[running] = None
        try:
            with self.counts.request(running.metrics.end):
                yield running
        finally:
            del self.running[running]

    def refuse(self, error: DraftBridgeError) -> NoReturn:
        """Raises the error of a request that its door refuses, and counts it."""
        with self._request():
            raise error

    @property
    def targets(self) -> list[Model]:
        """The models that requests may name as target, the default first."""
        return [endpoint.model for endpoint in self.zoo.of_role(model_pb2.ROLE_TARGET)]

    @property
    def drafts(self) -> list[Model]:
        """The connected drafts, the default first."""
        return [endpoint.model for endpoint in self.zoo.of_role(model_pb2.ROLE_DRAFT)]

    async def served(self) -> tuple[list[ServedModel], list[str]]:
        """See `Backend`."""
        targets = {model.name: _served(model) for model in self.targets}
        return list(targets.values()), list(dict.fromkeys(model.name for model in self.drafts))

    async def served_target(self, name: str) -> ServedModel:
        """See `Backend`."""
        return _served(self.zoo.target(name).model)

    async def segment(self, text: str, models: Sequence[str]) -> list[list[tuple[int, bytes]]]:
        """See `Backend`. Raises `ModelNotFound`, or `InvalidField` for a long text."""
        found, data = [self.zoo.model(name).vocabulary for name in models], text.encode()
        check_bytes("text", len(data), self.prompt_limit_bytes)
        rows = await asyncio.gather(*(run(threads_for(len(data)), segment, one, data) for one in found))
        return [[(id_, one.token_bytes(id_)) for id_ in ids] for one, ids in zip(found, rows, strict=True)]

    async def check(self) -> list[ServiceState]:
        """Asks every configured model service, for up to 2 seconds."""
        return read_states(await self.zoo.check())

    async def generate(
        self, request: Request, target_name: str = "", wish: Wish | None = None
    ) -> AsyncGenerator[Opened | Delta | Finished, None]:
        """Yields `Opened`, then deltas, then `Finished`. An empty name, or no wish, lets the bridge choose.

        Raises a `DraftBridgeError` at any point.
        """
        with self._request() as running, ExitStack() as stack:
            if self.counts.active > self._max_requests:
                raise BridgeBusy(self._max_requests)
            check_bytes("the prompt", request.input_byte_count, self.prompt_limit_bytes)
            threads = threads_for(request.input_byte_count + _BIAS_BYTES * len(request.sampling.logit_bias))
            prompt = await run(threads, _checked, request) if threads else _checked(request)
            target = self.zoo.target(target_name)
            grammar = await self._grammar(request, target)
            verifier = ResumingVerifier(
                self._balancer,
                lambda: self._able(request, target),
                lambda one: RemoteVerifier(
                    one.channel, one.address, one.model, request.sampling, request.seed, request.logprobs
                ),
                self.zoo.on_error,
                prompt,
            )
            stack.enter_context(closing(verifier))
            stack.enter_context(verifier.judged())
            target = verifier.endpoint
            assignment = self.pairing.assign(target, request, wish or Wish())
            assignment.statistics, assignment.prompt = running.statistics, prompt

            def next_draft(error: DraftBridgeError | None) -> Draft | None:
                draft = assignment.next(error)
                if draft is None:
                    return None
                sampling = request.sampling.for_draft(request.speculation.draft_temperature)
                if not draft.description.grammars:
                    sampling = replace(sampling, grammar=None)
                drafter = BalancedDrafter(
                    self.zoo, draft, sampling, request.seed, self.pairing.balancer, prompt, assignment
                )
                now = verifier.endpoint
                competes = draft.model.competes_with(now.model)
                times = now.estimates.draft(key_of(draft), draft.model.forward_costs, competes=competes)
                stack.enter_context(closing(drafter))
                return Draft(draft.model, drafter, times, assignment.take_over, drafter.on_fault)

            events = generate(
                request,
                target.model,
                verifier,
                next_draft,
                lambda: verifier.endpoint.estimates,
                self.memory,
                statistics=running.statistics,
                grammar=grammar,
                started_ns=running.started_ns,
            )
            stages = Stages(self.traces, "encode")
            async with aclosing(events):
                async for event in events:
                    match event:
                        case Started(prompt_token_count):
                            running.target = target.model.name
                            if assignment.choice and assignment.choice.draft == running.draft:
                                running.statistics.draft_choice = assignment.choice
                            stages.begin("prefill", prompt_tokens=prompt_token_count)
                            yield Opened(running.target, running.draft, request.seed, prompt_token_count)
                        case Finished():
                            note = event.statistics.note or assignment.note or self._note_on_memory(request)
                            event.statistics.note = note
                            assignment.finished(event)
                            running.metrics.on_finished(event)
                            stages.end(**_summary(event))
                            for observer in self.observers:
                                observer(event)
                            yield event
                        case Delta():
                            verifier.on_commit()
                            if not running.metrics.generated_token_count:
                                stages.begin("decode")
                            running.metrics.on_delta(len(event.token_ids))
                            yield event

    def _note_on_memory(self, request: Request) -> str:
        wants = request.tenant or LearnedSource.name in request.speculation.sources
        return _NO_MEMORY if wants and self.memory is None else ""

    async def _grammar(self, request: Request, target: Endpoint) -> TextGrammar | None:
        """Returns the request's grammar. Raises `GrammarNotSupported`, `InvalidGrammar` or `SandboxBusy`."""
        if (grammar := request.sampling.grammar) is None:
            return None
        opened = await self._grammars.open(grammar) if self._able(request, target) else None
        if opened is None or not self._able(request, target):  # a replica may have left meanwhile
            raise GrammarNotSupported(target.model.name, grammar.field)
        return opened

    def _able(self, request: Request, target: Endpoint) -> list[Endpoint]:
        """Returns the replicas of a target that can obey the request's grammar, if it has one."""
        grammar = request.sampling.grammar
        return [one for one in self.zoo.replicas(target) if one.description.grammars or not grammar]


def _checked(request: Request) -> list[bytes]:
    """Checks a request, and returns what identifies the beginnings of its prompt; see `blocks_of`."""
    check(request)
    return blocks_of(request)


def _served(model: Model) -> ServedModel:
    return ServedModel(
        model.name, model.context_length, bool(model.chat_template), model.special_ids.eos, model.vocabulary
    )


def _summary(event: Finished) -> dict[str, str | int | float]:
    """Returns the attributes of a trace that sum up the passes."""
    statistics = event.statistics
    return {
        "mode": event.mode.value,
        "generated_tokens": event.generated_token_count,
        "target_passes": statistics.target_pass_count,
        "candidates": statistics.num_draft_tokens,
        "accepted": statistics.num_accepted_tokens,
        "near_ties": statistics.near_ties,
        "forward_seconds": statistics.verify_ns / 1e9,
        "waited_seconds": statistics.waited_ns / 1e9,
        "bridge_seconds": statistics.bridge_ns / 1e9,
    }
