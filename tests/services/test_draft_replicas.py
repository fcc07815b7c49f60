"""Tests that the replicas of a draft share the requests, and replace one another."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

import pytest

from bridge.errors import DraftBridgeError
from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import SequenceUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Mode
from bridge.ports import Sync
from bridge.sources.source import Draft
from draftbridge.v1 import candidate_pb2, draft_pb2
from services.bridge.connection import State
from services.bridge.endpoint import Endpoint
from services.bridge.guest_drafts import GuestDrafts
from services.bridge.pairing import Wish
from services.bridge.replicas import Balancer
from services.bridge.zoo import Zoo
from services.config import Role
from services.errors import ModelChanged, SlotsExhausted
from services.model.draft.servicer import DraftServicer
from services.rpc.status import RemoteError
from tests.support.reciting import IDS, MODEL, opened, stepped
from tests.support.zoo import (
    HangingDraft,
    LyingDraft,
    bridge,
    hurry,
    misbehaving,
    serving,
    text_of,
    trained,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def test_a_draft_with_two_replicas_goes_on_with_the_second_one() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        liar = await stack.enter_async_context(misbehaving(trained("llama-3", "draft"), LyingDraft))
        honest = await stack.enter_async_context(serving(trained("llama-3", "draft"), role=Role.DRAFT))
        other = await stack.enter_async_context(serving(trained("gemma", "other"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [honest, liar, other]))
        connections = gateway.zoo.connections
        text, event = await text_of(gateway, "", Wish(), Mode.OFF, 60)
        first = gateway.zoo.draft("draft")
        assert first and len(gateway.zoo.replicas(first)) == 2, "replicas"
        choose, asked = gateway.pairing.balancer.choose, [liar]

        def prefer(endpoints: list[Endpoint], prompt: list[bytes], request: object) -> Endpoint:
            wanted = asked.pop() if asked else ""
            return next((one for one in endpoints if one.address == wanted), None) or choose(endpoints, prompt, request)

        gateway.pairing.balancer.choose = prefer  # type: ignore[method-assign, assignment]
        again, event = await text_of(gateway, "", Wish(), max_tokens=60)
        assert again == text
        assert set(event.statistics.drafts) == {"draft"}, "no other model takes its place"
        assert [one.state for one in connections] == [
            State.AVAILABLE,
            State.AVAILABLE,
            State.REFUSED,
            State.AVAILABLE,
        ], "the replica that broke the contract is refused, not the first one"


async def test_sequences_of_engines_share_the_replicas_of_a_draft_until_one_breaks_the_contract() -> None:
    async with AsyncExitStack() as stack:
        liar = await stack.enter_async_context(misbehaving(trained("llama-3", "draft"), LyingDraft))
        honest = await stack.enter_async_context(serving(trained("llama-3", "draft"), role=Role.DRAFT))
        zoo, balancer = await Zoo([], [liar, honest]).connect(), Balancer()
        drafts, shared, number = GuestDrafts(zoo, 8, balancer), GuestOpening(MODEL, TargetEstimates()), 0

        async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
            return GuestSequence(shared, ids, generated)

        def find_draft(held: Held, is_new: bool) -> Draft | None:
            return drafts.find(guest, held, is_new, shared, candidate_pb2.ProposeOpen())

        def active() -> list[int]:
            return [one.active for one in balancer._replicas.values()]

        guest = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft)
        for id_ in (1, 2):
            number += 1
            await stepped(guest, number, SequenceUpdate(id_, 0, (50 * id_, *IDS[:19])))
            await opened(guest, id_)
        assert active() == [1, 1]
        ends, proposed = {1: 20, 2: 20}, 0
        while zoo.connections[0].state is State.AVAILABLE or not proposed:
            for id_, end in ends.items():
                number += 1
                update = SequenceUpdate(id_, end, (IDS[end],))
                # A forward of a second: however busy this machine is, candidates are worth waiting for.
                answer = await stepped(guest, number, update, deadline_ns=10**9, engine_ns=10**9)
                proposed += sum(one.offer.sources.count("draft") for one in answer.proposed)
                ends[id_] = end + 1
        assert zoo.connections[0].state is State.REFUSED and zoo.connections[1].state is State.AVAILABLE
        # The first sequence learns at its next step that it lost its draft.
        further = [SequenceUpdate(id_, end, (IDS[end],)) for id_, end in ends.items()]
        await stepped(guest, number + 1, *further, SequenceUpdate(3, 0, tuple(IDS[:20])))
        await opened(guest, 3)
        # After a pause, the first sequence may have a draft again.
        assert active() in ([0, 2], [0, 3]), "the honest replica takes new sequences"
        guest.close()
        assert active() == [0, 0]
        await zoo.close()


async def test_a_replica_that_hangs_gets_no_further_requests_while_another_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.planning.planner._LOCKSTEP_PATIENCE_NS", 3e9)
    monkeypatch.setattr("services.bridge.replicas._PAUSE_NS", 60_000_000_000)
    monkeypatch.setattr(HangingDraft, "stream_count", 0)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        hanging = await stack.enter_async_context(misbehaving(trained("llama-3", "draft"), HangingDraft))
        healthy = await stack.enter_async_context(serving(trained("llama-3", "draft"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [hanging, healthy]))
        used = [(await text_of(gateway, "", Wish()))[1].statistics.drafts for _ in range(3)]
        assert used == [["draft", "draft"], ["draft"], ["draft"]]
        assert HangingDraft.stream_count == 1


def refusing_with(error: DraftBridgeError) -> type[DraftServicer]:
    """Returns a draft that ends each stream with an error."""

    class Refusing(DraftServicer):
        async def Draft(  # noqa: N802
            self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: object
        ) -> AsyncIterator[draft_pb2.DraftResponse]:
            async for _ in request_iterator:
                raise error
            yield draft_pb2.DraftResponse()

    return Refusing


@pytest.mark.parametrize(
    "error",
    [SlotsExhausted(1), ModelChanged("draft"), DraftBridgeError("no memory")],
    ids=["full", "another model", "broken"],
)
async def test_a_replica_that_cannot_take_a_request_hands_it_to_another_one(error: DraftBridgeError) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        refusing = await stack.enter_async_context(misbehaving(trained("llama-3", "draft"), refusing_with(error)))
        healthy = await stack.enter_async_context(serving(trained("llama-3", "draft"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [refusing, healthy]))
        _, event = await text_of(gateway, "", Wish(), max_tokens=60)
        assert event.statistics.num_accepted_tokens
        first, draft = gateway.zoo.target(""), gateway.zoo.draft("draft")
        assert draft and not gateway.pairing.pauses.holds(first, draft), "it has not failed"


async def test_sequences_of_engines_use_other_replicas_than_one_that_is_full() -> None:
    full, opening = refusing_with(SlotsExhausted(1)), candidate_pb2.ProposeOpen()
    async with AsyncExitStack() as stack:
        refusing = await stack.enter_async_context(misbehaving(trained("llama-3", "draft"), full))
        healthy = await stack.enter_async_context(serving(trained("llama-3", "draft"), role=Role.DRAFT))
        zoo = await Zoo([], [refusing, healthy]).connect()
        stack.push_async_callback(zoo.close)
        drafts, shared = GuestDrafts(zoo, 8, Balancer()), GuestOpening(MODEL, TargetEstimates())
        guest, served = Guest(MODEL, None, BatchCosts()), []  # type: ignore[arg-type]
        for _ in range(3):
            found = drafts.find(guest, Held(list(IDS[:20]), 0), True, shared, opening)
            assert found
            await found.drafter.sync(Sync(1, 0, (70, 71, 72), 0, 2, 1, 0.0))
            with suppress(RemoteError):
                served.append(await anext(aiter(found.drafter.proposals())))
            found.drafter.close()
        assert len(served) == 2


async def test_a_draft_that_serves_the_target_alone_uses_its_other_replica() -> None:
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(serving(trained("gpt-2", "m")))
        second = await stack.enter_async_context(serving(trained("gpt-2", "m"), role=Role.DRAFT))
        named = shared.replace("127.0.0.1", "localhost")
        gateway = await stack.enter_async_context(bridge([shared], [named, second]))
        target = gateway.zoo.target("m")
        (pair,) = gateway.pairing.states("")
        assert not pair.refusal
        assert [one.address for one in gateway.pairing.replicas(target, pair.draft)] == [second]
        _, event = await text_of(gateway, "", Wish(draft="m"))
        assert event.statistics.drafts == ["m"]
        assert gateway._balancer._replicas[shared].active == 0
        assert list(gateway.pairing.balancer._replicas) == [second], "its stream went to the other server"
