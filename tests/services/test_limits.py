"""Bad values in streams are limited, or refused with their field and a remedy; no stream exhausts the memory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

import grpc
import pytest
from grpc import aio

from bridge.errors import PromptTooLong
from bridge.ports import Candidates, Sync
from bridge.sampling.sampler import Logits, SamplingParameters
from bridge.text.models import Model
from draftbridge import CallError
from draftbridge.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from services.cli.processes import Fleet, serve
from services.engines.engine import Row
from services.model.draft.servicer import DraftServicer
from services.model.draft.session import DraftSession
from services.model.target.servicer import TargetServicer
from services.model.target.session import TargetSession
from services.rpc import limits
from services.rpc.status import StatusInterceptor
from tests.support import tiny
from tests.support.waiting import eventually

U32, U64 = 2**32 - 1, 2**64 - 1
PROMPT = [1, 70, 71]


def verify(**fields: object) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(**fields)


def opening(**fields: object) -> target_pb2.VerifyRequest:
    return verify(open=target_pb2.VerifyOpen(**fields))  # type: ignore[arg-type]


def run(**fields: object) -> target_pb2.VerifyRequest:
    return verify(run=target_pb2.VerifyRun(**({"token_ids": PROMPT, "credit": 1} | fields)))  # type: ignore[arg-type]


def candidates(base: int, ids: Iterable[int], **fields: object) -> target_pb2.VerifyRequest:
    offer = target_pb2.VerifyCandidates(base_token_count=base, token_ids=ids, **fields)  # type: ignore[arg-type]
    return verify(candidates=offer)


def sync(**fields: object) -> draft_pb2.DraftRequest:
    fields = {"epoch": 1, "token_ids": PROMPT, "credit": 1} | fields
    return draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(**fields))  # type: ignore[arg-type]


async def answers(address: str, messages: list[object], count: int = 1) -> list[object]:
    """Returns the first `count` answers to messages of either service."""
    async with aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        if isinstance(messages[0], target_pb2.VerifyRequest):
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)
        else:
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=60)
        for message in messages:
            await call.write(message)
        return [await call.read() for _ in range(count)]


async def refusal(address: str, messages: list[object]) -> CallError:
    with pytest.raises(aio.AioRpcError) as caught:
        await answers(address, messages, count=10)  # a pass may come before the refusal of a later message
    return CallError.from_rpc(caught.value, address)


BAD_SAMPLING = [
    ({"temperature": -1.0}, "sampling.temperature"),
    ({"temperature": float("nan")}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"min_p": 1.5}, "sampling.min_p"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"presence_penalty": 1e9}, "sampling.presence_penalty"),
    ({"logit_bias": {U32: 1.0}}, "sampling.logit_bias"),
    ({"logit_bias": {70: float("inf")}}, "sampling.logit_bias[70]"),
    ({"logit_bias": {id_: 1.0 for id_ in range(5000)}}, "sampling.logit_bias"),
    ({"stop_token_ids": [70, U32]}, "sampling.stop_token_ids"),
    ({"stop_token_ids": [70] * 100_000}, "sampling.stop_token_ids"),
]


@pytest.mark.parametrize(("sampling", "field"), BAD_SAMPLING, ids=lambda value: str(value)[:40])
async def test_sampling_parameters_are_checked_on_every_stream(
    tiny_fleet: Fleet, suffix: str, sampling: dict, field: str
) -> None:
    parameters = sampling_pb2.SamplingParameters(**sampling)
    drafted = draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(sampling=parameters))
    for address, messages in (
        (tiny_fleet.target, [opening(sampling=parameters)]),
        (tiny_fleet.draft, [drafted]),
        (suffix, [drafted]),
    ):
        error = await refusal(address, messages)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.metadata["field"] == field


@pytest.fixture(scope="module")
def suffix() -> Iterable[str]:
    """Yields the address of a draft that needs no model."""
    with serve("suffix", "--role", "draft") as (address, _):
        yield address


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([opening(logprobs=2_000_000_000)], "open.logprobs"),
        ([opening(), run(generated_token_count=4)], "run.generated_token_count"),
        ([opening(), run(generated_token_count=U32)], "run.generated_token_count"),
        ([opening(), run(empty_token_count=U32)], "run.empty_token_count"),
        ([opening(), run(), candidates(3, [70] * 300)], "candidates.token_ids"),
        ([opening(), run(), candidates(3, [70], branches=[{"index": 0, "token_id": 71}] * 65)], "candidates.branches"),
    ],
    ids=["logprobs", "one too many generated", "generated", "empty", "candidates", "branches"],
)
async def test_numbers_that_make_no_sense_are_refused_by_name(
    tiny_fleet: Fleet, messages: list[object], field: str
) -> None:
    error = await refusal(tiny_fleet.target, messages)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == field
    assert "must be at most" in str(error)


@pytest.mark.parametrize("least", [-0.1, 1.1, float("nan")])
async def test_a_probability_is_between_0_and_1(tiny_fleet: Fleet, suffix: str, least: float) -> None:
    messages = [draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()), sync(min_batch_probability=least)]
    for address in (tiny_fleet.draft, suffix):
        error = await refusal(address, messages)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.metadata["field"] == "sync.min_batch_probability"


@pytest.mark.parametrize(
    "changes",
    [
        {"credit": U32},
        {"byte_offset": U64},
        {"patience_us": U64},
        {"generated_token_count": 3, "empty_token_count": 3},
    ],
    ids=str,
)
async def test_large_numbers_are_only_numbers_to_a_target(tiny_fleet: Fleet, changes: dict) -> None:
    messages = [opening(sampling=sampling_pb2.SamplingParameters(temperature=1.0), logprobs=100), run(**changes)]
    (answer,) = await answers(tiny_fleet.target, messages)
    assert answer.base_token_count == 3
    assert len(answer.token_ids) >= 1
    assert len(answer.logprobs[0].top_logprobs) == 100


async def test_a_target_waits_no_longer_than_a_minute(tiny_fleet: Fleet) -> None:
    """The first forward does not wait; the second waits for candidates, or for a grant that ends the wait."""
    grant = target_pb2.VerifyGrant(credit=U32, patience_us=U64)
    messages = [opening(), run(patience_us=U64), verify(grant=grant), candidates(U32, [70]), candidates(4, [])]
    first, second = await answers(tiny_fleet.target, messages, 2)
    assert (first.base_token_count, second.base_token_count) == (3, 4)
    model = tiny.model("byte_level")
    assert limits.read_run(run(patience_us=U64).run, model).patience_us == 60_000_000
    assert limits.read_grant(grant).patience_us == 60_000_000
    assert limits.read_grant(target_pb2.VerifyGrant(credit=1)).patience_us is None


def test_a_target_s_ids_fit_its_context_and_a_draft_s_fit_twice() -> None:
    """A draft with a shorter context than its target's proposes nothing, but its request goes on."""
    model = tiny.model("byte_level")
    target, draft = model.context_length - 1, 2 * model.context_length
    assert len(limits.read_run(run(token_ids=[70] * target).run, model).token_ids) == target
    assert len(limits.read_sync(sync(token_ids=[70] * draft).sync, model).token_ids) == draft
    with pytest.raises(PromptTooLong):
        limits.read_run(run(token_ids=[70] * (target + 1)).run, model)
    with pytest.raises(PromptTooLong):
        limits.read_sync(sync(token_ids=[70] * (draft + 1)).sync, model)


@asynccontextmanager
async def in_process(target: TargetServicer, draft: DraftServicer) -> AsyncIterator[str]:
    """Yields the address of a model server in this process."""
    server = aio.server(interceptors=[StatusInterceptor()])
    port = server.add_insecure_port("127.0.0.1:0")
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": U64, "credit": U32, "byte_offset": U64}, ""),
        ({"keep_token_count": U32}, "PROTOCOL_VIOLATION"),
        ({"token_ids": [70] * 1000}, "PROMPT_TOO_LONG"),
        ({"token_ids": [U32]}, "TOKEN_OUT_OF_RANGE"),
        ({"epoch": 0}, "PROTOCOL_VIOLATION"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_draft_refuses_what_it_cannot_hold(tiny_fleet: Fleet, changes: dict, reason: str) -> None:
    messages = [draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()), sync(**changes)]
    if reason:
        error = await refusal(tiny_fleet.draft, messages)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    else:
        grant = draft_pb2.DraftRequest(grant=draft_pb2.DraftGrant(epoch=U64, credit=U32))
        (answer,) = await answers(tiny_fleet.draft, [*messages, grant])
        assert answer.epoch == U64
        assert len(answer.token_ids) == 1


class StalledEngine(tiny.HashEngine):
    """An engine whose forwards wait until `released` is set."""

    def __init__(self, of: Model) -> None:
        super().__init__(of)
        self.stalled, self.released = threading.Event(), threading.Event()

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.stalled.set()
        assert self.released.wait(60)
        return super().forward(rows)


class CountingTarget(TargetSession):
    """Counts the candidates that it received from the stream."""

    taken_count = 0
    closed = False

    async def candidates(self, candidates: Candidates) -> None:
        await super().candidates(candidates)
        self.taken_count += 1

    def close(self) -> None:
        super().close()
        self.closed = True


class CountingDraft(DraftSession):
    """Counts the syncs that it received from the stream."""

    taken_count = 0
    closed = False

    async def sync(self, sync: Sync) -> None:
        await super().sync(sync)
        self.taken_count += 1

    def close(self) -> None:
        super().close()
        self.closed = True


FLOOD_COUNT = 100_000


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_flood_is_held_up_at_its_source(role: str) -> None:
    """A service reads only a few of the messages that arrive during a forward; then the sender has to wait."""
    model = tiny.model("byte_level")
    engine = StalledEngine(model)
    scheduler, sessions = tiny.scheduler(engine), []

    async def open_target(sampling: SamplingParameters, seed: int, logprobs: int | None) -> TargetSession:
        sessions.append(CountingTarget(model, scheduler, tiny.sampler(model)))
        return sessions[-1]

    async def open_draft(sampling: SamplingParameters, seed: int) -> DraftSession:
        sessions.append(CountingDraft(model, scheduler, tiny.sampler(model)))
        return sessions[-1]

    hello = draft_pb2.DraftRequest(open=draft_pb2.DraftOpen())
    start: list[object] = [opening(), run()] if role == "target" else [hello, sync()]
    flood = candidates(3, [300] * 500) if role == "target" else sync(epoch=2, token_ids=[300] * 500)
    async with (
        in_process(TargetServicer(model, open_target), DraftServicer(model, open_draft)) as address,
        aio.insecure_channel(address) as channel,
    ):
        stubs = {
            "target": target_pb2_grpc.TargetServiceStub(channel).Verify,
            "draft": draft_pb2_grpc.DraftServiceStub(channel).Draft,
        }
        call = stubs[role]()
        for message in start:
            await call.write(message)
        assert await asyncio.to_thread(engine.stalled.wait, 60)
        sent, blocked = 0, False
        while not blocked and sent < FLOOD_COUNT:
            _, waiting = await asyncio.wait([asyncio.ensure_future(call.write(flood))], timeout=2)
            sent, blocked = sent + 1, bool(waiting)
        (session,) = sessions
        assert blocked, f"{sent} messages were accepted"
        assert 0 < session.taken_count <= 100
        # The server still notices that the client has gone.
        call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(eventually, lambda: session.closed)
        engine.released.set()
        (answer,) = await answers(address, start)
        assert len(answer.token_ids) == 1


async def test_all_messages_are_read_even_after_the_client_has_closed_its_side(tiny_fleet: Fleet) -> None:
    """The client sends many more messages than an inbox holds, some with many ids, and closes its side."""
    grant = verify(grant=target_pb2.VerifyGrant(credit=1))
    messages = [opening(), run(), *[grant, candidates(200, [70] * 250)] * 100, *[verify(grant={})] * 500, grant]
    async with aio.insecure_channel(tiny_fleet.target) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)

        async def write() -> None:
            for message in messages:
                await call.write(message)
            await call.done_writing()

        writing = asyncio.create_task(write())
        count = sum([len(answer.token_ids) async for answer in call])
        await writing
    assert count == 1 + 100 + 1


MIB = 1 << 20


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: [opening(), run(token_ids=b"F" * (60 * MIB))], "RESOURCE_EXHAUSTED"),
        (lambda: [opening(), run(token_ids=b"F" * (7 * MIB))], "PROMPT_TOO_LONG"),
        (lambda: [opening(), run(), candidates(3, b"F" * (7 * MIB))], "INVALID_FIELD"),
        (lambda: [opening(sampling=_stops(b"F" * (7 * MIB)))], "INVALID_FIELD"),
        (lambda: [draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()), sync(token_ids=b"F" * (7 * MIB))],
         "PROMPT_TOO_LONG"),
    ],
    ids=["60 MiB", "run", "candidates", "stop tokens", "sync"],
)  # fmt: skip
async def test_a_huge_message_holds_nobody_up(
    tiny_fleet: Fleet, build: Callable[[], list[target_pb2.VerifyRequest | draft_pb2.DraftRequest]], reason: str
) -> None:
    messages = build()
    is_target = isinstance(messages[0], target_pb2.VerifyRequest)
    address = tiny_fleet.target if is_target else tiny_fleet.draft
    method = "/draftbridge.v1." + ("TargetService/Verify" if is_target else "DraftService/Draft")
    # The messages are bytes, so that this process is not busy with serializing them while it asks the server.
    data = [message.SerializeToString() for message in messages]
    pauses: list[float] = []
    async with (
        aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel,
        aio.insecure_channel(address) as other,
    ):
        stub = model_pb2_grpc.ModelServiceStub(other)
        await stub.GetModel(model_pb2.GetModelRequest(), timeout=60)

        async def refused() -> CallError:
            for _ in range(3):  # gRPC may lose the status of a stream that ends while the client still sends
                call = channel.stream_stream(method)(timeout=60)
                with pytest.raises(aio.AioRpcError) as caught:
                    for one in data:
                        await call.write(one)
                    while await call.read() is not aio.EOF:
                        pass
                error = CallError.from_rpc(caught.value, address)
                if error.reason == reason:
                    break
            return error

        for _ in range(3):  # other work may hold up both processes
            pauses.clear()
            refusing = asyncio.create_task(refused())
            while not refusing.done():
                started = perf_counter()
                await stub.GetModel(model_pb2.GetModelRequest(), timeout=60)
                pauses.append(perf_counter() - started)
            assert refusing.result().reason == reason
            if max(pauses) < 2.5:
                break
    assert max(pauses) < 2.5


def _stops(ids: Iterable[int]) -> sampling_pb2.SamplingParameters:
    return sampling_pb2.SamplingParameters(stop_token_ids=ids)
