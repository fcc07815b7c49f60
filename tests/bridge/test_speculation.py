"""Tests when a sequence's next pass is planned anew, and that the loop stays short."""

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bridge.loop import speculate
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.sources.draft import DraftSource
from bridge.sources.source import DraftPace, DraftState, Offer
from bridge.sources.source_set import SourceSet
from bridge.speculation import Choice, Speculation
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.target_link import TargetLink
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.drafted import MODEL, draft_source
from tests.support.simulated import estimates_of

PLAIN = Plan("plain", Prediction(1.0, 1.0))
OFFER = Offer((1,), ("suffix",), (1.0,))


class CountingPlanner(Planner):
    """Always returns the same plan, and counts how often it was asked."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.count, self.worth_sending = plan, 0, True

    def plan(self, offers: Sequence[Offer], state: DraftState | None, room: int = 64) -> Plan:
        self.count += 1
        return self._plan

    def is_worth_sending(self, offers: Sequence[Offer]) -> bool:
        return bool(offers) and self.worth_sending

    def choose(self, offers: Sequence[Offer], plan: Plan) -> tuple[Offer, int]:
        return (offers[0], 1) if offers else (Offer(), 0)


def speculation(plan: Plan) -> tuple[Speculation, CountingPlanner]:
    planner = CountingPlanner(plan)
    found = Speculation(SourceSet((), MODEL, None), planner, Statistics(), 64)
    planner.count = 0
    return found, planner


async def test_a_plan_that_needs_nothing_is_kept_for_a_while() -> None:
    """The second pass is planned, because the first one shows what passes cost; then every fourth."""
    found, planner = speculation(PLAIN)
    counts = []
    for _ in range(9):
        await found.replan(64)
        counts.append(planner.count)
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 3]


async def test_an_offer_is_planned_for_at_once() -> None:
    found, planner = speculation(PLAIN)
    for offers in ((), (), (OFFER,), (OFFER,)):
        found.offers = offers
        await found.replan(64)
    assert planner.count == 3
    assert found.choose() == Choice(OFFER, 1)


async def test_an_offer_that_is_not_worth_sending_changes_no_plan() -> None:
    found, planner = speculation(PLAIN)
    planner.worth_sending = False
    for _ in range(4):
        found.offers = (OFFER,)
        await found.replan(64)
    assert planner.count == 1
    assert found.choose() == Choice()


async def test_a_draft_that_joins_is_planned_for_at_once() -> None:
    found, planner = speculation(PLAIN)
    await found.replan(64)
    opened: asyncio.Future[DraftSource | None] = asyncio.get_running_loop().create_future()
    opened.set_result(draft_source()[0])
    found.sources.open_draft(opened)
    for _ in range(3):
        found.refresh()
        await found.replan(64)
    assert planner.count == 2


@pytest.mark.parametrize(
    "plan",
    [
        Plan("suffix", Prediction(1.0, 1.0), source="suffix"),
        Plan("plain", Prediction(1.0, 1.0), DraftPace(8)),
        Plan("plain", Prediction(1.0, 1.0), is_trial=True),
        Plan("plain", Prediction(1.0, 1.0), prepares_turn=True),
    ],
    ids=["candidates", "a draft that keeps up", "a trial", "the draft's turn comes"],
)
async def test_any_other_plan_is_made_for_one_pass(plan: Plan) -> None:
    found, planner = speculation(plan)
    for _ in range(6):
        await found.replan(64)
    assert planner.count == 6


@pytest.mark.parametrize("lead", [0, 8])
async def test_the_target_is_held_up_only_for_a_draft_that_the_plan_uses(lead: int) -> None:
    """A draft may still be working on what an earlier plan asked for."""
    found, _ = speculation(Plan("", Prediction(1.0, 1.0), DraftPace(lead)))
    source = draft_source()[0]
    found.sources.insert(source)
    await source.advance(DraftPace(8))
    assert source.state.awaited
    assert found.choose() == Choice(awaited=lead > 0)


async def test_the_next_pass_is_planned_after_each_pass() -> None:
    class Counting(Planner):
        count = 0

        def plan(self, offers: Sequence[Offer], state: DraftState | None, room: int = 64) -> Plan:
            self.count += 1
            return Plan("plain", Prediction(1.0, 1.0), is_trial=True)

    scheduler, tape = tiny.scheduler(tiny.HashEngine(MODEL)), Tape(MODEL.vocabulary, (70, 71))
    planner = Counting(SpeculationParameters(), estimates_of(TargetEstimates(), None))
    with closing(TargetSession(MODEL, scheduler, tiny.sampler(MODEL))) as session:
        link, sources = TargetLink(session, MODEL, tape, 9), SourceSet((), MODEL, None)
        outcomes = [outcome async for outcome in speculate(link, sources, planner, Statistics())]
    scheduler.close()
    assert planner.count == len(outcomes) == tape.generated_token_count


def test_the_loop_fits_on_a_screen() -> None:
    source, file = inspect.getsource(speculate), Path(inspect.getfile(speculate)).read_text()
    assert len(source.splitlines()) <= 60
    assert len(file.splitlines()) <= 150
