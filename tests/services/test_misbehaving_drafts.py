"""Drafts that die, hang or break the contract do not change the text."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace

import pytest

from bridge.errors import Unreachable
from bridge.generation import Delta, Finished, Started, generate
from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import SequenceUpdate
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Candidates, Grant, Pass, Proposal, Run, Sync
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.source import Draft
from bridge.text.chat import Chat, Message
from draftbridge.v1 import candidate_pb2
from services.bridge.guest_drafts import GuestDrafts
from services.bridge.replicas import Balancer
from services.bridge.zoo import Zoo
from services.config import Role
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.alone import PROMPT, QueuedDrafter, answer, in_order, oracle
from tests.support.reciting import IDS, MODEL, joined, opened, stepped
from tests.support.zoo import HangingDraft, cheap, hurry, misbehaving, serving, trained


class DyingDrafter(QueuedDrafter):
    """Proposes wrong ids, and is lost in a given epoch, as if it had been killed."""

    def __init__(self, dies_at: int, error: Exception) -> None:
        super().__init__()
        self._dies_at = dies_at
        self._error = error

    async def sync(self, sync: Sync) -> None:
        nonsense = Proposal(sync.epoch, (70, 71, 72)[: sync.credit], (0.5, 0.5, 0.5)[: sync.credit], done=True)
        self.queue.put_nowait(self._error if sync.epoch >= self._dies_at else nonsense)


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC])
@pytest.mark.parametrize("dies_at", [1, 2, 5])
@pytest.mark.parametrize("error", [Unreachable("host:1", "gone"), ValueError("a bug of ours")])
async def test_a_draft_that_dies_changes_nothing(mode: Mode, dies_at: int, error: Exception) -> None:
    target, draft = tiny.model("sentencepiece"), tiny.model("byte_level")
    engine = tiny.HashEngine(target)
    expected = oracle(target, engine, 1.0, 40)
    request = Request(
        PROMPT,
        sampling=SamplingParameters(temperature=1.0),
        seed=0,
        max_tokens=40,
        speculation=SpeculationParameters(mode),
    )
    async with asyncio.timeout(60):  # a target that waited for the dead draft in each pass would take longer
        _, ids, finished = await answer(target, engine, DyingDrafter(dies_at, error), draft, request, 1.0)
    assert ids == expected
    assert ("a bug in the bridge" if type(error) is ValueError else "SERVICE_UNREACHABLE") in finished.statistics.note


class HangingDrafter(QueuedDrafter):
    """Accepts all messages and never proposes, as a stopped process does."""

    async def sync(self, sync: Sync) -> None:
        pass


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO])
async def test_a_draft_that_hangs_is_waited_for_once(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.planning.planner._LOCKSTEP_PATIENCE_NS", 1e9)
    target, draft = tiny.model("sentencepiece"), tiny.model("byte_level")
    engine = tiny.HashEngine(target)
    request = Request(PROMPT, max_tokens=40, speculation=SpeculationParameters(mode))
    async with asyncio.timeout(20):  # one wait in each pass would take longer
        _, ids, finished = await answer(target, engine, HangingDrafter(), draft, request, 0.0)
    assert ids == oracle(target, engine, 0.0, 40)
    if mode is not Mode.AUTO:  # whose plans depend on measured times
        assert ("no longer waits" in finished.statistics.note) == (mode is Mode.LOCKSTEP)


async def test_a_bug_while_the_first_draft_is_opened_costs_the_draft_only(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenTimes(DraftEstimates):
        def cached_token_count(self, ids: Sequence[int]) -> int:
            raise RuntimeError("a bug of ours")

    model, drafter = tiny.model("byte_level"), ClosedDrafter()
    engine = tiny.HashEngine(model)
    scheduler, ids = tiny.scheduler(engine), []
    draft = Draft(model, drafter, BrokenTimes())
    with closing(TargetSession(model, scheduler, tiny.sampler(model))) as session:
        async for event in generate(Request(PROMPT, max_tokens=20), model, session, lambda _: draft):
            ids += event.token_ids if isinstance(event, Delta) else []
    scheduler.close()
    assert ids == oracle(model, engine, 0.0, 20)
    assert isinstance(event, Finished)
    assert "a bug in the bridge" in event.statistics.note and "INTERNAL" in event.statistics.note
    assert "a bug of ours" in caplog.text and "Traceback" in caplog.text
    assert drafter.closed


class ClosedDrafter(HangingDrafter):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


async def test_a_draft_whose_template_refuses_is_closed_before_the_text_begins() -> None:
    model, refused, next_one = tiny.model("byte_level"), ClosedDrafter(), ClosedDrafter()
    picky = replace(model, chat_template="{{ raise_exception('only systems') }}")
    request = Request(Chat((Message("user", "hi"),)), max_tokens=5)
    target = HangingTarget()
    events = generate(request, model, target, in_order((picky, refused), (picky, next_one)))
    assert isinstance(await anext(events), Started)
    assert refused.closed and next_one.closed
    await events.aclose()


async def test_a_draft_is_closed_if_nobody_reads_past_the_start() -> None:
    model, drafter = tiny.model("byte_level"), ClosedDrafter()
    events = generate(Request(PROMPT), model, HangingTarget(), in_order((model, drafter)))
    assert isinstance(await anext(events), Started)
    assert not drafter.closed
    await events.aclose()
    assert drafter.closed


class HangingTarget:
    """Accepts all messages and never answers."""

    async def run(self, run: Run) -> None: ...

    async def candidates(self, candidates: Candidates) -> None: ...

    async def grant(self, grant: Grant) -> None: ...

    async def passes(self) -> AsyncIterator[Pass]:
        await asyncio.Event().wait()
        yield Pass(0, (), 0, 0)


class StrangeDrafter(QueuedDrafter):
    """Breaks the contract: sends given proposals, whether requested or not, or fails when it is synced."""

    def __init__(self, proposals: list[Proposal], error: Exception | None = None) -> None:
        super().__init__()
        self._error = error
        for proposal in proposals:
            self.queue.put_nowait(proposal)

    async def sync(self, sync: Sync) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    "drafter",
    [
        StrangeDrafter([Proposal(1, (50, 60), ())]),  # lacks confidences
        StrangeDrafter([Proposal(1, (50, 60), (0.5,))]),
        StrangeDrafter([Proposal(1, (10_000_000,), (0.5,)), Proposal(99, (5,), (0.5,))]),
        StrangeDrafter([], RuntimeError("a bug of ours")),
    ],
)
@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC])
async def test_a_strange_draft_changes_nothing(
    drafter: StrangeDrafter, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.planning.planner._LOCKSTEP_PATIENCE_NS", 1e9)
    target, draft = tiny.model("sentencepiece"), tiny.model("byte_level")
    engine = tiny.HashEngine(target)
    request = Request(PROMPT, max_tokens=30, speculation=SpeculationParameters(mode))
    async with asyncio.timeout(20):  # one wait in each pass would take longer
        _, ids, _ = await answer(target, engine, drafter, draft, request, 0.0)
    assert ids == oracle(target, engine, 0.0, 30)


async def test_a_draft_that_hangs_gets_no_further_sequences_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr("bridge.sources.draft._MAX_SILENCE_NS", 1_000_000)
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        hanging = await stack.enter_async_context(misbehaving(cheap(trained("llama-3", "draft")), HangingDraft))
        healthy = await stack.enter_async_context(serving(cheap(trained("llama-3", "draft")), role=Role.DRAFT))
        zoo, balancer = await Zoo([], [hanging, healthy]).connect(), Balancer(lambda: 0)
        stack.push_async_callback(zoo.close)
        drafts, shared = GuestDrafts(zoo, 8, balancer), GuestOpening(MODEL, TargetEstimates())

        async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
            return GuestSequence(shared, ids, generated)

        def find_draft(held: Held, is_new: bool) -> Draft | None:
            return drafts.find(guest, held, is_new, shared, candidate_pb2.ProposeOpen())

        guest = Guest(MODEL, open_, BatchCosts(), find_draft=find_draft)
        stack.callback(guest.close)
        number = 1
        await stepped(guest, number, SequenceUpdate(1, 0, tuple(IDS[:20])))
        await opened(guest, 1)
        await joined(guest, 1)
        while drafts._users:  # until its sequence has given the draft up
            number += 1
            await stepped(guest, number, SequenceUpdate(1, 18 + number, (IDS[18 + number],)), deadline_ns=50_000_000)
        assert balancer.choose(zoo.endpoints, [], object()).address == healthy
