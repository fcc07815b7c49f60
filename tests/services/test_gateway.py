"""A caller of the gateway without protocol buffers gets the same results as the gRPC door."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from time import perf_counter_ns

import pytest

from bridge.errors import InvalidField, InvalidRequest, Unreachable
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Pass
from bridge.request import Request
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.statistics import Statistics
from draftbridge import Client
from draftbridge.v1 import bridge_pb2, model_pb2
from services.bridge.gateway import Gateway, Opened, Running
from services.bridge.remote import RemoteVerifier
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.cli.processes import Fleet
from services.errors import BridgeBusy, GrammarNotSupported, ModelNotFound
from tests.support.zoo import trusted

PROMPT = "The quick brown"


@pytest.fixture
async def gateway(tiny_fleet: Fleet):  # type: ignore[no-untyped-def]
    with trusted():
        zoo = await Zoo([tiny_fleet.target], [tiny_fleet.draft]).connect()
    gateway = Gateway(zoo)
    yield gateway
    gateway.close()
    await zoo.close()


def asked(**changes: object) -> Request:
    return Request(PROMPT, **({"sampling": SamplingParameters(temperature=1.0), "seed": 3, "max_tokens": 12} | changes))  # type: ignore[arg-type]


async def test_its_text_is_that_of_the_grpc_door(gateway: Gateway, tiny_fleet: Fleet) -> None:
    seen: list[Finished] = []
    gateway.observers.append(seen.append)
    async with aclosing(gateway.generate(asked())) as events:
        got = [event async for event in events]
    assert isinstance(got[0], Opened) and got[0].seed == 3 and got[0].draft
    assert isinstance(got[-1], Finished) and seen == [got[-1]]
    with Client(tiny_fleet.bridge) as client:
        expected = client.generate(PROMPT, max_tokens=12, temperature=1.0, seed=3)
    assert "".join(event.text for event in got if isinstance(event, Delta)) == expected.text
    assert got[0].target == expected.started.target
    assert vars(gateway.counts) == {"active": 0, "finished": 1, "refused": 0, "failed": 0, "cancelled": 0}


async def test_a_request_without_speculation_opens_no_draft(gateway: Gateway) -> None:
    request = asked(speculation=SpeculationParameters(mode=Mode.OFF))
    async with aclosing(gateway.generate(request)) as events:
        opened = await anext(events)
    assert isinstance(opened, Opened) and opened.draft == ""


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        ({"tenant": "reports"}, "start it with --ngram-memory"),
        ({"speculation": SpeculationParameters(sources=("suffix", "learned"))}, "start it with --ngram-memory"),
        ({"speculation": SpeculationParameters(sources=("draft", "suffix"))}, "start it with --draft HOST:PORT"),
        ({"speculation": SpeculationParameters(Mode.LOCKSTEP)}, "start it with --draft HOST:PORT"),
    ],
    ids=str,
)
async def test_what_a_bridge_lacks_for_a_request_is_noted(tiny_fleet: Fleet, changes: dict, note: str) -> None:
    with trusted():
        zoo = await Zoo([tiny_fleet.target], []).connect()
    gateway = Gateway(zoo)
    async with aclosing(gateway.generate(asked(**changes))) as events:
        *_, finished = [event async for event in events]
    assert isinstance(finished, Finished)
    assert finished.statistics.note.endswith(note) and bool(finished.statistics.note) == bool(note)
    gateway.close()
    await zoo.close()


async def test_the_time_of_a_request_includes_that_of_its_grammar(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, begun_ns, last_ns = gateway._grammars.open, 0, 0

    async def slow(grammar: Grammar) -> object:
        nonlocal begun_ns
        begun_ns = perf_counter_ns()
        await asyncio.sleep(0.05)
        return await open_(grammar)

    monkeypatch.setattr(gateway._grammars, "open", slow)
    sampling = SamplingParameters(grammar=Grammar(GrammarKind.REGEX, "[0-9]{4}"))
    async with aclosing(gateway.generate(asked(sampling=sampling))) as events:
        async for event in events:
            last_ns = last_ns if isinstance(event, Finished) else perf_counter_ns()
    assert isinstance(event, Finished)
    assert event.elapsed_ns > last_ns - begun_ns > 0


async def test_a_service_without_grammars_is_not_asked_to_obey_one(gateway: Gateway) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{4}")
    sampling = SamplingParameters(temperature=1.0, grammar=grammar)

    async def text() -> str:
        async with aclosing(gateway.generate(asked(sampling=sampling))) as events:
            return "".join([event.text async for event in events if isinstance(event, Delta)])

    expected = await text()
    assert len(expected) == 4 and expected.isdecimal()
    draft, target = (gateway.zoo.of_role(role)[0] for role in (model_pb2.ROLE_DRAFT, model_pb2.ROLE_TARGET))
    draft.description.grammars = False  # it ignores the grammar, and the bridge cuts its proposals
    assert await text() == expected
    target.description.grammars = False
    with pytest.raises(GrammarNotSupported, match="tiny-target's service does not support grammars"):
        await text()
    assert (gateway.counts.refused, gateway.counts.failed) == (1, 0)


async def test_a_target_that_is_lost_is_the_reason_if_no_other_replica_obeys_grammars(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gateway.zoo.target("")
    other = replace(target, address="elsewhere:1", description=model_pb2.Model())

    class Lost(RemoteVerifier):
        async def passes(self) -> AsyncIterator[Pass]:
            monkeypatch.setattr(gateway.zoo, "replicas", lambda endpoint: [other])
            raise Unreachable(target.address, "UNAVAILABLE")
            yield

    monkeypatch.setattr("services.bridge.gateway.RemoteVerifier", Lost)
    sampling = SamplingParameters(grammar=Grammar(GrammarKind.REGEX, "[0-9]{4}"))
    request = asked(sampling=sampling, speculation=SpeculationParameters(mode=Mode.OFF))
    with pytest.raises(Unreachable, match=target.address):
        async with aclosing(gateway.generate(request)) as events:
            [_ async for _ in events]


async def test_a_door_that_leaves_early_is_counted_as_cancelled(gateway: Gateway) -> None:
    async with aclosing(gateway.generate(asked(max_tokens=200))) as events:
        async for event in events:
            if isinstance(event, Delta):
                assert gateway.counts.active == len(gateway.running) == 1
                break
    assert not gateway.running
    assert vars(gateway.counts) == {"active": 0, "finished": 0, "refused": 0, "failed": 0, "cancelled": 1}


async def test_the_status_does_not_show_what_a_template_said_about_the_chat_of_another_client(gateway: Gateway) -> None:
    statistics = Statistics(note="the draft's template refused the chat: my secret", target_pass_count=3)
    gateway.running[Running(statistics, gateway.metrics.request(statistics), perf_counter_ns())] = None
    status = await BridgeServicer(gateway).GetStatus(bridge_pb2.GetStatusRequest(), None)  # type: ignore[arg-type]
    assert status.running[0].speculation.target_pass_count == 3
    assert "secret" not in str(status)


async def test_what_is_refused_is_not_counted_as_failed(gateway: Gateway) -> None:
    for changes, name, error in (({"max_tokens": 0}, "", InvalidField), ({}, "nobody", ModelNotFound)):
        with pytest.raises(error):
            async with aclosing(gateway.generate(asked(**changes), name)) as events:
                await anext(events)
    assert (gateway.counts.refused, gateway.counts.failed) == (2, 0)


async def test_messages_that_are_no_request_are_counted_as_refused(gateway: Gateway) -> None:
    nothing = bridge_pb2.GenerateRequest()
    for request in (nothing, bridge_pb2.GenerateRequest(prompt="x", draft="a", drafts=["b"])):
        with pytest.raises(InvalidRequest):
            [_ async for _ in BridgeServicer(gateway).Generate(request, None)]  # type: ignore[arg-type]
    assert (gateway.counts.refused, gateway.counts.failed, gateway.counts.active) == (2, 0, 0)


async def test_a_prompt_that_is_too_long_is_refused_before_any_model_reads_it(gateway: Gateway) -> None:
    limited = Gateway(gateway.zoo, prompt_limit_bytes=len(PROMPT) - 1)
    with pytest.raises(InvalidField, match=f"the prompt must be at most {len(PROMPT) - 1} bytes long.*--prompt-limit"):
        async with aclosing(limited.generate(asked())) as events:
            await anext(events)


async def test_more_requests_than_allowed_are_refused_to_be_retried(gateway: Gateway) -> None:
    limited = Gateway(gateway.zoo, max_requests=1)
    async with aclosing(limited.generate(asked(max_tokens=100))) as running:
        await anext(running)
        with pytest.raises(BridgeBusy, match="--max-requests") as caught:
            async with aclosing(limited.generate(asked())) as refused:
                await anext(refused)
        assert caught.value.metadata["retry_seconds"]
    async with aclosing(limited.generate(asked())) as later:
        assert isinstance(await anext(later), Opened)
