"""Tests the balancer: which replica gets a request, and which one rests after a fault."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from bridge.errors import DraftBridgeError, InvalidGrammar, NotReady, TargetFault, Unreachable
from bridge.planning.estimates import TargetEstimates
from bridge.ports import FinishReason, Grant, Pass, Run
from bridge.request import Request
from bridge.text.chat import Chat, Message
from services.bridge.pairing import Assignment, Wish
from services.bridge.replicas import Balancer, ResumingVerifier, blocks_of
from services.errors import StreamEnded
from services.rpc.status import RemoteError
from tests.support import tiny
from tests.support.clock import Clock


def endpoint(address: str) -> Any:
    return SimpleNamespace(address=address, model=tiny.model("byte_level"), estimates=TargetEstimates())


def blocks(text: str) -> list[bytes]:
    return blocks_of(Request(text))


A, B, C = (endpoint(name) for name in "abc")
LONG = "x" * 2000
ONE = object()


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


class Breaking(Refusing):
    """A verifier that keeps the run it gets, and whose stream breaks after some passes."""

    def __init__(self, *passes: Pass) -> None:
        self._passes = passes
        self.received: Run | None = None

    async def run(self, run: Run) -> None:
        self.received = run

    async def grant(self, grant: Grant) -> None:
        pass

    async def passes(self) -> AsyncIterator[Pass]:
        for one in self._passes:
            yield one
        raise Unreachable("a", "it was killed")


async def test_another_replica_goes_on_where_the_first_one_broke() -> None:
    endpoints = [endpoint(name) for name in "ab"]
    spell, eos = endpoints[0].model.vocabulary.token_bytes, endpoints[0].model.special_ids.eos[0]
    assert spell(70) and not spell(eos)
    verifiers = [Breaking(Pass(2, (70, 71), 1, 1), Pass(4, (eos,), 0, 0)), Breaking()]
    opened = iter(verifiers)
    verifier = ResumingVerifier(Balancer(), lambda: endpoints, lambda one: next(opened), lambda one, error: None, [])
    await verifier.run(Run(0, (1, 60), 0, 0, credit=8, patience_us=50))
    await verifier.grant(Grant(credit=4, patience_us=90))
    with pytest.raises(Unreachable):
        assert [one.base_token_count async for one in verifier.passes()] == [2, 4]
    offset = len(spell(70) + spell(71))
    assert verifiers[1].received == Run(
        0, (1, 60, 70, 71, eos), offset, empty_token_count=1, credit=9, patience_us=90, generated_token_count=3
    )


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


@pytest.mark.parametrize(
    ("error", "pauses"),
    [
        (InvalidGrammar("grammar", "is too complex"), False),
        (RemoteError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR", "it is too complex", {}), False),
        (RemoteError(grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", "send the sync first", {}), True),
        (RemoteError(grpc.StatusCode.INTERNAL, "ENGINE_FAILURE", "out of memory", {}), True),
    ],
    ids=str,
)
def test_a_request_that_a_draft_refuses_does_not_keep_others_from_it(error: DraftBridgeError, pauses: bool) -> None:
    paused = list[object]()
    pairing: Any = SimpleNamespace(
        balancer=Balancer(),
        pauses=SimpleNamespace(failed=lambda target, draft: paused.append(draft)),
        replicas=lambda target, draft: [],
        zoo=SimpleNamespace(connections=[A, B]),
    )
    Assignment(pairing, A, [], Wish())._on_failure(B, B, error)
    assert paused == [B] * pauses


async def test_a_replica_that_has_left_its_name_is_lost_and_not_a_bug() -> None:
    endpoints, balancer = [endpoint(name) for name in "ab"], Balancer()
    opened = iter([Breaking(Pass(0, (70,), 0, 0))])

    def connect(one: Any) -> Any:
        if (found := next(opened, None)) is None:
            raise aio.UsageError("Channel is closed.")
        return found

    verifier = ResumingVerifier(balancer, lambda: endpoints, connect, lambda one, error: None, [])
    with pytest.raises(Unreachable, match="left its host name"):
        assert [one.token_ids async for one in verifier.passes()] == [(70,)]
    verifier.close()
    assert {one.active for one in balancer._replicas.values()} == {0} and running(endpoints) == [0, 0]
    with pytest.raises(Unreachable, match="left its host name"):
        ResumingVerifier(balancer, lambda: endpoints, connect, lambda one, error: None, [])


async def test_a_contract_that_all_replicas_break_alike_pauses_none() -> None:
    balancer, endpoints = Balancer(Clock()), [endpoint(name) for name in "ab"]
    fault = TargetFault("it sends what cannot be parsed")
    verifier = refusing(balancer, endpoints, {"a": fault, "b": fault})
    with pytest.raises(TargetFault), verifier.judged():
        await anext(verifier.passes())
    verifier.close()
    assert not any(balancer._of(one).failures for one in endpoints)


def test_a_trial_that_shows_nothing_does_not_keep_others_away_for_ever() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    balancer.on_failure(A, ONE)
    clock.seconds = 0.6
    assert balancer.choose([A, B], [], object()) is A
    clock.seconds = 30
    assert balancer.choose([A, B], [], ONE) is B
    clock.seconds = 31
    assert balancer.choose([A, B], [], ONE) is A
