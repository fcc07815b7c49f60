"""For tests of guests: a bridge in a thread, an engine that recites a text, clients without a bridge, raw streams."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from benchmarks.reciting import load
from draftbridge import CallError
from draftbridge.candidates import CandidateClient, Candidates, SequenceStep
from draftbridge.guests.client import Client
from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc, model_pb2
from services.bridge.guests import CandidateServicer
from services.bridge.zoo import Zoo
from services.config import Role, ServerConfig
from services.guests.budget import GuestLimits
from services.metrics import BridgeMetrics
from services.model.server import register
from services.rpc.server import Server
from tests.support import tiny
from tests.support.zoo import trusted

CONTEXT = 4096


def description(kind: str, name: str = "") -> model_pb2.Model:
    """Returns the description of an engine's model with one of the tiny tokenizers."""
    words = tiny.vocabulary(kind)
    return model_pb2.Model(
        name=name or f"guest-{kind}",
        context_length=CONTEXT,
        vocabulary_size=words.size,
        tokenizer_sha256=words.sha256,
        special_ids=model_pb2.SpecialIds(bos=1, eos=[2], pad=0),
    )


def client(address: str, kind: str = "sentencepiece", **options: object) -> CandidateClient:
    """Returns a connected client of an engine with one of the tiny tokenizers."""
    found = CandidateClient(address, description(kind), tiny.tokenizer_json(kind), **options)  # type: ignore[arg-type]
    assert found.connect(60)
    return found


@dataclass
class Bridge:
    """A running bridge: its address, and its servicer."""

    address: str
    servicer: CandidateServicer


@contextmanager
def running(
    limits: GuestLimits | None = None,
    draft_text: bytes = b"",
    draft_kind: str = "byte_level",
    keys: Path | None = None,
) -> Iterator[Bridge]:
    """Runs a bridge, with a draft that recites `draft_text` if it is not empty."""
    started: list[Bridge] = []
    ready = threading.Event()
    errors: list[BaseException] = []
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        addresses = []
        loaded, model_server = None, None
        if draft_text:
            loaded = load("reciting", tiny.tokenizer_json(draft_kind), draft_text, 1.0)
            model_server = Server("127.0.0.1:0")
            register(model_server, loaded, Role.DRAFT)
            await model_server._server.start()
            addresses = [model_server.address]
        with trusted():
            zoo = await Zoo([], addresses).connect()
        server = Server("127.0.0.1:0", ServerConfig.model_validate({"keys": keys}))
        servicer = CandidateServicer(zoo, limits or GuestLimits(), BridgeMetrics())
        server.register(candidate_pb2_grpc.add_CandidateServiceServicer_to_server, servicer, None)
        await server._server.start()
        started.append(Bridge(server.address, servicer))
        ready.set()
        await stopping.wait()
        await server._server.stop(0)
        await zoo.close()
        if model_server and loaded:
            await model_server._server.stop(0)
            loaded.scheduler.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        if errors:
            raise errors[0]
        yield started[0]
    finally:
        if stop:
            stop[0]()
        thread.join(60)
    assert not errors and not thread.is_alive()


@dataclass
class Reciter:
    """An engine whose text is known: each forward accepts the candidates that it has, and adds one token."""

    truth: Sequence[int]
    prompt_count: int
    sequence_id: int = 1
    forward_count: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.truth[: self.prompt_count])

    @property
    def done(self) -> bool:
        return len(self.ids) >= len(self.truth)

    def forward(self, candidates: Sequence[int] = (), sources: Sequence[str] = ()) -> None:
        """Verifies candidates."""
        self.forward_count += 1
        for id_, source in zip(candidates, sources, strict=True):
            if self.done or id_ != self.truth[len(self.ids)]:
                break
            self.ids.append(id_)
            self.accepted[source] = self.accepted.get(source, 0) + 1
        if not self.done:
            self.ids.append(self.truth[len(self.ids)])

    def step(self) -> SequenceStep:
        return SequenceStep(self.sequence_id, self.ids, generated_token_count=len(self.ids) - self.prompt_count)


def recite(client: Client, *engines: Reciter, deadline: float = 10.0, forward_seconds: float = 0.01) -> None:
    """Runs engines, in one forward at a time, to the end of their texts. Reports `forward_seconds` for each."""
    while live := [one for one in engines if not one.done]:
        ended = [one.sequence_id for one in engines if one.done]
        found = client.step(
            [one.step() for one in live], ended=ended, deadline=deadline, engine_seconds=forward_seconds
        )
        for one in live:
            got = found.get(one.sequence_id)
            one.forward(got.token_ids if got else (), got.sources if got else ())


class ToldClient:
    """Proposes what continues a sequence in `text`, or always `guess`, in place of a `CandidateClient`."""

    def __init__(self, text: Sequence[int] = (), guess: Sequence[int] = (), width: int = 7) -> None:
        self._text, self._guess, self._width = text, guess, width
        self.steps: list[SequenceStep] = []
        self.engine_seconds: list[float] = []
        self.deadlines: list[float] = []
        self.ended: list[int] = []
        self.proposed_count = 0

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        ended: Sequence[int] = (),
        deadline: float,
        engine_seconds: float = 0.0,
        forward_token_count: int = 0,
    ) -> dict[int, Candidates]:
        self.ended += ended
        if not sequences:
            return {}
        (one,) = sequences
        self.steps.append(one)
        self.engine_seconds.append(engine_seconds)
        self.deadlines.append(deadline)
        limit = self._width if one.max_candidates is None else min(self._width, one.max_candidates)
        ids = tuple(self._guess or self._text[len(one.token_ids) :])[:limit]
        self.proposed_count += len(ids)
        return {one.sequence_id: Candidates(ids, ("suffix",) * len(ids))} if ids else {}

    def close(self) -> None:
        pass


def opening(**changes: object) -> candidate_pb2.ProposeRequest:
    values = {"engine": "raw", "instance": 1, "model": description("sentencepiece")} | changes
    return candidate_pb2.ProposeRequest(open=candidate_pb2.ProposeOpen(**values))  # type: ignore[arg-type]


def step(number: int, *sequences: candidate_pb2.ProposeSequence, **more: object) -> candidate_pb2.ProposeRequest:
    return candidate_pb2.ProposeRequest(
        step=candidate_pb2.ProposeStep(step=number, sequences=sequences, **more)  # type: ignore[arg-type]
    )


def named(id_: int, kept: int, ids: list[int], **more: int) -> candidate_pb2.ProposeSequence:
    return candidate_pb2.ProposeSequence(sequence_id=id_, kept_token_count=kept, token_ids=ids, **more)


class Raw:
    """One stream of the service, whose messages a test sends itself."""

    def __init__(self, address: str, *first: candidate_pb2.ProposeRequest, token: str = "") -> None:
        self.outbox: queue.SimpleQueue[candidate_pb2.ProposeRequest | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        self.call = candidate_pb2_grpc.CandidateServiceStub(self._channel).Propose(
            iter(self.outbox.get, None),
            timeout=60,
            metadata=(("authorization", f"Bearer {token}"),) if token else (),
        )
        for request in first:
            self.outbox.put(request)

    def ask(self, request: candidate_pb2.ProposeRequest) -> candidate_pb2.ProposeCandidates:
        self.outbox.put(request)
        return next(self.call).candidates

    def open(self) -> "Raw":
        """Sends the tokenizer if the bridge wants it."""
        if next(self.call).opened.wants_tokenizer:
            piece = candidate_pb2.ProposeTokenizer(chunk=tiny.tokenizer_json("sentencepiece"), last=True)
            self.outbox.put(candidate_pb2.ProposeRequest(tokenizer=piece))
            next(self.call)
        return self

    def error(self) -> tuple[grpc.StatusCode, str]:
        """Returns the code and the reason that the call ends with."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        failure = CallError.from_rpc(caught.value, "the bridge")
        return failure.code, failure.reason

    def close(self) -> None:
        self.outbox.put(None)
        self.call.cancel()
        self._channel.close()
