"""Tests what the planner learns, predicts and chooses where costs and chances are known."""

import pickle
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import MAX_CANDIDATES, Mode, Planner, SpeculationParameters
from bridge.planning.prediction import (
    DraftCosts,
    Plan,
    Prediction,
    TargetCosts,
    ahead,
    best_turn,
    best_width,
    in_turns,
    min_turn_probability,
    plain,
    with_candidates,
)
from bridge.ports import Pass, Proposal
from bridge.sources.source import DraftState, Offer, Outcome
from bridge.sources.suffix import SuffixSource
from bridge.tape import Tape
from tests.support import tiny
from tests.support.simulated import FLAT, MS, STEEP, Simulated, estimates_of, measured


def expected(right: float, count: int) -> float:
    return sum(right**index for index in range(count + 1))


@pytest.mark.parametrize("times", [FLAT, STEEP])
@pytest.mark.parametrize("right", [0.05, 0.3, 0.6, 0.95])
def test_the_number_of_candidates_maximises_the_speed(times: dict[int, float], right: float) -> None:
    costs = TargetCosts(MS, [times[width] for width in range(1, 26)], 0.5 * MS)
    count = best_width([right] * 24, costs)
    prediction = with_candidates([right] * count, costs)
    speeds = [expected(right, count) / times[count + 1] / MS for count in range(25)]
    assert prediction.tokens_per_ns == pytest.approx(max(speeds))
    assert speeds[count] == max(speeds)


@given(
    chances=st.lists(st.floats(0.01, 0.99), max_size=30),
    steps=st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24),
)
def test_no_other_number_of_candidates_is_faster(chances: list[float], steps: list[float]) -> None:
    """Whatever the chances that are not asked for are."""
    costs = TargetCosts(MS, list(accumulate(steps, initial=1.0)), 0.5 * MS)
    count = best_width(iter(chances), costs)
    speeds = [with_candidates(chances[:width], costs).tokens_per_ns for width in range(min(len(chances), 24) + 1)]
    assert speeds[count] == pytest.approx(max(speeds))


def test_chances_that_cannot_matter_are_not_asked_for() -> None:
    asked = iter([0.05] * 24)
    assert best_width(asked, TargetCosts(MS, [STEEP[width] for width in range(1, 26)], 0.5 * MS)) == 0
    assert len(list(asked)) > 20


def _draft_costs(right: float, draft_ms: float, slowdown: float = 1.0, round_trip_ms: float = 1.0) -> DraftCosts:
    survival = tuple(accumulate([right] * MAX_CANDIDATES, mul))
    return DraftCosts(
        draft_ms * MS, draft_ms * slowdown * MS, draft_ms * MS, 0.0, round_trip_ms * MS, slowdown, 1.0, survival
    )


def test_a_turn_costs_its_tokens_and_the_way_there_and_back() -> None:
    costs, draft = TargetCosts(MS, [FLAT[width] for width in range(1, 26)], 0.5 * MS), _draft_costs(0.7, 2.0)
    found = in_turns(costs, draft, 4)
    assert found.tokens == pytest.approx(expected(0.7, 4))
    assert (found.waited_ns, found.ns) == (9.5 * MS, (9.5 + FLAT[5]) * MS)
    assert plain(costs).tokens_per_ns == 1 / (FLAT[1] * MS)


def test_a_turn_that_may_end_early_takes_less_time_but_may_take_all_of_it() -> None:
    """Of turns of 4 tokens, 40% end after 1 and 30% after 2; all candidates of those that go on are right."""
    costs = TargetCosts(MS, [FLAT[width] for width in range(1, 26)], 0.5 * MS)
    survival = (0.8, 0.5, 0.3, 0.3)
    draft = replace(_draft_costs(0.7, 2.0), turn_survival=survival, turn_lengths=(1.0, 1.6, 1.9, 2.2))
    found = in_turns(costs, draft, 4)
    assert found.tokens == pytest.approx(1 + sum(survival))
    assert found.ns == pytest.approx((1.5 + 2.0 + 1.2 * 2.0 + FLAT[3]) * MS)
    assert found.waited_ns == in_turns(costs, _draft_costs(0.7, 2.0), 4).waited_ns, "patience is for the longest turn"


@pytest.mark.parametrize("draft_ms", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("target_tokens", [1, 2, 3])
def test_a_turn_ends_where_another_token_takes_longer_than_it_saves(
    draft_ms: float, right: float, target_tokens: int
) -> None:
    """Of turns whose token `i` is right with a known chance, the one that ends by the rule is the fastest."""
    costs = TargetCosts(MS, [FLAT[width] for width in range(1, 26)], 0.5 * MS)
    chances = [right, 0.9, right, right, 0.95, right, right / 2, right, right / 3]
    likelihoods = list(accumulate(chances, mul))
    # By candidate: a draft token makes one or several.
    survival = tuple(likelihoods[place // target_tokens] for place in range(len(chances) * target_tokens))
    draft = replace(_draft_costs(0.7, draft_ms), survival=survival, target_tokens=target_tokens)
    found = [in_turns(costs, draft, count) for count in range(1, len(chances) + 1)]
    best = max(found, key=lambda one: one.tokens_per_ns)
    least = min_turn_probability(costs, draft, found.index(best) + 1, best)
    ended = next((count for count, one in enumerate(likelihoods, start=1) if one < least), len(likelihoods))
    assert found[ended - 1].tokens_per_ns > 0.9 * best.tokens_per_ns


@pytest.mark.parametrize("times", [FLAT, STEEP])
@pytest.mark.parametrize("target_tokens", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("max_wait_ms", [5.0, 1e9])
def test_the_search_for_the_best_turn_finds_it(
    times: dict[int, float], target_tokens: float, max_wait_ms: float
) -> None:
    costs, leads = TargetCosts(MS, [times[width] for width in range(1, 26)], 0.5 * MS), (1, 2, 3, 4, 6, 8, 12, 16, 24)
    found_leads = set()
    for right in (0.05, 0.3, 0.6, 0.8, 0.97):
        for draft_ms in (0.05, 0.5, 2.0, 10.0, 40.0):
            draft = replace(_draft_costs(right, draft_ms), target_tokens=target_tokens)
            turns = {lead: in_turns(costs, draft, lead) for lead in leads}
            allowed = [lead for lead in leads if turns[lead].waited_ns <= max_wait_ms * MS] or leads[:1]
            lead, found = best_turn(costs, draft, leads, max_wait_ms * MS)
            assert found == turns[lead]
            assert found.tokens_per_ns == max(turns[lead].tokens_per_ns for lead in allowed)
            found_leads.add(lead)
    assert len(found_leads) > 2


def test_a_draft_that_cannot_get_ahead_gains_nothing_and_slows_the_target_down() -> None:
    costs = TargetCosts(MS, [FLAT[width] for width in range(1, 26)], 0.5 * MS)
    assert ahead(costs, _draft_costs(0.9, 12.0), 8).tokens_per_ns == plain(costs).tokens_per_ns
    slow = ahead(costs, _draft_costs(0.9, 6.0, slowdown=2.5), 8)
    assert slow.tokens_per_ns < ahead(costs, _draft_costs(0.9, 6.0), 8).tokens_per_ns


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
        plan = simulated.planner.plan((), DraftState())
        predicted = plan.prediction.tokens_per_ns * MS
    assert predicted == pytest.approx(speed, rel=0.15)


def test_passes_of_other_requests_are_waited_for() -> None:
    """Requests share forwards, so that the tokens which one of them adds delay all."""
    counts = []
    for others in (0, 1, 15):
        shared = TargetEstimates(measured(STEEP))
        with ExitStack() as stack:
            for _ in range(others + 1):
                stack.enter_context(shared.request())
            simulated = Simulated(shared, STEEP, 0.9, match=10)
            simulated.run(60)
            offer = Offer((1,) * 24, ("suffix",) * 24, (40.0,) * 24)
            counts.append(simulated.planner.choose([offer], simulated.planner.plan([offer], None))[1])
    assert counts[0] >= counts[1] > counts[2] == 0
    assert shared.load == 1


def test_the_target_waits_for_the_bridge_only_while_that_gains() -> None:
    shared = TargetEstimates(measured(FLAT))
    simulated = Simulated(shared, FLAT, 0.9, match=16)
    assert simulated.planner.plan((), None).patience_ns == 0
    simulated.run(20)
    assert simulated.planner.plan((), None).patience_ns >= 1.5 * MS
    empty = Simulated(shared, FLAT, 0.9)
    empty.run(20)
    assert empty.planner.plan((), None).patience_ns == 0


def test_it_gives_up_waiting_for_a_bridge_that_is_far_away() -> None:
    """The candidates would gain 10 ms, but always arrive later than that."""
    shared = TargetEstimates(measured(FLAT))
    planner = Planner(
        SpeculationParameters(), RequestEstimates(shared, [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))])
    )
    offer = Offer((1,) * 24, ("suffix",) * 24, (0.98,) * 24)
    waits = []
    for _ in range(60):
        plan = planner.plan([offer], None)
        waits.append(plan.patience_ns)
        waited_ns = int(plan.patience_ns)
        result = Pass(0, (1,), 0, 0, forward_ns=10 * MS, waited_ns=waited_ns)
        planner.estimates.observe(Outcome(result, Offer(), (b"a",), 10 * MS + waited_ns, waited_ns > 0), plan)
    assert 0 < max(waits) < 200 * MS
    assert waits[-1] == 0


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_fixed_modes_are_constant(turns: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    for mode in (Mode.LOCKSTEP, Mode.OPPORTUNISTIC):
        planner = Planner(SpeculationParameters(mode, turns), estimates_of(shared, draft))
        plan = planner.plan((), DraftState())
        assert (plan.pace.lead, plan.pace.turns, plan.patience_ns > 0) == (
            turns,
            mode is Mode.LOCKSTEP,
            mode is Mode.LOCKSTEP,
        )
        offer = Offer((1,) * turns, ("draft",) * turns, (0.01,) * turns)
        assert planner.choose([offer], plan) == (offer, turns)
        assert planner.plan((), DraftState(overdue=True)).pace.lead == 0
    off = Planner(SpeculationParameters(Mode.OFF), RequestEstimates(shared))
    assert off.plan((), None).pace.lead == 0


def test_turns_that_ended_early_do_not_change_the_prediction_for_a_number_that_the_user_chose() -> None:
    """Such a turn always has all its tokens."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    chosen, free = (
        Planner(SpeculationParameters(Mode.LOCKSTEP, number), estimates_of(shared, draft)) for number in (6, None)
    )
    before = [planner.plan((), DraftState()).prediction for planner in (chosen, free)]
    for _ in range(50):
        draft.observe_turn(2, ended_early=True)
    after = [planner.plan((), DraftState()).prediction for planner in (chosen, free)]
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize(
    ("draft_ms", "right", "least", "most"), [(0.1, 0.9, 8, 64), (4.0, 0.6, 1, 2), (1.0, 0.7, 2, 7)]
)
def test_lockstep_takes_the_planners_number(draft_ms: float, right: float, least: int, most: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, int(draft_ms * MS))])
    simulated = Simulated(shared, FLAT, right, draft=draft, draft_ms=draft_ms, mode=Mode.LOCKSTEP)
    simulated.run(150)
    assert least <= simulated.planner.plan((), DraftState()).pace.lead <= most


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.LOCKSTEP])
def test_a_draft_on_the_targets_cores_starts_when_the_target_waits(mode: Mode) -> None:
    """Concurrent forwards would take several times as long, so that the planner does not even try them."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)], competes=True)
    simulated = Simulated(shared, FLAT, 0.8, draft=draft, slowdown=9.0, mode=mode)
    first = simulated.planner.plan((), DraftState(lag_token_count=100))
    assert first.pace.lead == 0 and first.patience_ns > 10 * MS, "the target reads its prompt alone, then waits"
    simulated.run(60)
    assert simulated.names[0] == "plain"
    assert all(name.startswith("draft in turns") for name in simulated.names[1:])
    assert draft.slowdown.count == 1, "they never ran at once"


def test_to_read_the_prompt_does_not_keep_a_draft_from_being_used() -> None:
    """Reading the prompt costs as much as twenty passes, once; that is not worth it for three tokens."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS), (2, 2 * MS), (25, 25 * MS)], competes=True)
    planner = Planner(SpeculationParameters(), estimates_of(shared, draft))
    planner.estimates.observe(Outcome(Pass(0, (1,), 0, 0), Offer(), (b"abcd",)), Plan("plain", Prediction(1.0, 1.0)))
    state = DraftState(lag_token_count=200)
    assert planner.plan((), state, 500).prepares_turn
    assert not planner.plan((), state, 3).prepares_turn
    for _ in range(50):
        shared.observe_text(3)
    shared.observe_text(0)  # a client that left before the first token
    assert not planner.plan((), state, 500).prepares_turn, "texts usually end long before the limit"
    planner.max_wait_ns = 1e12
    assert planner.plan((), state, 500).name == "plain"
    for _ in range(50):
        shared.observe_text(300)
    planner.max_candidate_count = 3
    assert planner.plan((), state, 500).pace.turns, "the maximum of a pass is not that of the text"
    assert not planner.plan((), state, 3).pace.turns


@pytest.mark.parametrize("most", [1, 3, 24])
def test_no_plan_has_more_candidates_than_a_pass_can_verify(most: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    planner = Planner(SpeculationParameters(), estimates_of(shared, shared.draft("draft", [(1, MS)])))
    planner.max_wait_ns, planner.max_candidate_count = 1e12, most
    costs, draft = planner._target_costs(), _draft_costs(0.95, 1.0)
    assert ahead(costs, draft, 16).tokens <= most + 1 and ahead(costs, draft, 16, waits=True).tokens <= most + 1
    assert in_turns(costs, draft, 16).tokens <= most + 1
    offer = Offer((5,) * 30, ("draft",) * 30, (0.99,) * 30)
    assert planner.choose([offer], Plan("draft", Prediction(1.0, 1.0)))[1] <= most


def test_the_time_to_read_a_prompt_is_measured() -> None:
    """It cannot be extrapolated from narrow forwards: a wide one takes a fifth of the time here."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS), (2, 2 * MS), (25, 25 * MS)], competes=True)
    planner = Planner(SpeculationParameters(), estimates_of(shared, draft))
    planner.estimates.observe(Outcome(Pass(0, (1,), 0, 0), Offer(), (b"abcd",)), Plan("plain", Prediction(1.0, 1.0)))
    state = DraftState(lag_token_count=200)
    assert not planner.plan((), state, 20).prepares_turn
    first = Proposal(1, (1, 2, 3), (), forward_ns=42 * MS, read_token_count=200, read_ns=40 * MS)
    draft.observe_proposal(first, MS, ahead=False)
    assert planner.plan((), state, 20).prepares_turn


def test_predictions_are_corrected_by_what_came_of_them() -> None:
    """Half of the candidates come too late, which acceptance chances cannot predict."""
    shared = TargetEstimates(measured(FLAT))
    planner = Planner(
        SpeculationParameters(), RequestEstimates(shared, [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))])
    )
    offer = Offer((1,) * 8, ("suffix",) * 8, (0.98,) * 8)
    before = planner.plan([offer], None)
    for number in range(100):
        plan = planner.plan([offer], None)
        accepted = 8 if number % 2 else 0
        tried = offer if accepted else Offer()
        result = Pass(0, (1,) * (accepted + 1), accepted, accepted, forward_ns=10 * MS)
        planner.estimates.observe(Outcome(result, tried, (b"abcd",) * (accepted + 1), 10 * MS), plan)
    after = planner.plan([offer], None)
    assert before.name == after.name == "suffix"
    assert before.prediction.tokens > 6
    assert after.prediction.tokens == pytest.approx(5, rel=0.15)


@pytest.mark.parametrize("passes", [0, 30])
def test_asking_changes_nothing(passes: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    simulated = Simulated(shared, FLAT, 0.6, draft=draft, match=5)
    if passes:
        simulated.run(passes)
    offer = Offer((1,) * 24, ("suffix",) * 24, (20.0,) * 24)
    first = [simulated.planner.plan([offer], DraftState(lag_token_count=lag)) for lag in (1, 9)]
    before = pickle.dumps(simulated.planner)  # with the chances that it keeps until the next pass
    for _ in range(50):
        simulated.planner.choose([offer], first[0])
        simulated.planner.summary(DraftState())
    assert [simulated.planner.plan([offer], DraftState(lag_token_count=lag)) for lag in (1, 9)] == first
    assert pickle.dumps(simulated.planner) == before


def test_the_summary_names_every_way_with_its_speed() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    simulated = Simulated(shared, FLAT, 0.7, draft=draft, slowdown=2.0)
    assert simulated.planner.summary(DraftState()) == ""
    simulated.run(60)
    text = simulated.planner.summary(DraftState())
    expected = r"predicted tokens/s: plain (99|100)\.\d, draft in turns of up to \d+ \d+\.\d, draft ahead \d+\.\d; "
    assert re.match(expected, text)
    assert "an 8-token pass costs 1.2x a 1-token pass" in text
    assert "a pass takes" in text


def test_a_tape_of_control_tokens_has_no_bytes_to_plan_by() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    planner = Planner(SpeculationParameters(), estimates_of(shared, draft))
    for _ in range(200):
        plan = planner.plan((), DraftState())
        planner.estimates.observe(Outcome(Pass(0, (1,), 0, 0, forward_ns=MS), Offer(), (b"",), MS), plan)
    assert planner.plan((), DraftState()).prediction.tokens_per_ns > 0
