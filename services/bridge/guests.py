"""CandidateService: proposes candidates to engines that keep their own loop. The algorithm is `bridge.guest`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cachetools import LRUCache
from grpc import aio

from bridge.errors import InvalidField, ProtocolViolation
from bridge.guest import Guest
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.sources.ngrams import NgramMemory
from bridge.sources.source import Outcome
from bridge.statistics import Statistics
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc
from services.bridge.endpoint import excess_of
from services.bridge.guest_drafts import GuestDrafts
from services.bridge.guest_tokenizers import GuestTokenizers
from services.bridge.replicas import Balancer
from services.bridge.zoo import Zoo
from services.errors import DraftAway, EngineNameTaken
from services.guests.budget import Budget, GuestLimits
from services.guests.opening import check_engine
from services.logs import loggable
from services.metrics import BridgeMetrics
from services.rpc.gate import CALLER
from services.rpc.streams import first_message

_log = logging.getLogger(__name__)

_DEFAULT_DEADLINE_US, _MAX_DEADLINE_US = 2000, 10_000_000
_MAX_NAME_LENGTH = 256
# One message may hold millions of values, whose conversion would hold up everybody. The rest of a step is ignored.
_MAX_OPENING_BYTES, _MAX_STEP_TOKENS, _MAX_ENDED = 1 << 20, 1 << 20, 1 << 16
# Engines whose estimates are kept after they have left.
_MAX_ENGINES = 256
_SWEEP_SECONDS = 5.0
# Threads in which sequences begin. They are not asyncio's, so that an engine with a thousand new sequences holds up no
# request's prompt.
_OPENING_THREADS = 4


@dataclass(eq=False)
class _Connection:
    """The stream of one engine. It is replaced when the same instance of the engine connects again.

    `name`: that of the client's key and that of the engine. It is kept, because a stream that is cancelled while it
    sends ends in another task, which has no `CALLER`.
    """

    name: tuple[str, str]
    instance: int
    task: "asyncio.Task[Any]"
    replaced: bool = False
    ended: bool = False


class CandidateServicer(candidate_pb2_grpc.CandidateServiceServicer):
    """Serves engines on the zoo's drafts, whose requests `balancer` counts. gRPC prescribes the method name."""

    def __init__(
        self,
        zoo: Zoo,
        limits: GuestLimits,
        metrics: BridgeMetrics,
        memory: NgramMemory | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        self._zoo, self._limits, self._memory = zoo, limits, memory
        self._metrics, self._budget = metrics, Budget(limits)
        self._tokenizers = GuestTokenizers(zoo.reader, limits.memory_bytes)
        # A key cannot name the engines of another key.
        self._connections: dict[tuple[str, str], _Connection] = {}
        metrics.guest_engines.set_function(lambda: len(self._connections))
        metrics.guest_sequences.set_function(lambda: self._budget.count)
        self._estimates: LRUCache[tuple[str, str, str], tuple[TargetEstimates, BatchCosts]] = LRUCache(_MAX_ENGINES)
        self._threads = ThreadPoolExecutor(_OPENING_THREADS, "guest-sequences")
        self._drafts = GuestDrafts(zoo, limits.draft_count, balancer or Balancer())
        zoo.on_other_draft = self._forget_draft

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[candidate_pb2.ProposeRequest],
        context: "aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[candidate_pb2.ProposeResponse]:
        """See the contract."""
        requests = aiter(request_iterator)
        opening = (await first_message(requests)).open
        _check(opening)
        with suppress(DraftAway):  # its sequences get the draft when it returns
            self._zoo.draft(opening.draft)
        connection = self._connect(opening)
        stack = ExitStack()
        try:
            vocabulary = self._tokenizers.find(opening.model.tokenizer_sha256)
            if vocabulary is None:
                yield _opened(candidate_pb2.ProposeOpened(wants_tokenizer=True))
                vocabulary = await self._tokenizers.receive(requests, opening.model)
            stack.enter_context(self._tokenizers.using(vocabulary))
            guest = stack.enter_context(closing(self._guest(opening, vocabulary)))
            endpoint = self._drafts.endpoint(opening)
            yield _opened(
                candidate_pb2.ProposeOpened(
                    draft=endpoint.model.name if endpoint else "", max_sequence_count=self._limits.sequence_count
                )
            )
            stack.callback(asyncio.create_task(self._sweep(guest)).cancel)
            async for response in self._answers(requests, guest, opening.engine):
                yield response
        except asyncio.CancelledError:
            if not (connection.replaced or connection.ended):
                raise
            connection.task.uncancel()
            if connection.replaced:
                raise EngineNameTaken(opening.engine) from None
        finally:
            stack.close()
            if self._connections.get(connection.name) is connection:
                del self._connections[connection.name]

    def end_streams(self) -> None:
        """Ends the streams of all engines, which would otherwise last until the end of the grace period."""
        for connection in self._connections.values():
            connection.ended = True
            connection.task.cancel()

    async def _answers(
        self, requests: AsyncIterator[candidate_pb2.ProposeRequest], guest: Guest, engine: str
    ) -> AsyncIterator[candidate_pb2.ProposeResponse]:
        last, note = 0, ""
        async for request in requests:
            if request.WhichOneof("kind") != "step":
                raise ProtocolViolation("after opened, an engine sends steps only")
            update = _read_step(request.step, self._limits.sequence_count)
            if update.number <= last:
                raise ProtocolViolation(f"step {update.number} comes after step {last}: number steps upwards")
            last = update.number
            answer = await guest.step(update)
            if (count := len(update.sequences)) < len(request.step.sequences):
                answer.note = (
                    f"the bridge follows the first {count} sequences of this step only: start it with more "
                    f"--guest-sequences, or send at most {_MAX_STEP_TOKENS} tokens in a step"
                )
            if answer.note and not note:
                note = answer.note  # not logged: it has numbers that the engine has sent
                _log.warning(
                    "some sequences of engine %s get no candidates: describe the engine's own model and tokenizer, or "
                    "start the bridge with more --guest-sequences",
                    loggable(engine),
                )
            yield candidate_pb2.ProposeResponse(candidates=_write_answer(answer, guest.elapsed_ns))
            self._metrics.guest_steps.observe(guest.elapsed_ns / 1e9)
            self._metrics.guest_proposed.inc(sum(one.width for one in answer.proposed))
            await guest.settle()

    async def _sweep(self, guest: Guest) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._limits.idle_seconds / 2))
            guest.end_idle(int(self._limits.idle_seconds * 1e9))

    def _connect(self, opening: candidate_pb2.ProposeOpen) -> _Connection:
        """Registers the engine's stream. Raises `EngineNameTaken`."""
        task = asyncio.current_task()
        assert task is not None
        name = CALLER.get(), opening.engine
        if before := self._connections.get(name):
            if before.instance != opening.instance:
                raise EngineNameTaken(opening.engine)
            before.replaced = True
            before.task.cancel()
        connection = self._connections[name] = _Connection(name, opening.instance, task)
        return connection

    def _guest(self, opening: candidate_pb2.ProposeOpen, vocabulary: Vocabulary) -> Guest:
        model = self._zoo.reader.guest_model(opening.model, vocabulary)
        key = CALLER.get(), opening.engine, vocabulary.sha256
        if key not in self._estimates:
            self._estimates[key] = TargetEstimates(model.forward_costs), BatchCosts(model.forward_costs)
        estimates, costs = self._estimates[key]
        name = loggable(opening.engine)
        # An engine has a table of its own, which no request can name.
        tenant = CALLER.get(), opening.engine
        run = asyncio.get_running_loop().run_in_executor
        shared = GuestOpening(model, estimates, tuple(opening.sources), memory=self._memory, tenant=tenant)

        def on_ended(id_: int, statistics: Statistics | None) -> None:
            self._budget.drop(guest, id_)
            if statistics and _log.isEnabledFor(logging.INFO):
                _log.info("a sequence of engine %s ended: %s", name, _summary(statistics))

        guest = Guest(
            model,
            lambda ids, generated_count: run(self._threads, GuestSequence, shared, ids, generated_count),
            costs,
            find_draft=lambda held, is_new: self._drafts.find(guest, held, is_new, shared, opening),
            on_held=lambda id_, token_count: self._budget.hold(guest, id_, token_count),
            on_ended=on_ended,
            on_outcome=self._count,
        )
        return guest

    def _forget_draft(self, key: str) -> None:
        for estimates, _ in self._estimates.values():
            estimates.forget_draft(key)

    def _count(self, outcome: Outcome) -> None:
        for place, source in enumerate(outcome.tried.sources):
            self._metrics.guest_verified.labels(source).inc()
            if place < outcome.result.accepted_token_count:
                self._metrics.guest_accepted.labels(source).inc()


def _check(opening: candidate_pb2.ProposeOpen) -> None:
    """Raises `InvalidField` for an engine that no bridge could serve."""
    name, model = opening.engine, opening.model
    if (size := opening.ByteSize()) > _MAX_OPENING_BYTES:
        raise InvalidField("open", f"at most {_MAX_OPENING_BYTES} bytes long", size)
    if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_LENGTH:
        raise InvalidField("open.engine", f"1 to {_MAX_NAME_LENGTH} printable characters", f"{len(name)} characters")
    check_engine(model, opening.sources)
    if excess := excess_of(model):
        raise InvalidField(f"open.model.{excess[0]}", f"at most {excess[1]} long", excess[2])
    if len(model.tokenizer_sha256) != 64:
        raise InvalidField("open.model.tokenizer_sha256", "64 hexadecimal digits", repr(model.tokenizer_sha256[:80]))


def _read_step(step: candidate_pb2.ProposeStep, max_sequence_count: int) -> StepUpdate:
    """Returns what a step has changed: of its first sequences, if it has more than the bridge can hold."""
    deadline_us = step.deadline_us if step.HasField("deadline_us") else _DEFAULT_DEADLINE_US
    room, sequences = _MAX_STEP_TOKENS, []
    for one in step.sequences[:max_sequence_count]:
        room -= len(one.token_ids)
        if room < 0:
            break
        sequences.append(
            SequenceUpdate(
                one.sequence_id,
                one.kept_token_count,
                tuple(one.token_ids),
                one.generated_token_count,
                one.max_candidate_count if one.HasField("max_candidate_count") else None,
                one.candidate_step,
                one.candidate_count,
            )
        )
    return StepUpdate(
        number=step.step,
        sequences=tuple(sequences),
        ended=tuple(step.ended_sequence_ids[:_MAX_ENDED]),
        deadline_ns=1000 * min(deadline_us, _MAX_DEADLINE_US),
        engine_ns=step.engine_ns,
        forward_token_count=step.forward_token_count,
    )


def _write_answer(answer: Answer, elapsed_ns: int) -> candidate_pb2.ProposeCandidates:
    return candidate_pb2.ProposeCandidates(
        step=answer.number,
        sequences=[
            candidate_pb2.SequenceCandidates(
                sequence_id=one.sequence_id,
                base_token_count=one.base,
                token_ids=one.offer.token_ids,
                width=one.width,
                runs=[
                    candidate_pb2.CandidateRun(source=name, token_count=len(list(run)))
                    for name, run in groupby(one.offer.sources)
                ],
            )
            for one in answer.proposed
        ]
        + [candidate_pb2.SequenceCandidates(sequence_id=id_) for id_ in answer.withdrawn],
        unknown_sequence_ids=answer.unknown,
        elapsed_us=elapsed_ns // 1000,
        note=answer.note,
    )


def _summary(statistics: Statistics) -> str:
    plans = ", ".join(f"{one.target_pass_count} {name}" for name, one in statistics.plans.items())
    accepted, tried = statistics.num_accepted_tokens, statistics.num_draft_tokens
    return f"{statistics.target_pass_count} forwards, {accepted} of {tried} candidates accepted, plans: {plans}"


def _opened(opened: candidate_pb2.ProposeOpened) -> candidate_pb2.ProposeResponse:
    return candidate_pb2.ProposeResponse(opened=opened)
