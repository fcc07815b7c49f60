"""Tests replicas of a target: which one gets a request, which one takes it over, and that the text stays the same."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from bridge.errors import DraftBridgeError, NotReady, TargetFault, Unreachable
from bridge.generation import Delta, Finished
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import FinishReason, Pass, Run
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.text.chat import Chat, Message
from draftbridge.v1 import target_pb2
from services.bridge.gateway import Gateway
from services.bridge.pairing import Assignment, Wish
from services.bridge.remote import RemoteVerifier
from services.bridge.replicas import Balancer, ResumingVerifier, blocks_of
from services.bridge.zoo import Zoo
from services.cli.processes import serve
from services.engines.scheduler import Scheduler
from services.errors import StreamEnded
from services.model.draft.servicer import DraftServicer
from services.model.health import ModelHealth
from services.model.target.servicer import TargetServicer
from services.model.target.session import TargetSession
from services.rpc.status import RemoteError, code_of
from tests.services.test_limits import StalledEngine, in_process
from tests.support import tiny
from tests.support.ports import free_address
from tests.support.waiting import eventually
from tests.support.zoo import bridge, hurry, text_of, trained
from tests.support.zoo import serving as in_zoo

OPTIONS = ("--role", "target", "--dtype", "float32", "--threads", "1", "--slots", "4")
SAMPLING = SamplingParameters(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


def endpoint(address: str) -> Any:
    return SimpleNamespace(address=address, model=tiny.model("byte_level"), estimates=TargetEstimates())


def blocks(text: str) -> list[bytes]:
    return blocks_of(Request(text))


A, B, C = (endpoint(name) for name in "abc")
LONG = "x" * 2000
ONE = object()


@pytest.mark.parametrize("configured", [True, False])
def test_a_replica_that_breaks_when_it_is_no_longer_configured_is_forgotten(configured: bool) -> None:
    balancer = Balancer()
    pairing: Any = SimpleNamespace(
        balancer=balancer,
        pauses=SimpleNamespace(failed=lambda target, draft: None),
        replicas=lambda target, draft: [],
        zoo=SimpleNamespace(connections=[A, B] if configured else [A]),
    )
    assignment = Assignment(pairing, A, [], Wish())
    balancer.opened(B, [])
    if not configured:
        balancer.retire(B.address)
    balancer.closed(B, assignment)
    assignment._on_failure(B, B, Unreachable("b", "its stream broke"))
    assert balancer._replicas.keys() == ({B.address} if configured else set())


def test_requests_go_to_the_least_loaded_replica() -> None:
    balancer = Balancer()
    chosen = []
    for number in range(6):
        prompt = blocks(f"{number}" * 300)
        one = balancer.choose([A, B, C], prompt, ONE)
        balancer.opened(one, prompt)
        chosen.append(one.address)
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]
    balancer.closed(B, ONE)
    assert balancer.choose([A, B, C], blocks("new"), ONE) is B


def test_the_next_turn_of_a_chat_goes_where_its_beginning_is_cached_unless_that_is_much_busier() -> None:
    balancer = Balancer()
    first = Chat((Message("user", LONG),))
    balancer.opened(B, blocks_of(Request(first)))
    balancer.closed(B, ONE)
    later = Chat((*first.messages, Message("assistant", "yes"), Message("user", "and?")))
    assert balancer.choose([A, B, C], blocks_of(Request(later)), ONE) is B
    assert balancer.choose([A, B, C], blocks("y" * 2000), ONE) is A
    for _ in range(2):
        balancer.opened(B, blocks("other"))
    assert balancer.choose([A, B, C], blocks_of(Request(later)), ONE) is not B


def test_a_broken_replica_rests_and_then_gets_one_request_though_others_hold_the_prompt() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    balancer.opened(A, blocks(LONG))
    balancer.closed(A, ONE)
    balancer.on_failure(B, ONE)
    assert balancer.choose([A, B], blocks(LONG), ONE) is A
    clock.seconds = 0.6
    assert balancer.choose([A, B], blocks(LONG), ONE) is B, "prefix affinity does not starve the replica"
    assert balancer.choose([A, B], blocks(LONG), ONE) is A, "only one request tries the replica"
    balancer.opened(B, blocks(LONG))
    balancer.on_failure(B, ONE)
    balancer.closed(B, ONE)
    clock.seconds = 1.5
    assert balancer.choose([A, B], [], ONE) is A, "the second pause is twice as long"
    clock.seconds = 1.7
    assert balancer.choose([A, B], [], ONE) is B
    balancer.on_success(B)
    balancer.opened(A, [])
    assert balancer.choose([A, B], [], ONE) is B


def test_one_fault_counts_once_however_many_requests_it_ends() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    requests = [object() for _ in range(8)]
    for _ in requests:
        balancer.opened(A, [])
    for number, request in enumerate(requests):
        clock.seconds = number / 10
        balancer.on_failure(A, request)
        balancer.closed(A, request)
    assert balancer.choose([A, B], [], ONE) is A, "the pause is half a second after the first failure"


def test_other_requests_that_end_on_a_replica_do_not_allow_a_second_trial() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    old, trial = object(), object()
    balancer.opened(A, [])
    balancer.on_failure(A, object())
    clock.seconds = 0.6
    assert balancer.choose([A, B], [], trial) is A
    balancer.opened(A, [])
    balancer.closed(A, old)
    assert balancer.choose([A, B], [], ONE) is B
    balancer.closed(A, trial)
    assert balancer.choose([A, B], [], ONE) is A, "the trial was cancelled before it showed anything"


def test_where_all_are_broken_the_one_that_is_due_first_is_tried() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    balancer.on_failure(B, ONE)
    clock.seconds = 0.1
    balancer.on_failure(A, ONE)
    assert balancer.choose([A, B], [], ONE) is B


def test_blocks_are_of_beginnings() -> None:
    assert blocks("a" * 512)[0] == blocks("a" * 256 + "b" * 256)[0]
    assert blocks("a" * 512)[1] != blocks("a" * 256 + "b" * 256)[1]
    assert blocks("") == []
    assert len(blocks("a" * 10_000_000)) == 128
    assert len(blocks_of(Request((1, 2, 3)))) == 1
    assert len(blocks_of(Request((1,) * 10_000))) == 128


class Refusing:
    """A verifier whose stream ends with an error, or after one pass if that is None."""

    def __init__(self, error: DraftBridgeError | None) -> None:
        self._error = error

    async def run(self, run: Run) -> None:
        pass

    async def passes(self) -> AsyncIterator[Pass]:
        if self._error:
            raise self._error
        yield Pass(0, (7,), 0, 0, finish_reason=FinishReason.LENGTH)

    def close(self) -> None:
        pass


def refusing(balancer: Balancer, endpoints: Sequence[Any], errors: dict[str, DraftBridgeError]) -> ResumingVerifier:
    def connect(one: Any) -> Any:
        return Refusing(errors.get(one.address))

    return ResumingVerifier(balancer, lambda: endpoints, connect, lambda one, error: None, [])


def running(endpoints: Sequence[Any]) -> list[int]:
    """Returns how many requests each replica's costs are of."""
    return [one.estimates._running for one in endpoints]


EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
REFUSALS = [
    RemoteError(EXHAUSTED, "OVERLOADED", "this server already runs 8 calls", {}),
    RemoteError(EXHAUSTED, "KEY_LIMIT_REACHED", "the key bridge has reached its limit", {"retry_seconds": "3"}),
    StreamEnded("a"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__ + error.reason)
async def test_a_replica_that_refuses_hands_a_request_on_and_is_not_broken(refusal: DraftBridgeError) -> None:
    balancer = Balancer()
    endpoints = [endpoint(name) for name in "ab"]
    verifier = refusing(balancer, endpoints, {"a": refusal})
    assert verifier.endpoint is endpoints[0] and running(endpoints) == [1, 0]
    assert [result.token_ids async for result in verifier.passes()] == [(7,)]
    assert verifier.endpoint is endpoints[1] and running(endpoints) == [0, 1]
    verifier.close()
    assert running(endpoints) == [0, 0]
    assert balancer.choose(endpoints, [], ONE) is endpoints[0]
    with pytest.raises(DraftBridgeError, match=r"^a ended|the target at a refuses this bridge") as caught:
        await anext(refusing(balancer, endpoints[:1], {"a": refusal}).passes())
    assert (caught.value.reason, caught.value.metadata) == (refusal.reason, refusal.metadata)


FAULTS = [
    *(RemoteError(code, code.name, "it fails", {}) for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)),
    NotReady("it does not offer this service"),
    TargetFault("it sends what cannot be parsed"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda error: error.reason)
async def test_a_faulty_replica_is_left_alone_for_a_while_unless_it_is_the_only_one(fault: DraftBridgeError) -> None:
    balancer = Balancer(Clock())
    endpoints = [endpoint(name) for name in "ab"]
    verifier = refusing(balancer, endpoints, {"a": fault})
    assert verifier.endpoint is endpoints[0]
    assert [result.token_ids async for result in verifier.passes()] == [(7,)]
    verifier.close()
    assert balancer.choose(endpoints, [], ONE) is endpoints[1]
    with pytest.raises(DraftBridgeError) as caught:
        await anext(refusing(balancer, endpoints[:1], {"a": fault}).passes())
    assert caught.value is fault


INTERNAL, UNKNOWN, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("codes", "left_alone"),
    [
        ([INTERNAL, INTERNAL, INTERNAL], ""),
        ([INTERNAL, INTERNAL], "ab"),
        ([INTERNAL, UNKNOWN, INTERNAL], "abc"),
        ([UNAVAILABLE, UNAVAILABLE, UNAVAILABLE], "abc"),
    ],
    ids=["all alike", "two of three", "in different ways", "all are lost"],
)
async def test_a_request_that_fails_alike_everywhere_pauses_no_replica(
    codes: list[grpc.StatusCode], left_alone: str
) -> None:
    balancer, endpoints = Balancer(Clock()), [endpoint(name) for name in "abc"]
    balancer.opened(endpoints[2], blocks(LONG))
    balancer.closed(endpoints[2], ONE)
    errors = [RemoteError(code, code.name, "it fails", {}) for code in codes]
    verifier = refusing(balancer, endpoints, dict(zip("abc", errors, strict=False)))
    with suppress(RemoteError):
        assert [result.token_ids async for result in verifier.passes()] == [(7,)]
    verifier.close()
    broken = [one.address for one in endpoints if balancer._of(one).failures]
    assert "".join(broken) == left_alone
    chosen = balancer.choose(endpoints, blocks(LONG), ONE)
    assert chosen is endpoints[0 if left_alone == "abc" else 2], "what a replica caches that works is remembered"


def test_a_failure_that_is_taken_back_leaves_a_broken_replica_broken() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    balancer.on_failure(A, ONE)
    clock.seconds = 0.6
    trial = object()
    assert balancer.choose([A, B], [], trial) is A
    balancer.on_failure(A, trial)()
    other = object()
    assert balancer.choose([A, B], [], other) is A, "its next trial is due, as before"
    balancer.on_failure(A, other)
    clock.seconds = 1.5
    assert balancer.choose([A, B], [], ONE) is B
    take_back = balancer.on_failure(B, ONE)
    balancer.on_success(B)
    take_back()
    assert balancer.choose([A, B], [], ONE) is B


async def test_a_replica_whose_passes_violate_the_contract_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lying(TargetServicer):
        async def Verify(  # noqa: N802
            self, request_iterator: Any, context: Any
        ) -> AsyncIterator[target_pb2.VerifyResponse]:
            async for _ in request_iterator:
                yield target_pb2.VerifyResponse(base_token_count=99, token_ids=[70])

    hurry(monkeypatch)
    async with AsyncExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr("services.model.server.TargetServicer", Lying)
            targets = [await stack.enter_async_context(in_zoo(trained("gpt-2")))]
        targets.append(await stack.enter_async_context(in_zoo(trained("gpt-2"))))
        gateway = await stack.enter_async_context(bridge(targets, []))
        clock = gateway._balancer._clock = Clock()
        for seconds in (0.0, 0.6):
            clock.seconds = seconds
            with pytest.raises(TargetFault):
                await text_of(gateway, "gpt-2", Wish())
            for _ in range(2):
                await text_of(gateway, "gpt-2", Wish())
        clock.seconds = 1.5
        await text_of(gateway, "gpt-2", Wish())  # the second pause is twice as long


async def test_a_replica_whose_forward_hangs_hands_its_requests_on() -> None:
    model = tiny.model("byte_level")
    hanging = StalledEngine(model)
    schedulers = [tiny.scheduler(hanging), tiny.scheduler(tiny.HashEngine(model))]

    def serving(scheduler: Scheduler) -> AbstractAsyncContextManager[str]:
        def open_session(sampling: SamplingParameters, seed: int, logprobs: int | None) -> TargetSession:
            return TargetSession(model, scheduler, tiny.sampler(model))

        return in_process(TargetServicer(model, open_session), DraftServicer(model, None))

    def connect(one: Any) -> RemoteVerifier:
        return RemoteVerifier(one.channel, one.address, model, SamplingParameters(), 0, None)

    async with AsyncExitStack() as stack, asyncio.timeout(60):
        endpoints: list[Any] = []
        for scheduler in schedulers:
            address = await stack.enter_async_context(serving(scheduler))
            channel = await stack.enter_async_context(aio.insecure_channel(address))
            endpoints.append(
                SimpleNamespace(address=address, channel=channel, model=model, estimates=TargetEstimates())
            )
        verifier = ResumingVerifier(Balancer(), lambda: endpoints, connect, lambda one, error: None, [])
        stack.callback(verifier.close)
        await verifier.run(Run(0, (1, 70, 71), 0, 0, 1, 0))
        reading = asyncio.ensure_future(anext(verifier.passes()))
        assert await asyncio.to_thread(hanging.stalled.wait, 60)
        health = ModelHealth(schedulers[0], limit_seconds=1)
        assert [health() for _ in range(3)] == [True, True, False]
        assert len((await reading).token_ids) == 1
        assert verifier.endpoint is endpoints[1]
        hanging.released.set()


@pytest.fixture
async def pair_of_replicas(tiny_models: tuple[Path, Path]) -> AsyncIterator[tuple[Gateway, dict[str, Any]]]:
    """Yields a gateway over two processes that serve one model, and these processes by address."""
    with ExitStack() as stack:
        processes = dict(stack.enter_context(serve(str(tiny_models[0]), *OPTIONS)) for _ in range(2))
        zoo = await Zoo(list(processes), []).connect()
        try:
            yield Gateway(zoo), processes
        finally:
            await zoo.close()


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def active(gateway: Gateway) -> list[str]:
    return [address for address, one in gateway._balancer._replicas.items() if one.active]


async def generated(gateway: Gateway, mode: Mode, kill_after: int | None, processes: dict[str, Any]) -> tuple[str, Any]:
    """Returns the text of a request whose replica is killed after the given number of deltas."""
    # Training differs a little between machines, and so does where a text ends.
    sampling, speculation = replace(SAMPLING, ignore_eos=True), SpeculationParameters(mode=mode)
    request = Request("The quick brown fox", sampling, seed=5, max_tokens=60, speculation=speculation)
    text, deltas, finished = "", 0, None
    async with asyncio.timeout(60), aclosing(gateway.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                text, deltas = text + event.text, deltas + 1
                if deltas == kill_after:
                    kill(processes[active(gateway)[0]])
            elif isinstance(event, Finished):
                finished = event
    return text, finished


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUTO])
async def test_a_request_goes_on_where_its_killed_replica_stopped(
    pair_of_replicas: tuple[Gateway, dict[str, Any]], mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the whole text may have arrived before the replica is killed.
    monkeypatch.setattr("bridge.target_link.CREDIT_TOKENS", 8)
    gateway, processes = pair_of_replicas
    expected, _ = await generated(gateway, mode, None, processes)
    text, finished = await generated(gateway, mode, 4, processes)
    assert text == expected
    assert finished.generated_token_count == 60
    again, _ = await generated(gateway, mode, None, processes)
    assert again == expected, "later requests go to the remaining replica"
    with pytest.raises(DraftBridgeError) as caught:
        await generated(gateway, mode, 4, processes)
    assert code_of(caught.value) is grpc.StatusCode.UNAVAILABLE, "no replica is left"
    assert active(gateway) == []


async def test_a_full_replica_hands_a_request_on(tiny_models: tuple[Path, Path]) -> None:
    small = [*OPTIONS[:-1], "1", "--queue", "0"]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serve(str(tiny_models[0]), *small))[0] for _ in range(2)]
        zoo = await Zoo(addresses, []).connect()
        gateway = Gateway(zoo)
        one = Gateway(zoo)  # another bridge, without the first one's prefix memory
        try:
            request = Request("The quick", SAMPLING, seed=1, max_tokens=40)
            async with aclosing(gateway.generate(request)) as first:
                async for event in first:
                    if isinstance(event, Delta):
                        break
                got, _ = await generated(one, Mode.OFF, None, {})
                assert got
        finally:
            await zoo.close()


async def test_a_bridge_starts_with_one_replica_and_uses_the_other_when_it_comes(
    tiny_models: tuple[Path, Path],
) -> None:
    later = free_address()
    with serve(str(tiny_models[0]), *OPTIONS) as (address, _):
        zoo = await Zoo([later, address], [], timeout=4.0).connect()
        try:
            assert [one.address for one in zoo.endpoints] == [address]
            assert [one.reachable for one in await zoo.check()] == [False, True]
            with serve(str(tiny_models[0]), *OPTIONS, "--listen", later):
                await asyncio.to_thread(eventually, lambda: len(zoo.endpoints) == 2)
                assert len(zoo.replicas(zoo.endpoints[0])) == 2
        finally:
            await zoo.close()
