"""What is never tried is never measured: the planner tries other ways now and then, at little cost.

Drafts and sources that failed, passes without candidates, and widths that once seemed too expensive.
"""

import pytest

from bridge.measuring import costs
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import Pass, Proposal
from bridge.sources.source import DRAFT, DraftState, Offer, Outcome
from tests.support.simulated import FLAT, HOPELESS, MS, STEEP, Simulated, measured


def test_what_a_draft_costs_the_target_is_tried_for_a_few_passes_and_again_in_few_requests() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    tried = []
    for request in range(80):
        simulated = Simulated(shared, FLAT, 0.7, draft=draft, slowdown=3.0, seed=request)
        simulated.run(60)
        tried.append(sum(name == "draft ahead" for name in simulated.names))
    assert tried[0] <= 8
    assert sum(tried[1:10]) == 0
    assert sum(tried) < 0.01 * 80 * 60, tried


def test_one_bad_pass_does_not_rule_out_a_draft_that_runs_ahead() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, 2 * MS)])
    Simulated(shared, FLAT, 0.8, draft=draft, draft_ms=2.0).run(20)
    draft.slowdown.observe(30.0)
    requests = [Simulated(shared, FLAT, 0.8, draft=draft, draft_ms=2.0, seed=request) for request in range(40)]
    for one in requests:
        one.run(40)
    assert requests[-1].names.count("draft ahead") > 30


@pytest.mark.parametrize("known", [1, 60])
def test_one_answer_that_comes_late_does_not_rule_out_a_draft_that_takes_turns(known: int) -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)], competes=True)
    Simulated(shared, FLAT, 0.8, draft=draft, slowdown=3.0).run(known)
    late = Proposal(1, (1, 2, 3, 4), (), forward_ns=4 * MS, read_token_count=1, read_ns=MS)
    draft.observe_proposal(late, 5_000 * MS, ahead=False)
    following = Simulated(shared, FLAT, 0.8, draft=draft, slowdown=3.0, seed=1)
    following.run(60)
    assert sum(name.startswith("draft in turns") for name in following.names) > 40, following.names


def test_a_source_that_failed_for_long_is_used_when_it_is_right_again() -> None:
    shared = TargetEstimates(measured(FLAT))
    Simulated(shared, FLAT, 0.0, match=5).run(300)
    late = [Simulated(shared, FLAT, 0.95, match=5, seed=request) for request in range(40)]
    for one in late:
        one.run(60)
    assert late[-1].names.count("suffix") > 50


@pytest.mark.parametrize("right", [0.1, 0.95])
def test_what_did_not_pay_is_tried_now_and_then(right: float) -> None:
    """Every pass has a match. Wide passes of the target are expensive at first, and nearly free later."""
    shared = TargetEstimates(measured(HOPELESS))
    costly = [Simulated(shared, HOPELESS, 0.1, match=5, seed=request) for request in range(40)]
    speed = sum(one.run(30) for one in costly) / 40
    assert speed > 0.97 / HOPELESS[1], "trying costs next to nothing"
    assert sum(one.candidates for one in costly) < 20
    cheap = [Simulated(shared, FLAT, right, match=5, seed=request) for request in range(120)]
    speeds = [one.run(30) for one in cheap][-20:]
    assert (sum(speeds) / 20 > 1.5 / FLAT[1]) == (right > 0.5)
    assert sum(speeds) / 20 > 0.9 / FLAT[1]


def test_requests_without_sources_do_not_put_off_a_plain_pass() -> None:
    """Only a pass without candidates beside those with some shows how much dearer these are."""
    shared = TargetEstimates(measured(FLAT))
    names = list[str]()
    for request in range(10):
        simulated = Simulated(shared, FLAT, 0.95, match=10, seed=request)
        simulated.run(30)
        names += simulated.names
        alone = Planner(SpeculationParameters(Mode.OFF), RequestEstimates(shared))
        for _ in range(5):
            one = Outcome(Pass(0, (1,), 0, 0, forward_ns=10 * MS), Offer(), (b"abcd",), 10 * MS)
            alone.estimates.observe(one, alone.plan((), None))
    assert 2 <= names.count("plain") < 10, names


def test_a_pass_that_is_shared_with_other_sequences_tries_nothing_but_the_draft() -> None:
    """Its candidates are chosen with those of the others, so that a plain pass would only keep the draft waiting."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    simulated = Simulated(shared, FLAT, 0.9, draft=draft)
    simulated.run(20)
    shared.idle_pass_counts[""] = shared.idle_pass_counts["suffix"] = 1000
    planner, match = simulated.planner, Offer((1,) * 8, ("suffix",) * 8, (0.9,) * 8)
    assert planner.plan([match], DraftState()).is_trial
    planner.is_shared = True
    plan = planner.plan([match], DraftState())
    assert plan.runs_ahead and not plan.is_trial
    for place in range(6400):  # it is always wrong
        draft.positions.observe(place % 16 + 1, 0.0)
        planner.estimates.positions.observe([(place % 16 + 1, 0.0)])
    assert not planner.plan([match], DraftState()).runs_ahead
    draft.idle_pass_count = 10_000
    assert not planner.plan([match], DraftState()).runs_ahead
    planner.estimates.use_draft(draft)
    assert planner.plan([match], DraftState()).runs_ahead, "a sequence that begins tries it"


@pytest.mark.parametrize("right", [0.3, 0.6])
def test_widths_that_become_expensive_are_noticed(right: float) -> None:
    """Every pass has a match, so that no 1-token pass occurs unless the planner chooses it."""
    shared = TargetEstimates(measured(FLAT))
    for request in range(20):
        Simulated(shared, FLAT, right, match=5, seed=request).run(60)
    late = [Simulated(shared, HOPELESS, right, match=5, seed=request).run(60) for request in range(60)]
    assert sum(late[-20:]) / 20 > 0.93 / HOPELESS[1]


@pytest.mark.parametrize("right", [0.6, 0.8])
@pytest.mark.parametrize("drafted", [False, True])
def test_costs_that_a_busy_machine_made_too_high_are_found_out(right: float, drafted: bool) -> None:
    """The target's service reports that 9 tokens take five times as long as they do: wide passes look useless."""
    busy = {width: FLAT[width] * (1 + min(width - 1, 8) / 2) for width in FLAT}

    def speeds(reported: dict[int, float]) -> list[float]:
        shared = TargetEstimates(measured(reported))
        draft = shared.draft("draft", [(1, MS)], competes=True) if drafted else None
        match = None if drafted else 5
        requests = (Simulated(shared, FLAT, right, draft=draft, match=match, slowdown=3.0, seed=n) for n in range(10))
        return [one.run(60) for one in requests]

    assert sum(speeds(busy)[5:]) > 0.85 * sum(speeds(FLAT)[5:])


@pytest.mark.parametrize("times", [STEEP, HOPELESS])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.8])
def test_costs_that_are_right_are_not_doubted_at_a_price(
    times: dict[int, float], right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed() -> float:
        shared = TargetEstimates(measured(times))
        return sum(Simulated(shared, times, right, match=5, seed=request).run(60) for request in range(10))

    doubted = speed()
    monkeypatch.setattr(costs, "_FORGOTTEN", 0.0)
    assert doubted > 0.98 * speed()


def test_a_draft_that_never_pays_is_tried_ever_less_often() -> None:
    shared = TargetEstimates(measured(HOPELESS))
    draft = shared.draft("draft", [(1, 8 * MS)])
    gaps, unused = [], 0
    for seed in range(280):  # requests of 50 passes
        simulated = Simulated(shared, HOPELESS, 0.3, draft=draft, draft_ms=8.0, seed=seed)
        simulated.run(50)
        if any(name.startswith("draft") for name in simulated.names):
            gaps.append(unused)
            unused = 0
        unused += 50
    assert gaps[-3:] == pytest.approx([1000, 2000, 4000], abs=100), gaps  # after it has learned
    # A pass that uses the draft for its predicted speed resets the interval.
    Simulated(TargetEstimates(measured(FLAT)), FLAT, 0.9, draft=draft).run(20)
    assert draft.trial_interval == 500


def test_each_draft_of_a_request_has_a_trial_of_its_own() -> None:
    shared = TargetEstimates(measured(FLAT))
    drafts = [shared.draft(name, [(1, MS)]) for name in ("first", "second")]
    estimates = RequestEstimates(shared)
    trial = Plan("draft in turns", Prediction(1.0, 10.0 * MS), is_trial=True, source=DRAFT)
    for draft in drafts:
        estimates.use_draft(draft)
        estimates.observe(Outcome(Pass(0, (1,), 0, 1), Offer((2,), (DRAFT,), (0.5,)), (b"abcd",)), trial)
    assert [draft.trial_interval for draft in drafts] == [1000, 1000]
