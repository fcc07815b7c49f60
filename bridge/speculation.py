"""Decides for one sequence which candidates its next pass gets: its sources, its planner, and the present plan.

The verification loop uses it for our own targets, `guest` for engines that keep their own loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.planning.planner import Planner
from bridge.sources.source import MAX_OFFERED_BYTES, Offer, Outcome
from bridge.sources.source_set import SourceSet
from bridge.statistics import Statistics

# A plan that needs nothing is kept for this many passes while no source offers anything that is worth sending.
_KEPT_PASSES = 3


@dataclass(frozen=True)
class Choice:
    """The offer to send, and how many of its candidates one pass takes. `awaited`: a source will propose more soon."""

    offer: Offer = Offer()
    width: int = 0
    awaited: bool = False


class Speculation:
    """Holds the sources of one sequence and its plan. `room`: the number of candidates that are still useful."""

    def __init__(self, sources: SourceSet, planner: Planner, statistics: Statistics, room: int) -> None:
        self.sources, self.planner, self.statistics = sources, planner, statistics
        self.plan = planner.plan((), sources.state, room)
        self.offers: Sequence[Offer] = ()
        self._kept_pass_count = _KEPT_PASSES  # the first pass shows what the plans cost
        self._nothing_to_send = False  # whether none of the present offers is worth sending

    @property
    def stale(self) -> bool:
        """Returns whether the draft's present work has become useless."""
        return self.sources.stale

    def observe(self, outcome: Outcome) -> None:
        """Reports a pass, and so which of the present offers' candidates were right."""
        self.sources.observe(outcome)
        self.planner.estimates.observe(outcome, self.plan, self.offers)
        self.statistics.observe(outcome, self.plan)

    def refresh(self, limit_bytes: int = MAX_OFFERED_BYTES) -> None:
        """Lets a new source take over, and asks all for their offers, which translate no more bytes than the limit."""
        before = self.sources.draft
        self.sources.take_over()
        if self.sources.draft is not before:  # the present plan was made without it
            self._kept_pass_count = _KEPT_PASSES
        self.offers, self._nothing_to_send = self.sources.offers(limit_bytes), False

    async def replan(self, room: int) -> None:
        """Plans the next pass from the present offers, and lets the sources work accordingly.

        Planning takes processor time, which a target may need: a draft that gains nothing must not slow it down.
        """
        may_keep = self.plan.rests and self._kept_pass_count < _KEPT_PASSES
        self._nothing_to_send = may_keep and not self.planner.is_worth_sending(self.offers)
        if self._nothing_to_send:
            self._kept_pass_count += 1
            return
        self._kept_pass_count = 0
        self.plan = self.planner.plan(self.offers, self.sources.state, room)
        await self.sources.advance(self.plan.pace)

    def choose(self) -> Choice:
        """Returns the best of the present offers; nothing while draft and target take turns and it is the draft's."""
        if self._nothing_to_send:
            return Choice()
        state = self.sources.state
        awaited = self.plan.pace.lead > 0 and state is not None and state.awaited
        if awaited and self.plan.pace.turns:
            return Choice(awaited=True)
        return Choice(*self.planner.choose(self.offers, self.plan), awaited)
