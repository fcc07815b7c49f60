"""What the planner learns and predicts, and which way it takes: where costs and chances are known."""

import random
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest

from bridge.planning.chances import Chances, RequestChances
from bridge.planning.costs import Ewma, ForwardTime, WidthCost
from bridge.planning.estimates import DraftEstimates, RequestEstimates, TargetEstimates
from bridge.planning.planner import MAX_CANDIDATES, Mode, Planner, SpeculationParameters
from bridge.planning.prediction import (
    DraftCosts,
    Plan,
    Prediction,
    TargetCosts,
    ahead,
    best_width,
    in_turns,
    plain,
    with_candidates,
)
from bridge.ports import Pass, Proposal
from bridge.sources.source import CandidateSource, Offer, Outcome, SourceState
from bridge.sources.suffix import SuffixSource
from bridge.sources.suffix_index import SuffixMatcher
from bridge.tape import Tape
from tests.support import tiny

MS = 1_000_000
# What forwards take by their number of tokens, in milliseconds.
FLAT = {width: 9.7 + 0.3 * width for width in range(1, 65)}
STEEP = {1: 5.5} | {width: 7.0 + 0.8 * width for width in range(2, 65)}
HOPELESS = {width: 10.0 * width for width in range(1, 65)}


def measured(times: dict[int, float]) -> list[tuple[int, int]]:
    return [(width, int(times[width] * MS)) for width in (1, 2, 3, 5, 9, 17, 25)]


class Draft:
    """A source that takes time, of which the planner only knows where it stands."""

    name = "draft"
    evidence_edges = (0.3, 0.5, 0.7, 0.9, 0.97)
    prior_chances = (0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
    takes_time = True


class Simulated:
    """A request whose target and draft behave as they are told, in place of the loop.

    `right`: the chance of a candidate; `draft_ms`: of a token of the draft; `slowdown`: of the target meanwhile.
    `match`: the length of the suffix match that there always is, or None.
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
        sources: list[CandidateSource] = [SuffixSource(SuffixMatcher())]
        if draft:
            sources.append(Draft())  # type: ignore[arg-type]
        self.planner = Planner(SpeculationParameters(mode), RequestEstimates(shared, sources, draft))
        self._times, self._right, self._draft, self._draft_ms = times, right, draft, draft_ms
        self._slowdown, self._match, self._noise = slowdown, match, random.Random(seed)
        self._runs_ahead = False
        self.tokens, self.candidates, self.ns, self.names = 0, 0, 0.0, []

    def run(self, passes: int) -> float:
        """Tokens in a millisecond over so many passes."""
        before = self.tokens, self.ns
        for _ in range(passes):
            self._pass()
        return (self.tokens - before[0]) / (self.ns - before[1]) * MS

    def _pass(self) -> None:
        ids = tuple(range(6 * MAX_CANDIDATES))
        suffix = Offer(ids, ("suffix",) * len(ids), (float(self._match),) * len(ids)) if self._match else Offer()
        offers = [suffix] if self._match else []
        state = SourceState(runs_ahead=self._runs_ahead) if self._draft else None
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
        offer, width = self.planner.choose(offers, plan)
        tried = offer.part(0, width)
        self.candidates += width
        accepted = next((place for place in range(width) if self._noise.random() > self._right), width)
        taken_ms = self._times[width + 1] * (self._slowdown if plan.runs_ahead else 1.0)
        elapsed_ns = int((taken_ms + waited_ms) * MS)
        result = Pass(
            0, ids[: accepted + 1], accepted, width, forward_ns=int(taken_ms * MS), waited_ns=int(waited_ms * MS)
        )
        self.planner.observe(Outcome(result, tried, (b"abcd",) * (accepted + 1), elapsed_ns), plan)
        self.tokens, self.ns = self.tokens + accepted + 1, self.ns + elapsed_ns


def expected(right: float, count: int) -> float:
    return sum(right**index for index in range(count + 1))


def test_an_average_begins_with_its_first_value() -> None:
    average = Ewma(100.0)
    average.observe(10.0)
    assert average.value == 10.0
    average.observe(20.0)
    assert average.value == 15.0


@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_a_forward_costs_what_such_forwards_have_cost(times: dict[int, float]) -> None:
    cost, noise = ForwardTime(WidthCost(), 0.0), random.Random(0)
    for _ in range(600):
        width = noise.choice([1, 1, 1, 2, 3, 5, 9, 17])
        cost.observe(width, times[width] * MS * noise.uniform(0.9, 1.1))
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width) == pytest.approx(times[width] * MS, rel=0.12)


def test_what_a_service_measured_is_expected_from_the_start() -> None:
    cost = ForwardTime(WidthCost.measured(measured(STEEP)), STEEP[1] * MS)
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width) == pytest.approx(STEEP[width] * MS, rel=0.05)
    for nonsense in ([], [(5, 7)], [(1, 0), (2, 5)], [(2, 5), (4, 6)]):
        assert WidthCost.measured(nonsense) == WidthCost()
    assert WidthCost.measured([(1, 10), (5, 2), (9, 30)]).of(5) == 1.0, "a wider forward never costs less"


def test_one_forward_that_took_long_does_not_count_for_many() -> None:
    cost = ForwardTime(WidthCost(), 0.0)
    for _ in range(20):
        cost.observe(1, 10 * MS)
    cost.observe(1, 1000 * MS)
    assert cost.of(1) < 13 * MS


def test_matches_of_some_length_do_not_speak_for_others() -> None:
    chances = Chances((8, 16, 32), (0.3, 0.5, 0.65, 0.8))
    for _ in range(100):
        chances.observe(5, 0)
        chances.observe(40, 1)
    assert chances.of(5) < 0.05
    assert chances.of(40) > 0.95
    assert RequestChances(chances).of(40) == pytest.approx(chances.of(40))


def test_a_request_shifts_all_chances_and_forgets() -> None:
    shared = Chances((8,), (0.5, 0.8))
    noise = random.Random(0)
    for _ in range(400):
        shared.observe(5, noise.random() < 0.5)
    before = [shared.of(5), shared.of(10)]
    request = RequestChances(shared)
    for _ in range(40):
        request.observe(5, 0)
    assert request.of(5) < 0.5 * before[0]
    assert request.of(10) < 0.8 * before[1], "what is wrong here is wrong with any evidence"
    assert RequestChances(shared).of(10) == pytest.approx(before[1])
    for _ in range(600):
        request.fade()
    assert request.of(10) == pytest.approx(shared.of(10), rel=0.02)


@pytest.mark.parametrize("times", [FLAT, STEEP])
@pytest.mark.parametrize("right", [0.05, 0.3, 0.6, 0.95])
def test_the_number_of_candidates_maximises_the_speed(times: dict[int, float], right: float) -> None:
    costs = TargetCosts(tuple(times[width] * MS for width in range(1, 26)), 0.5 * MS)
    count = best_width([right] * 24, costs)
    prediction = with_candidates([right] * count, costs)
    speeds = [expected(right, count) / times[count + 1] / MS for count in range(25)]
    assert prediction.tokens_per_ns == pytest.approx(max(speeds))
    assert speeds[count] == max(speeds)


def _draft_costs(right: float, draft_ms: float, slowdown: float = 1.0, round_trip_ms: float = 1.0) -> DraftCosts:
    survival = tuple(accumulate([right] * MAX_CANDIDATES, mul))
    return DraftCosts(
        draft_ms * MS, draft_ms * slowdown * MS, draft_ms * MS, 0.0, round_trip_ms * MS, slowdown, 1.0, survival
    )


def test_a_turn_costs_its_tokens_and_the_way_there_and_back() -> None:
    costs, draft = TargetCosts(tuple(FLAT[width] * MS for width in range(1, 26)), 0.5 * MS), _draft_costs(0.7, 2.0)
    found = in_turns(costs, draft, 4)
    assert found.tokens == pytest.approx(expected(0.7, 4))
    assert (found.waited_ns, found.ns) == (9.5 * MS, (9.5 + FLAT[5]) * MS)
    assert plain(costs).tokens_per_ns == 1 / (FLAT[1] * MS)


def test_a_draft_that_cannot_get_ahead_gains_nothing_and_slows_the_target_down() -> None:
    costs = TargetCosts(tuple(FLAT[width] * MS for width in range(1, 26)), 0.5 * MS)
    assert ahead(costs, _draft_costs(0.9, 12.0), 8, 0).tokens_per_ns == plain(costs).tokens_per_ns
    slow = ahead(costs, _draft_costs(0.9, 6.0, slowdown=2.5), 8, 0)
    assert slow.tokens_per_ns < ahead(costs, _draft_costs(0.9, 6.0), 8, 0).tokens_per_ns


@pytest.mark.parametrize(
    ("right", "draft_ms", "slowdown", "best"),
    [
        (0.8, 2.0, 1.0, "draft ahead"),  # a core of its own: it loses nothing by running on
        (0.8, 2.0, 2.0, "draft in turns"),  # the same cores: it slows the target down
        (0.2, 9.0, 1.0, "plain"),
        (0.2, 6.0, 2.0, "plain"),
    ],
)
def test_the_best_way_to_use_a_draft_is_taken_soon_and_kept(
    right: float, draft_ms: float, slowdown: float, best: str
) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, int(draft_ms * MS))])
    for request in range(6):
        simulated = Simulated(shared, FLAT, right, draft=draft, draft_ms=draft_ms, slowdown=slowdown, seed=request)
        simulated.run(60)
        taken = [name for name in simulated.names if name.startswith(best)]
        assert len(taken) > (45 if request else 35), simulated.names


def test_what_a_draft_costs_the_target_is_tried_for_a_few_passes_and_not_in_every_request() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    tried = []
    for request in range(10):
        simulated = Simulated(shared, FLAT, 0.7, draft=draft, slowdown=3.0, seed=request)
        simulated.run(60)
        tried.append(sum(name == "draft ahead" for name in simulated.names))
    assert tried[0] <= 8
    assert sum(tried[1:]) == 0


def test_one_bad_pass_does_not_rule_out_a_draft_that_runs_ahead() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, 2 * MS)])
    Simulated(shared, FLAT, 0.8, draft=draft, draft_ms=2.0).run(20)
    draft.slowdown.observe(30.0)
    requests = [Simulated(shared, FLAT, 0.8, draft=draft, draft_ms=2.0, seed=request) for request in range(40)]
    for one in requests:
        one.run(40)
    assert requests[-1].names.count("draft ahead") > 30


def test_a_source_that_failed_for_long_is_used_when_it_is_right_again() -> None:
    shared = TargetEstimates(measured(FLAT))
    Simulated(shared, FLAT, 0.0, match=20).run(300)
    late = [Simulated(shared, FLAT, 0.95, match=20, seed=request) for request in range(40)]
    for one in late:
        one.run(60)
    assert late[-1].names.count("suffix") > 50


def test_times_that_cannot_be_do_no_harm() -> None:
    shared = TargetEstimates([(1, 0), (1, 5), (1, 7), (2, 2**63)])
    draft = shared.draft("draft", [(3, 1), (3, 2)])
    for forward_ns in (0, 1, 2**40):
        draft.observe_proposal(Proposal(1, (1, 2), (), forward_ns=forward_ns, read_token_count=3), forward_ns, False)
    planner = Planner(SpeculationParameters(), RequestEstimates(shared, [Draft()], draft))  # type: ignore[list-item]
    for forward_ns in (0, 0, 2**40, 0):
        plan = planner.plan((), SourceState())
        assert plan.patience_ns >= 0 and plan.prediction.tokens_per_ns > 0
        planner.observe(Outcome(Pass(0, (1,), 0, 0, forward_ns=forward_ns), Offer(), (b"a",), forward_ns), plan)


def test_drafts_are_told_apart() -> None:
    shared = TargetEstimates(measured(FLAT))
    good, bad = shared.draft("good", [(1, MS)]), shared.draft("bad", [(1, MS)])
    for request in range(4):
        Simulated(shared, FLAT, 0.9, draft=good, seed=request).run(80)
        Simulated(shared, FLAT, 0.05, draft=bad, seed=request).run(80)
    assert good.chances_of(Draft()).of(0.8) > 0.8  # type: ignore[arg-type]
    assert bad.chances_of(Draft()).of(0.8) < 0.2  # type: ignore[arg-type]
    again = Simulated(shared, FLAT, 0.9, draft=good)
    again.run(1)
    assert again.names[0].startswith("draft")


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_the_prediction_is_close_to_what_is_measured(right: float, times: dict[int, float]) -> None:
    shared = TargetEstimates(measured(times))
    draft = shared.draft("draft", [(1, MS)])
    predicted = 0.0
    for request in range(5):
        simulated = Simulated(shared, times, right, draft=draft, slowdown=3.0, seed=request)
        simulated.run(40)
        speed = simulated.run(200)
        plan = simulated.planner.plan((), SourceState())
        predicted = plan.prediction.tokens_per_ns * MS
    assert predicted == pytest.approx(speed, rel=0.15)


def test_passes_of_other_requests_are_waited_for() -> None:
    """A forward of all: what one request adds to it costs each of them."""
    counts = []
    for others in (0, 1, 15):
        shared = TargetEstimates(measured(STEEP))
        with ExitStack() as stack:
            for _ in range(others + 1):
                stack.enter_context(shared.request())
            simulated = Simulated(shared, STEEP, 0.9, match=40)
            simulated.run(60)
            offer = Offer((1,) * 24, ("suffix",) * 24, (40.0,) * 24)
            counts.append(simulated.planner.choose([offer], simulated.planner.plan([offer], None))[1])
    assert counts[0] >= counts[1] > counts[2] == 0
    assert shared.load == 1


@pytest.mark.parametrize("right", [0.1, 0.95])
def test_what_did_not_pay_is_tried_now_and_then(right: float) -> None:
    """Each pass has a match; the target's widths cost a lot at first, and then next to nothing."""
    shared = TargetEstimates(measured(HOPELESS))
    costly = [Simulated(shared, HOPELESS, 0.1, match=20, seed=request) for request in range(40)]
    speed = sum(one.run(30) for one in costly) / 40
    assert speed > 0.97 / HOPELESS[1], "trying costs next to nothing"
    assert 5 < sum(one.candidates for one in costly) < 20
    cheap = [Simulated(shared, FLAT, right, match=20, seed=request) for request in range(120)]
    speeds = [one.run(30) for one in cheap][-20:]
    assert (sum(speeds) / 20 > 1.5 / FLAT[1]) == (right > 0.5)
    assert sum(speeds) / 20 > 0.9 / FLAT[1]


@pytest.mark.parametrize("right", [0.3, 0.6])
def test_widths_that_become_expensive_are_noticed(right: float) -> None:
    """Every pass has a match, so that none is of one token by itself."""
    shared = TargetEstimates(measured(FLAT))
    for request in range(20):
        Simulated(shared, FLAT, right, match=20, seed=request).run(60)
    late = [Simulated(shared, HOPELESS, right, match=20, seed=request).run(60) for request in range(60)]
    assert sum(late[-20:]) / 20 > 0.93 / HOPELESS[1]


def test_the_target_waits_for_the_bridge_only_while_that_gains() -> None:
    shared = TargetEstimates(measured(FLAT))
    simulated = Simulated(shared, FLAT, 0.9, match=64)
    assert simulated.planner.plan((), None).patience_ns == 0
    simulated.run(20)
    assert simulated.planner.plan((), None).patience_ns >= 1.5 * MS
    empty = Simulated(shared, FLAT, 0.9)
    empty.run(20)
    assert empty.planner.plan((), None).patience_ns == 0


def test_it_gives_up_waiting_for_a_bridge_that_is_far_away() -> None:
    """Candidates that would gain 10 ms and never come within it."""
    shared = TargetEstimates(measured(FLAT))
    planner = Planner(SpeculationParameters(), RequestEstimates(shared, [SuffixSource(SuffixMatcher())]))
    offer = Offer((1,) * 24, ("suffix",) * 24, (64.0,) * 24)
    waits = []
    for _ in range(60):
        plan = planner.plan([offer], None)
        waits.append(plan.patience_ns)
        waited_ns = int(plan.patience_ns)
        result = Pass(0, (1,), 0, 0, forward_ns=10 * MS, waited_ns=waited_ns)
        planner.observe(Outcome(result, Offer(), (b"a",), 10 * MS + waited_ns, waited_ns > 0), plan)
    assert 0 < max(waits) < 200 * MS
    assert waits[-1] == 0


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_fixed_modes_are_constant(turns: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    sources: list[CandidateSource] = [Draft()]  # type: ignore[list-item]
    for mode in (Mode.LOCKSTEP, Mode.OPPORTUNISTIC):
        planner = Planner(SpeculationParameters(mode, turns), RequestEstimates(shared, sources, draft))
        plan = planner.plan((), SourceState())
        assert (plan.pace.lead, plan.pace.turns, plan.patience_ns > 0) == (
            turns,
            mode is Mode.LOCKSTEP,
            mode is Mode.LOCKSTEP,
        )
        offer = Offer((1,) * turns, ("draft",) * turns, (0.01,) * turns)
        assert planner.choose([offer], plan) == (offer, turns)
        assert planner.plan((), SourceState(overdue=True)).pace.lead == 0
    off = Planner(SpeculationParameters(Mode.OFF), RequestEstimates(shared))
    assert off.plan((), None).pace.lead == 0


@pytest.mark.parametrize(
    ("draft_ms", "right", "least", "most"), [(0.1, 0.9, 8, 64), (4.0, 0.6, 1, 2), (1.0, 0.7, 2, 7)]
)
def test_lockstep_takes_the_planners_number(draft_ms: float, right: float, least: int, most: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, int(draft_ms * MS))])
    simulated = Simulated(shared, FLAT, right, draft=draft, draft_ms=draft_ms, mode=Mode.LOCKSTEP)
    simulated.run(150)
    assert least <= simulated.planner.plan((), SourceState()).pace.lead <= most


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.LOCKSTEP])
def test_a_draft_on_the_targets_cores_starts_when_the_target_waits(mode: Mode) -> None:
    """Where both compute at once each takes several times as long, so that is not even tried."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)], competes=True)
    simulated = Simulated(shared, FLAT, 0.8, draft=draft, slowdown=9.0, mode=mode)
    first = simulated.planner.plan((), SourceState(lag_token_count=100))
    assert first.pace.lead == 0 and first.patience_ns > 10 * MS, "the target reads its prompt alone, then waits"
    simulated.run(60)
    assert simulated.names[0] == "plain"
    assert all(name.startswith("draft in turns") for name in simulated.names[1:])
    assert draft.slowdown.count == 1, "nobody has tried"


def test_to_read_the_prompt_does_not_keep_a_draft_from_being_used() -> None:
    """It costs what twenty passes do, once; in a text of three tokens it is not worth that."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS), (2, 2 * MS), (25, 25 * MS)], competes=True)
    planner = Planner(SpeculationParameters(), RequestEstimates(shared, [Draft()], draft))  # type: ignore[list-item]
    planner.observe(Outcome(Pass(0, (1,), 0, 0), Offer(), (b"abcd",)), Plan("plain", Prediction(1.0, 1.0)))
    state = SourceState(lag_token_count=200)
    assert planner.plan((), state, 500).prepares_turn
    assert not planner.plan((), state, 3).prepares_turn


def test_predictions_are_corrected_by_what_came_of_them() -> None:
    """Half of the candidates come too late, which no chance tells."""
    shared = TargetEstimates(measured(FLAT))
    planner = Planner(SpeculationParameters(), RequestEstimates(shared, [SuffixSource(SuffixMatcher())]))
    offer = Offer((1,) * 8, ("suffix",) * 8, (64.0,) * 8)
    before = planner.plan([offer], None)
    for number in range(100):
        plan = planner.plan([offer], None)
        accepted = 8 if number % 2 else 0
        tried = offer if accepted else Offer()
        result = Pass(0, (1,) * (accepted + 1), accepted, accepted, forward_ns=10 * MS)
        planner.observe(Outcome(result, tried, (b"abcd",) * (accepted + 1), 10 * MS), plan)
    after = planner.plan([offer], None)
    assert before.name == after.name == "suffix"
    assert before.prediction.tokens > 6
    assert after.prediction.tokens == pytest.approx(5, rel=0.15)


@pytest.mark.parametrize(
    ("target", "draft", "competes"),
    [(({"a/0", "a/1"}, 2), ({"a/0", "a/1"}, 2), True), (({"a/0"}, 1), ({"a/1"}, 1), False),
     (({"a/0", "a/1"}, 1), ({"a/0", "a/1"}, 1), False), (({"a/0", "a/1"}, 2), ({"b/0", "b/1"}, 2), False),
     (({"a/gpu"}, 1), ({"a/0", "a/gpu"}, 1), False), (({"a/gpu"}, 1), ({"a/gpu"}, 1), True),
     ((set(), 0), (set(), 0), False)],
)  # fmt: skip
def test_models_compete_for_more_cores_than_there_are(
    target: tuple[set[str], int], draft: tuple[set[str], int], competes: bool
) -> None:
    one, other = (
        replace(tiny.model("byte_level"), compute_units=frozenset(units), compute_unit_count=count)
        for units, count in (target, draft)
    )
    assert one.competes_with(other) is other.competes_with(one) is competes


def test_asking_changes_nothing() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    simulated = Simulated(shared, FLAT, 0.6, draft=draft, match=20)
    simulated.run(30)
    offer = Offer((1,) * 24, ("suffix",) * 24, (20.0,) * 24)
    first = [simulated.planner.plan([offer], SourceState(lag_token_count=lag)) for lag in (1, 9)]
    for _ in range(50):
        simulated.planner.choose([offer], first[0])
        simulated.planner.summary(SourceState())
    assert [simulated.planner.plan([offer], SourceState(lag_token_count=lag)) for lag in (1, 9)] == first


def test_the_summary_names_every_way_with_its_speed() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    simulated = Simulated(shared, FLAT, 0.7, draft=draft, slowdown=2.0)
    assert simulated.planner.summary(SourceState()) == ""
    simulated.run(60)
    text = simulated.planner.summary(SourceState())
    expected = r"predicted tokens/s: plain (99|100)\.\d, draft in turns of \d \d+\.\d, draft ahead \d+\.\d; "
    assert re.match(expected, text)
    assert "an 8-token pass costs 1.2x a 1-token pass" in text
    assert "a pass takes" in text


def test_a_tape_of_control_tokens_has_no_bytes_to_plan_by() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    planner = Planner(SpeculationParameters(), RequestEstimates(shared, [Draft()], draft))  # type: ignore[list-item]
    for _ in range(200):
        plan = planner.plan((), SourceState())
        planner.observe(Outcome(Pass(0, (1,), 0, 0, forward_ns=MS), Offer(), (b"",), MS), plan)
    assert planner.plan((), SourceState()).prediction.tokens_per_ns > 0
    assert isinstance(Tape, type)
