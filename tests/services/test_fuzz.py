"""Random and mutated messages, in any order, to every method and from every service: never a crash, hang or leak.

`DRAFTBRIDGE_FUZZ_CASES` sets the number of cases of all tests together; more than the default are drawn anew each time.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import DraftBridgeError
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from draftbridge.v1 import (
    bridge_pb2,
    bridge_pb2_grpc,
    candidate_pb2,
    candidate_pb2_grpc,
    draft_pb2,
    model_pb2,
    model_pb2_grpc,
    target_pb2,
)
from services.bridge.gateway import Gateway
from services.bridge.guests import CandidateServicer, GuestLimits
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.config import Role
from services.metrics import BridgeMetrics
from services.model.host import LoadedModel
from services.model.server import register
from services.model.servicer import ModelServicer, describe
from services.rpc.server import Server
from tests.support import tiny
from tests.support.messages import encoded
from tests.support.waiting import eventually

T = TypeVar("T")

DEFAULT_CASES = 2000
CASES = int(os.environ.get("DRAFTBRIDGE_FUZZ_CASES", DEFAULT_CASES))
# A call that takes longer hangs.
DEADLINE_SECONDS = 20.0
# A client leaves a request to a silent target after this time.
SILENT_SECONDS = 0.1
# Responses after which a call is cancelled.
ENOUGH = 12
PROMPT = "The quick brown"
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

GENERATE = [
    bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=9),
    bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=9, speculation=bridge_pb2.Speculation(mode=3)),
    bridge_pb2.GenerateRequest(
        chat=bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage(role="user", content="the dog")]), max_tokens=5
    ),
    bridge_pb2.GenerateRequest(token_ids=bridge_pb2.TokenIds(token_ids=[70, 71, 72]), max_tokens=5),
]
TRANSLATE = [
    bridge_pb2.TranslateRequest(text="the dog", source="target", target="draft"),
    bridge_pb2.TranslateRequest(token_ids=bridge_pb2.TokenIds(token_ids=[70, 71]), source="draft", target="target"),
]
VERIFY = [
    target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()),
    target_pb2.VerifyRequest(open=target_pb2.VerifyOpen(logprobs=2)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70, 71, 72], credit=5)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70], credit=2, patience_us=10**12)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(base_token_count=2, token_ids=[80], credit=3)),
    target_pb2.VerifyRequest(
        candidates=target_pb2.VerifyCandidates(offer_id=1, base_token_count=3, token_ids=[70, 71], width=4)
    ),
    target_pb2.VerifyRequest(grant=target_pb2.VerifyGrant(credit=2)),
]
DRAFT = [
    draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()),
    draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=1, token_ids=[70, 71], credit=4)),
    draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=2, keep_token_count=1, token_ids=[72], credit=2)),
    draft_pb2.DraftRequest(grant=draft_pb2.DraftGrant(epoch=1, credit=3)),
]
PROPOSE = [
    candidate_pb2.ProposeRequest(
        step=candidate_pb2.ProposeStep(
            step=step,
            sequences=[candidate_pb2.ProposeSequence(sequence_id=1, token_ids=[70, 71], generated_token_count=1)],
            deadline_us=deadline_us,
        )
    )
    for step, deadline_us in ((1, 0), (2, 1000))
] + [
    candidate_pb2.ProposeRequest(
        step=candidate_pb2.ProposeStep(
            step=3,
            sequences=[candidate_pb2.ProposeSequence(sequence_id=1, kept_token_count=2, token_ids=[72, 73])],
            ended_sequence_ids=[2],
        )
    ),
    candidate_pb2.ProposeRequest(tokenizer=candidate_pb2.ProposeTokenizer(chunk=b"{}", last=True)),
]
PASSES = [target_pb2.VerifyResponse(base_token_count=base, token_ids=[70]) for base in (4, 5, 6)] + [
    target_pb2.VerifyResponse(base_token_count=4, token_ids=[70], finish_reason=1),
    target_pb2.VerifyResponse(base_token_count=4, token_ids=[70, 71], accepted_token_count=1, offer_id=1),
]
PROPOSALS = [
    draft_pb2.DraftResponse(epoch=1, token_ids=[80], confidence=[0.9]),
    draft_pb2.DraftResponse(epoch=1, token_ids=[81, 82, 83]),
    draft_pb2.DraftResponse(epoch=2, token_ids=[80], done=True),
]


class Liar:
    """Sends given bytes as responses to a stream of Verify or Draft, once it has read the first two messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.stays = False

    async def stream(self, requests: Any, context: Any) -> Any:
        await anext(requests, None)
        await anext(requests, None)
        for data in self.messages:
            yield data
        if self.stays:
            await asyncio.Event().wait()

    def handlers(self) -> list[Any]:
        """Returns handlers for both methods, which neither parse nor serialize."""
        return [
            grpc.method_handlers_generic_handler(
                f"draftbridge.v1.{name}Service", {method: grpc.stream_stream_rpc_method_handler(self.stream)}
            )
            for name, method in (("Target", "Verify"), ("Draft", "Draft"))
        ]


class House:
    """An honest target and draft, lying ones, and bridges over them, in an event loop of another thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.target = tiny.loaded("sentencepiece", 1)
        self.draft = tiny.loaded("byte_level", 2)
        self.liar = Liar()
        self._servers: list[aio.Server] = []
        self._zoos: list[Zoo] = []
        self._closing: list[Callable[[], None]] = []
        self.call(self._open())
        self.channels = {name: grpc.insecure_channel(address) for name, address in self.addresses.items()}

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_SECONDS)

    async def _open(self) -> None:
        target, draft = await self._serve(self.target, "target"), await self._serve(self.draft, "draft")
        false_target, false_draft = await self._lie(self.target, "target"), await self._lie(self.draft, "draft")
        self.gateway = await self._bridge(target, draft)
        self.false_target, self.false_draft = (
            await self._bridge(false_target, draft),
            await self._bridge(target, false_draft),
        )
        server = Server("127.0.0.1:0")
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(BridgeServicer(self.gateway), server._server)
        self.guests = CandidateServicer(
            self._zoos[0], GuestLimits(sequence_count=8, memory_bytes=1 << 20), BridgeMetrics()
        )
        candidate_pb2_grpc.add_CandidateServiceServicer_to_server(self.guests, server._server)
        await self._start(server)
        self.addresses = {"bridge": server.address, "target": target, "draft": draft}

    async def _start(self, server: Server) -> str:
        await server._server.start()
        self._servers.append(server._server)
        return server.address

    async def _serve(self, loaded: LoadedModel, name: str) -> str:
        server = Server("127.0.0.1:0")
        named = LoadedModel(loaded.files, loaded.engine, _named(loaded, name), loaded.scheduler)
        self._closing.append(register(server, named, Role.BOTH).close)
        return await self._start(server)

    async def _lie(self, loaded: LoadedModel, name: str) -> str:
        server = aio.server()
        named = LoadedModel(loaded.files, loaded.engine, _named(loaded, name), loaded.scheduler)
        servicer = ModelServicer(describe(named, model_pb2.ROLE_BOTH), loaded.files.tokenizer_json)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
        server.add_generic_rpc_handlers(self.liar.handlers())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def _bridge(self, target: str, draft: str) -> Gateway:
        zoo = await Zoo([target], [draft]).connect()
        self._zoos.append(zoo)
        gateway = Gateway(zoo)
        self._closing.append(gateway.close)
        return gateway

    def close(self) -> None:
        """Ends everything."""

        async def close() -> None:
            for zoo in self._zoos:
                await zoo.close()
            for server in self._servers:
                await server.stop(None)

        for channel in self.channels.values():
            channel.close()
        self.call(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for close in (*self._closing, self.target.scheduler.close, self.draft.scheduler.close):
            close()

    @property
    def quiet(self) -> bool:
        """Returns whether no session and no request is left."""
        gateways = (self.gateway, self.false_target, self.false_draft)
        schedulers = (self.target.scheduler, self.draft.scheduler)
        idle = not self.guests._connections and not self.guests._budget.count
        return (
            idle
            and all(not one.counts.active and not one.running for one in gateways)
            and all(one.free_slot_count == one.engine.slot_count and one.queue_length == 0 for one in schedulers)
        )


def _named(loaded: LoadedModel, name: str) -> Any:
    return replace(loaded.model, name=name)


class Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "grpc._common":  # the client's side logs responses that cannot be parsed
            self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    opened = House()
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(autouse=True)
def nothing_is_left(house: House) -> Iterator[None]:
    """Checks that a test logs no error, and leaves no thread and no task."""
    errors, threads = Errors(), threading.active_count()
    tasks = len(asyncio.all_tasks(house.loop))
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    assert errors.lines == []
    eventually(lambda: house.quiet, 30)
    eventually(lambda: len(asyncio.all_tasks(house.loop)) <= tasks + 4, 30)  # channels keep a few
    eventually(lambda: threading.active_count() <= threads + 10, 5)  # so do pools of threads


def cases(share: float) -> Callable[[Any], Any]:
    """Returns the settings for a share of all cases."""
    return settings(max_examples=max(int(CASES * share), 1), deadline=None, derandomize=CASES <= DEFAULT_CASES)


def check(house: House, call: Any, *, cancels: bool) -> None:
    """Reads a call's responses, and checks that it ends with an allowed status."""
    if cancels:
        call.cancel()
    try:
        for number, _ in enumerate(call):
            if number == ENOUGH:
                call.cancel()
    except grpc.RpcError:
        code, detail = call.code(), call.details()
        ours = {grpc.StatusCode.CANCELLED} if cancels or detail == "Locally cancelled by application!" else set()
        assert code in REFUSALS | ours, (code, detail)
    eventually(lambda: house.quiet)


def streams(descriptor: Any, valid: list[Any]) -> st.SearchStrategy[list[bytes]]:
    """Returns sequences of messages; most of them begin as a stream must."""
    opening = st.sampled_from([[], [valid[0].SerializeToString()], [valid[0].SerializeToString()] * 2])
    rest = st.lists(encoded(descriptor, valid), max_size=5)
    return st.tuples(opening | st.just([valid[0].SerializeToString()]), rest).map(lambda both: both[0] + both[1])


@cases(0.25)
@given(messages=streams(target_pb2.VerifyRequest.DESCRIPTOR, VERIFY), cancels=st.sampled_from([False] * 9 + [True]))
def test_verify(house: House, messages: list[bytes], cancels: bool) -> None:
    method = house.channels["target"].stream_stream("/draftbridge.v1.TargetService/Verify")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(messages=streams(draft_pb2.DraftRequest.DESCRIPTOR, DRAFT), cancels=st.sampled_from([False] * 9 + [True]))
def test_draft(house: House, messages: list[bytes], cancels: bool) -> None:
    method = house.channels["draft"].stream_stream("/draftbridge.v1.DraftService/Draft")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(data=encoded(bridge_pb2.GenerateRequest.DESCRIPTOR, GENERATE), cancels=st.sampled_from([False] * 9 + [True]))
def test_generate(house: House, data: bytes, cancels: bool) -> None:
    method = house.channels["bridge"].unary_stream("/draftbridge.v1.BridgeService/Generate")
    check(house, method(data, timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(data=st.data(), cancels=st.sampled_from([False] * 9 + [True]))
def test_propose(house: House, data: st.DataObject, cancels: bool) -> None:
    model = describe(house.target, model_pb2.ROLE_TARGET)
    opening = candidate_pb2.ProposeRequest(open=candidate_pb2.ProposeOpen(engine="guest", model=model))
    messages = data.draw(streams(candidate_pb2.ProposeRequest.DESCRIPTOR, [opening, *PROPOSE]))
    method = house.channels["bridge"].stream_stream("/draftbridge.v1.CandidateService/Propose")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


UNARY = [
    ("bridge", "BridgeService/Translate", encoded(bridge_pb2.TranslateRequest.DESCRIPTOR, TRANSLATE)),
    ("bridge", "BridgeService/GetStatus", st.binary(max_size=8)),
    ("bridge", "BridgeService/ListModels", st.binary(max_size=8)),
    ("bridge", "BridgeService/ListPairs", st.binary(max_size=8)),
    ("target", "ModelService/GetModel", st.binary(max_size=8)),
    ("draft", "ModelService/GetTokenizer", st.binary(max_size=8)),
]


@cases(0.1)
@given(data=st.data(), which=st.sampled_from([UNARY[0]] * 5 + UNARY))
def test_other_methods(house: House, data: st.DataObject, which: Any) -> None:
    server, name, requests = which
    method = house.channels[server].unary_stream(f"/draftbridge.v1.{name}")
    check(house, method(data.draw(requests), timeout=DEADLINE_SECONDS), cancels=False)


async def text_of(gateway: Gateway, mode: Mode, seconds: float = DEADLINE_SECONDS / 2) -> str:
    """Returns the text of a request. Raises the request's error, and `TimeoutError` for a request that hangs."""
    request = Request(PROMPT, max_tokens=10, seed=1, speculation=SpeculationParameters(mode=mode))
    text, finished = "", False
    async with asyncio.timeout(seconds), aclosing(gateway.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
            finished = isinstance(event, Finished)
    assert finished
    return text


@cases(0.1)
@given(
    messages=st.lists(encoded(target_pb2.VerifyResponse.DESCRIPTOR, PASSES), max_size=4),
    stays=st.sampled_from([False] * 9 + [True]),
    mode=st.sampled_from([Mode.OFF, Mode.LOCKSTEP, Mode.AUTO]),
)
def test_a_lying_target(house: House, messages: list[bytes], stays: bool, mode: Mode) -> None:
    house.liar.messages, house.liar.stays = messages, stays
    try:
        house.call(text_of(house.false_target, mode, SILENT_SECONDS if stays else DEADLINE_SECONDS / 2))
    except DraftBridgeError as error:
        assert error.reason != "INTERNAL", error
    except TimeoutError:
        assert stays  # a client leaves while the target is silent
    eventually(lambda: house.quiet)


@cases(0.1)
@given(
    messages=st.lists(encoded(draft_pb2.DraftResponse.DESCRIPTOR, PROPOSALS), max_size=4),
    stays=st.booleans(),
    mode=st.sampled_from([Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO]),
)
def test_a_lying_draft(house: House, messages: list[bytes], stays: bool, mode: Mode) -> None:
    house.liar.messages, house.liar.stays = messages, stays
    if not hasattr(house, "right"):
        house.right = house.call(text_of(house.gateway, Mode.OFF))  # type: ignore[attr-defined]
    assert house.call(text_of(house.false_draft, mode)) == house.right  # type: ignore[attr-defined]
    eventually(lambda: house.quiet)
