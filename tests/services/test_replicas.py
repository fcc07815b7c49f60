"""Tests replicas of a target: another one takes over the requests of one that fails, and the text stays the same."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from bridge.errors import DraftBridgeError, TargetFault
from bridge.generation import Delta, Finished
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Run
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from draftbridge.v1 import target_pb2
from services.bridge.gateway import Gateway
from services.bridge.pairing import Wish
from services.bridge.remote import RemoteVerifier
from services.bridge.replicas import Balancer, ResumingVerifier
from services.bridge.zoo import Zoo
from services.cli.processes import serve
from services.engines.scheduler import Scheduler
from services.model.draft.servicer import DraftServicer
from services.model.health import ModelHealth
from services.model.target.servicer import TargetServicer
from services.model.target.session import TargetSession
from services.rpc.status import code_of
from tests.services.test_limits import StalledEngine, in_process
from tests.support import tiny
from tests.support.clock import Clock
from tests.support.ports import free_address
from tests.support.waiting import eventually
from tests.support.zoo import bridge, hurry, text_of, trained
from tests.support.zoo import serving as in_zoo

OPTIONS = ("--role", "target", "--dtype", "float32", "--threads", "1", "--slots", "4")
SAMPLING = SamplingParameters(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1)


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
        async def open_session(sampling: SamplingParameters, seed: int, logprobs: int | None) -> TargetSession:
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
