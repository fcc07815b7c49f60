"""A simulated request with parameters for its target and draft, so that the planner can be tested without either."""

import random
from collections.abc import Sequence

from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import MAX_CANDIDATES, Mode, Planner, SpeculationParameters
from bridge.ports import Pass, Proposal
from bridge.sources.source import CandidateSource, DraftState, Offer, Outcome
from bridge.sources.suffix import SuffixSource
from bridge.sources.token_lookup import confidence
from bridge.tape import Tape
from tests.support import tiny

MS = 1_000_000
# Milliseconds of a forward, by its number of tokens.
FLAT = {width: 9.7 + 0.3 * width for width in range(1, 65)}
STEEP = {1: 5.5} | {width: 7.0 + 0.8 * width for width in range(2, 65)}
# An id that no source proposes.
_WRONG = 999_999
HOPELESS = {width: 10.0 * width for width in range(1, 65)}


def measured(times: dict[int, float]) -> list[tuple[int, int]]:
    return [(width, int(times[width] * MS)) for width in (1, 2, 3, 5, 9, 17, 25)]


def estimates_of(
    shared: TargetEstimates, draft: DraftEstimates | None, sources: Sequence[CandidateSource] = ()
) -> RequestEstimates:
    estimates = RequestEstimates(shared, sources)
    if draft:
        estimates.use_draft(draft)
    return estimates


class Simulated:
    """Takes the place of the loop; its target and draft follow the parameters.

    `right`: the chance that a candidate is right; `draft_ms`: per draft token; `slowdown`: of the target meanwhile.
    `match`: the tokens of the suffix match of every pass, or None.
    """

    def __init__(
        self,
        shared: TargetEstimates,
        times: dict[int, float],
        right: float,
        *,
        draft: DraftEstimates | None = None,
        draft_ms: float = 1.0,
        slowdown: float = 1.0,
        match: int | None = None,
        mode: Mode = Mode.AUTO,
        seed: int = 0,
    ) -> None:
        sources = [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))]
        self.planner = Planner(SpeculationParameters(mode), estimates_of(shared, draft, sources))
        self._times, self._right, self._draft, self._draft_ms = times, right, draft, draft_ms
        self._slowdown, self._match, self._noise = slowdown, match, random.Random(seed)
        self._runs_ahead = False
        self.tokens, self.candidates, self.ns, self.names = 0, 0, 0.0, []

    def run(self, passes: int) -> float:
        """Returns the tokens per millisecond over the given number of passes."""
        before = self.tokens, self.ns
        for _ in range(passes):
            self._pass()
        return (self.tokens - before[0]) / (self.ns - before[1]) * MS

    def _pass(self) -> None:
        ids = tuple(range(6 * MAX_CANDIDATES))
        offers = []
        if self._match:
            evidence = tuple(confidence(self._match + place) for place in range(len(ids)))
            offers.append(Offer(ids, ("suffix",) * len(ids), evidence))
        state = DraftState(runs_ahead=self._runs_ahead) if self._draft else None
        plan = self.planner.plan(offers, state)
        self._runs_ahead = plan.runs_ahead
        self.names.append(plan.description)
        waited_ms = 0.0
        if plan.pace.lead and self._draft:
            count = plan.pace.lead if plan.pace.turns else 2
            offers = [Offer(ids[:count], ("draft",) * count, (0.8,) * count), *offers]
            waited_ms = 1.0 + count * self._draft_ms if plan.pace.turns else 0.0
            forward_ns = int(self._draft_ms * MS * (1 if plan.pace.turns else self._slowdown))
            self._draft.observe_proposal(
                Proposal(1, ids[:count], (), forward_ns=count * forward_ns, read_ns=forward_ns, read_token_count=1),
                400_000,
                plan.runs_ahead,
            )
            if plan.pace.min_probability:  # which this draft ignores
                self._draft.observe_turn(count, ended_early=False)
        offer, width = self.planner.choose(offers, plan)
        tried = offer.part(0, width)
        self.candidates += width
        right = next((place for place in range(len(ids)) if self._noise.random() > self._right), len(ids))
        accepted = min(right, width)
        if self._draft and plan.pace.min_probability:
            drafted = tried.sources.count("draft")
            self._draft.observe_verified_turn(drafted, min(accepted, drafted), ended_early=False)
        taken_ms = self._times[width + 1] * (self._slowdown if plan.runs_ahead else 1.0)
        elapsed_ns = int((taken_ms + waited_ms) * MS)
        result = Pass(
            0,
            (*ids[:accepted], accepted if accepted < right else _WRONG),
            accepted,
            width,
            forward_ns=int(taken_ms * MS),
            waited_ns=int(waited_ms * MS),
        )
        self.planner.estimates.observe(Outcome(result, tried, (b"abcd",) * (accepted + 1), elapsed_ns), plan, offers)
        self.tokens, self.ns = self.tokens + accepted + 1, self.ns + elapsed_ns
