"""Tests the estimates of costs and chances."""

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bridge.generation import Delta, generate
from bridge.measuring.chances import Chances, RequestChances
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.estimates import Correction, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import Pass, Proposal
from bridge.request import Request
from bridge.sources.source import DRAFT, DraftPace, DraftState, Offer, Outcome
from bridge.sources.suffix import SuffixSource
from bridge.tape import Tape
from tests.bridge.test_credit import MODEL, CreditedTarget
from tests.support import tiny
from tests.support.simulated import FLAT, MS, Simulated, estimates_of, measured

PLAIN = Plan("plain", Prediction(1.0, MS))


def test_what_a_bunch_of_passes_lacks_is_taken_from_the_interval_before() -> None:
    estimates, noise = estimates_of(TargetEstimates(measured(FLAT)), None), random.Random(0)
    late_ms = before_ms = 0.0
    for _ in range(400):
        before_ms, late_ms = late_ms, noise.uniform(0, 8)
        result = Pass(0, (5,), 0, 0, forward_ns=int(9.8 * MS))
        elapsed_ns = int((10 + late_ms - before_ms) * MS)
        estimates.observe(Outcome(result, Offer(), (b"a",), elapsed_ns), Plan("plain", Prediction(1.0, 10.0 * MS)))
    assert estimates.forward.single_ns == pytest.approx(10 * MS, rel=0.06)


def test_a_growing_text_is_no_slowdown_by_a_draft_elsewhere() -> None:
    estimates = estimates_of(TargetEstimates(measured(FLAT)), draft := DraftEstimates(measured(FLAT)))
    ahead = Plan("draft ahead", Prediction(1.0, 10.0 * MS), DraftPace(4), source=DRAFT)
    for place in range(1000):
        taken_ns = int((10 + 0.01 * place) * MS)
        outcome = Outcome(Pass(0, (5,), 0, 0, forward_ns=taken_ns), Offer(), (b"a",), taken_ns)
        estimates.observe(outcome, ahead if place else Plan("plain", Prediction(1.0, 10.0 * MS)))
    assert draft.slowdown.value == pytest.approx(1.0, abs=0.02)
    assert estimates.forward.single_ns == pytest.approx(20 * MS, rel=0.03)


def test_matches_of_some_length_do_not_speak_for_others() -> None:
    chances = Chances((8, 16, 32), (0.3, 0.5, 0.65, 0.8))
    for _ in range(100):
        chances.observe(5, 0)
        chances.observe(40, 1)
    assert chances.of(5) < 0.05
    assert chances.of(40) > 0.95
    assert RequestChances(chances).of(40) == pytest.approx(chances.of(40))


@pytest.mark.parametrize(("waited_ms", "timed_out", "counts"), [(5, False, True), (0, False, False), (5, True, False)])
def test_a_turn_without_candidates_lowers_what_is_expected_of_the_draft(
    waited_ms: int, timed_out: bool, counts: bool
) -> None:
    estimates = estimates_of(TargetEstimates(measured(FLAT)), DraftEstimates(measured(FLAT)))
    before = estimates.positions.of(1)
    turn = Plan(
        "draft in turns", Prediction(1.0, 10.0 * MS), DraftPace(4, turns=True), source=DRAFT, plain_ns=10.0 * MS
    )
    result = Pass(0, (5,), 0, 0, forward_ns=10 * MS, waited_ns=waited_ms * MS)
    for _ in range(20):
        estimates.observe(Outcome(result, Offer(), (b"a",), 15 * MS, timed_out), turn)
    assert (estimates.positions.of(1) < 0.5 * before) == counts


def test_the_chances_of_several_candidates_are_those_of_each() -> None:
    shared = Chances((2, 4), (0.2, 0.5, 0.8))
    own, evidence = RequestChances(shared), (1, 2, 3, 4, 5)
    for _ in range(3):
        assert shared.of_all(evidence) == [shared.of(one) for one in evidence]
        assert own.of_all(evidence) == [own.of(one) for one in evidence]
        own.observe([(1, 0.0), (3, 1.0), (9, 1.0)])


def test_a_request_shifts_all_chances_and_forgets() -> None:
    shared = Chances((8,), (0.5, 0.8))
    noise = random.Random(0)
    for _ in range(400):
        shared.observe(5, noise.random() < 0.5)
    before = [shared.of(5), shared.of(10)]
    request = RequestChances(shared)
    for _ in range(40):
        request.observe([(5, 0)])
    assert request.of(5) < 0.5 * before[0]
    assert request.of(10) < 0.8 * before[1], "what is wrong here is wrong with any evidence"
    assert RequestChances(shared).of(10) == pytest.approx(before[1])
    for _ in range(600):
        request.observe()
    assert request.of(10) == pytest.approx(shared.of(10), rel=0.02)


def test_times_that_cannot_be_do_no_harm() -> None:
    shared = TargetEstimates([(1, 0), (1, 5), (1, 7), (2, 2**63)])
    draft = shared.draft("draft", [(3, 1), (3, 2)])
    for forward_ns in (0, 1, 2**40):
        draft.observe_proposal(Proposal(1, (1, 2), (), forward_ns=forward_ns, read_token_count=3), forward_ns, False)
    planner = Planner(SpeculationParameters(), estimates_of(shared, draft))
    for forward_ns in (0, 0, 2**40, 0):
        plan = planner.plan((), DraftState())
        assert plan.patience_ns >= 0 and plan.prediction.tokens_per_ns > 0
        planner.estimates.observe(
            Outcome(Pass(0, (1,), 0, 0, forward_ns=forward_ns), Offer(), (b"a",), forward_ns), plan
        )


def test_a_turn_says_what_each_of_its_tokens_costs() -> None:
    """The first forward reads what the target committed; each further one makes a token."""
    draft = DraftEstimates([(1, 20 * MS)])
    turn = Proposal(1, (1, 2, 3, 4), (), forward_ns=22 * MS, read_token_count=5, read_ns=10 * MS, queue_ns=MS)
    for _ in range(40):
        draft.observe_proposal(turn, 3 * MS, ahead=False)
    assert draft.forward.of(1) == pytest.approx(4 * MS, rel=0.05)
    assert draft.round_trip.value == pytest.approx(3 * MS, rel=0.05)


def test_only_a_token_s_known_time_can_be_read_from_a_forward_of_several() -> None:
    reading = Proposal(1, (1,), (), forward_ns=9 * MS, read_token_count=5, read_ns=9 * MS)
    draft = DraftEstimates()
    draft.observe_proposal(reading, None, ahead=False)
    assert not draft.forward.known
    draft.observe_proposal(Proposal(1, (1,), (), forward_ns=MS, read_token_count=1, read_ns=MS), None, ahead=False)
    for _ in range(40):
        draft.observe_proposal(reading, None, ahead=False)
    assert draft.forward.of(5) == pytest.approx(9 * MS, rel=0.1)


@pytest.mark.parametrize("bad", [0.2, 50.0])
def test_a_slowdown_is_forgotten_slowly(bad: float) -> None:
    draft = DraftEstimates([(1, MS)], competes=True)
    prior = draft.slowdown.value
    for one in (draft.slowdown, draft.ahead_slowdown):
        one.value = bad
    draft.forget_slowdown()
    assert abs(draft.slowdown.value - bad) < 0.01 * abs(prior - bad)
    for _ in range(5000):
        draft.forget_slowdown()
    assert draft.slowdown.value == draft.ahead_slowdown.value == pytest.approx(prior, rel=0.01)


def test_a_draft_s_tokens_are_counted_by_their_position() -> None:
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    estimates = estimates_of(shared, draft)
    offer = Offer((1, 2, 3), ("draft",) * 3, (0.5,) * 3)
    for _ in range(50):
        result = Pass(0, (1, 2, 9), 2, 3, forward_ns=MS)
        estimates.observe(Outcome(result, offer, (b"a", b"b", b"z"), MS), Plan("plain", Prediction(1.0, MS)))
    assert draft.positions.of(1) > 0.9
    assert draft.positions.of(2) > 0.9
    assert draft.positions.of(3) < 0.3


def test_where_turns_end_is_learned_from_those_that_were_right_so_far() -> None:
    """Of 100 turns, 50 have two right candidates, 25 end after one that was right, and 25 after one that was wrong."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    for _ in range(25):
        for count, right_count, ended_early in ((2, 2, False), (2, 2, False), (1, 1, True), (1, 0, True)):
            draft.observe_verified_turn(count, right_count, ended_early=ended_early)
    assert draft.goes_on_if_right.of(1) == pytest.approx(2 / 3, abs=0.04)
    assert draft.goes_on_if_right.of(2) == DraftEstimates().goes_on_if_right.of(2), (
        "these turns had all tokens that they might have"
    )


def test_candidates_that_were_not_sent_show_the_chances_of_their_source() -> None:
    """A plain pass shows whether the first candidate would have been right, a pass of two tokens whether two were."""
    shared = TargetEstimates(measured(FLAT))
    sources = [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))]
    estimates = estimates_of(shared, shared.draft("draft", [(1, MS)]), sources)
    offer = Offer((1, 2, 3), ("suffix",) * 3, (0.2, 0.6, 0.95))
    drafted = Offer((1,), ("draft",), (0.4,))
    before = {evidence: shared.chances["suffix"].of(evidence) for evidence in offer.evidence}
    for _ in range(100):
        right, wrong = (Pass(0, (id_,), 0, 0, forward_ns=MS) for id_ in (1, 9))
        for result in (right, right, wrong):
            estimates.observe(Outcome(result, Offer(), (b"a",), MS), PLAIN, [drafted, offer])
        # The draft's candidate was tried and right, and then the target chose a token itself.
        result = Pass(0, (1, 9), 1, 1, forward_ns=MS)
        estimates.observe(Outcome(result, drafted, (b"a", b"b"), MS), PLAIN, [drafted, offer])
    chances = shared.chances["suffix"]
    assert chances.of(0.2) == pytest.approx(3 / 4, abs=0.02)
    assert chances.of(0.6) < 0.1
    assert chances.of(0.95) == before[0.95], "a wrong candidate shows nothing about the next"
    draft = shared.draft("draft").chances
    assert draft.of(0.4) > 0.9, "only tried candidates of a draft that runs ahead count"


def test_a_turn_that_was_not_sent_shows_what_the_draft_is_worth() -> None:
    """Otherwise a draft that is right only where it is sure, and then sent, would seem to be right always."""
    shared = TargetEstimates(measured(FLAT))
    sources = [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))]
    draft = shared.draft("draft", [(1, MS)])
    estimates = estimates_of(shared, draft, sources)
    plan = Plan("draft in turns", Prediction(2.0, MS), DraftPace(2, turns=True), source=DRAFT)
    unsure, suffix = Offer((5, 6), ("draft",) * 2, (0.2, 0.2)), Offer((7,), ("suffix",), (0.2,))
    for _ in range(100):
        # The first one of the draft would have been right; in every second pass, nothing was worth verifying.
        for width, tried in ((1, suffix), (0, Offer())):
            result = Pass(0, (5, 9), 0, width, forward_ns=MS, waited_ns=3 * MS)
            estimates.observe(Outcome(result, tried, (b"a", b"b"), 4 * MS), plan, [unsure, suffix])
    assert draft.positions.of(1) > 0.9 and draft.positions.of(2) < 0.1
    assert draft.chances.of(0.2) == pytest.approx(0.5, abs=0.05)
    assert shared.chances["suffix"].of(0.2) < 0.1


async def test_a_request_learns_from_candidates_that_its_target_ignores() -> None:
    estimates = TargetEstimates()
    request = Request("a", max_tokens=60)
    assert [event async for event in generate(request, MODEL, CreditedTarget(), estimates=lambda: estimates)]
    assert estimates.chances["suffix"].of(0.99) > 0.99


def test_a_candidate_is_not_counted_twice() -> None:
    shared = TargetEstimates(measured(FLAT))
    estimates = estimates_of(shared, None, [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))])
    offer = Offer((1,), ("suffix",), (0.2,))
    twin = Chances(SuffixSource.evidence_edges, SuffixSource.prior_chances)
    for id_ in (1, 9):
        result = Pass(0, (1, 5) if id_ == 1 else (9,), int(id_ == 1), 1, forward_ns=MS)
        estimates.observe(Outcome(result, offer, (b"a",) * len(result.token_ids), MS), PLAIN, [offer])
        twin.observe(0.2, float(id_ == 1))
    assert shared.chances["suffix"].of(0.2) == twin.of(0.2)


def test_each_level_of_load_has_its_own_costs() -> None:
    shared, held = TargetEstimates(measured(FLAT)), []
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(shared.request())
            held.append(shared.costs)
    assert len({id(one) for one in held}) == 3
    assert held[1] is held[2] and held[3] is held[4], "2 to 3 requests, and 4 to 7"
    assert shared.costs is held[0]


def test_drafts_are_told_apart() -> None:
    shared = TargetEstimates(measured(FLAT))
    good, bad = shared.draft("good", [(1, MS)]), shared.draft("bad", [(1, MS)])
    for request in range(4):
        Simulated(shared, FLAT, 0.9, draft=good, seed=request).run(80)
        Simulated(shared, FLAT, 0.05, draft=bad, seed=request).run(80)
    assert good.chances.of(0.8) > 0.8
    assert bad.chances.of(0.8) < 0.2
    again = Simulated(shared, FLAT, 0.9, draft=good)
    again.run(1)
    assert again.names[0].startswith("draft")


@pytest.mark.parametrize("deviation", [0.0, 0.2])
def test_extra_time_is_right_on_average_where_times_vary(deviation: float) -> None:
    correction, noise, found = Correction(), random.Random(0), Prediction(2.0, 130.0)
    values = []
    for number in range(2000):
        corrected = correction.applied(found, 100.0)
        correction.observe(1, noise.gauss(110.0, 100 * deviation), Plan("suffix", corrected, plain_ns=100.0))
        correction.fade()
        if number >= 200:
            values.append(corrected.ns)
    # The prior of 1 has some weight left.
    assert sum(values) / len(values) == pytest.approx(113, abs=1.5)
    assert all(100 < one < 130 for one in values)


def test_what_another_source_yields_does_not_correct_a_plan() -> None:
    """Under a plan with prompt lookup, a draft that keeps up with the text may have the better candidates."""
    shared = TargetEstimates(measured(FLAT))
    draft = shared.draft("draft", [(1, MS)])
    sources = [SuffixSource(Tape(tiny.model("byte_level").vocabulary, ()))]
    estimates = estimates_of(shared, draft, sources)
    plan = Plan("suffix", Prediction(1.2, 2 * MS), source="suffix", plain_ns=2 * MS)
    drafted = Offer((1, 2, 3), (DRAFT,) * 3, (0.9,) * 3)
    for _ in range(20):
        result = Pass(0, (1, 2, 3, 9), 3, 3, forward_ns=2 * MS)
        estimates.observe(Outcome(result, drafted, (b"a",) * 4, 2 * MS), plan)
    assert estimates.corrected("suffix", plan.prediction, 2 * MS) == plan.prediction
    continued = Offer((1, 2, 3), ("suffix", "suffix", DRAFT), (0.9,) * 3)
    estimates.observe(Outcome(result, continued, (b"a",) * 4, 2 * MS), plan)
    more = estimates.corrected("suffix", plan.prediction, 2 * MS)
    assert more.tokens > plan.prediction.tokens, "candidates that continue its own are predicted with them"
    late = Outcome(Pass(0, (9,), 0, 0, forward_ns=2 * MS), Offer(), (b"a",), 2 * MS)
    estimates.observe(late, plan)
    assert estimates.corrected("suffix", plan.prediction, 2 * MS).tokens < more.tokens, "they came too late"


def test_replicas_of_a_draft_on_the_targets_cores_and_elsewhere_are_known_apart() -> None:
    shared = TargetEstimates(measured(FLAT))
    beside, elsewhere = (shared.draft("draft", [(1, MS)], competes=competes) for competes in (True, False))
    assert beside.slowdown.value > elsewhere.slowdown.value == 1.0
    shared.forget_draft("draft")
    for competes, known in ((True, beside), (False, elsewhere)):
        assert shared.draft("draft", competes=competes) is not known


AHEAD = Plan("draft ahead", Prediction(1.0, 100 * MS), DraftPace(8), source=DRAFT)


def pass_of(milliseconds: float) -> Outcome:
    ns = round(milliseconds * MS)
    return Outcome(Pass(0, (1,), 0, 0, forward_ns=ns), Offer(), (b"a",), ns)


@pytest.mark.parametrize(("competes", "slow"), [(True, 6.0), (True, 3.0), (True, 1.2), (False, 1.0)])
def test_a_request_whose_draft_runs_ahead_does_not_spoil_the_costs_of_others(competes: bool, slow: float) -> None:
    """On the same cores, passes take longer meanwhile, and an answer of the draft waits for a core."""
    shared = TargetEstimates([(1, 100 * MS)])
    draft = shared.draft("draft", [(1, 5 * MS)], competes=competes)
    for _ in range(4):
        estimates = estimates_of(shared, draft)
        for _ in range(20):
            estimates.observe(pass_of(slow * 100), AHEAD)
            draft.observe_proposal(
                Proposal(1, (1,), (), forward_ns=5 * MS), 60 * MS if competes else 2 * MS, ahead=True
            )
    assert shared.costs.single_ns == pytest.approx(100 * MS, rel=0.01)
    assert draft.slowdown.value == pytest.approx(slow, rel=0.1)
    draft.observe_proposal(Proposal(1, (1, 2), (), forward_ns=5 * MS), 2 * MS, ahead=False)
    assert draft.round_trip.value <= 2.1 * MS


def test_passes_beside_a_draft_on_the_same_cores_do_not_show_what_one_alone_costs() -> None:
    shared = TargetEstimates()
    draft = shared.draft("draft", competes=True)
    estimates = estimates_of(shared, draft)
    for _ in range(20):
        estimates.observe(pass_of(130), AHEAD)
    assert not shared.costs.single_ns, "it is unknown how much of it is the slowdown"
    estimates.observe(pass_of(100), Plan("plain", Prediction(1.0, 100 * MS)))
    for _ in range(40):
        estimates.observe(pass_of(130), AHEAD)
    assert shared.costs.single_ns == 100 * MS
    assert draft.slowdown.value == pytest.approx(1.3, rel=0.1)


def test_a_thread_may_ask_what_a_draft_has_cached_while_another_context_is_recorded() -> None:
    draft = DraftEstimates()

    class Compared(tuple[int, ...]):
        """Records a context while it is compared with the others, as the event loop does meanwhile."""

        def __iter__(self) -> Iterator[int]:
            draft.observe_context([len(draft._contexts)])
            return super().__iter__()

    draft.observe_context([1, 2, 3])
    draft.observe_context([1, 2, 4])
    assert draft.cached_token_count(Compared((1, 2, 3, 4))) == 3


async def test_a_request_that_moves_to_another_replica_learns_the_costs_of_that_one() -> None:
    first, second = TargetEstimates(), TargetEstimates()
    serving, count, known_ns = [first], 0, 0.0
    request = Request("a", max_tokens=40, speculation=SpeculationParameters(mode=Mode.OFF))
    async for event in generate(request, MODEL, CreditedTarget(), estimates=lambda: serving[-1]):
        count += isinstance(event, Delta)
        if count == 20:
            serving.append(second)
        elif count == 21:  # the pass with which the move is noticed
            known_ns = first.costs.single_ns
    assert first.costs.single_ns == known_ns > 0 and second.costs.single_ns > 0


def test_drafts_with_ever_new_names_are_forgotten() -> None:
    estimates = TargetEstimates()
    for number in range(1000):
        estimates.draft(f"v{number}")
    assert len(estimates.drafts) == 256 and ("v999", False) in estimates.drafts


def test_what_a_draft_has_read_is_kept_in_little_memory_and_once() -> None:
    draft = DraftEstimates()
    for _ in range(2):
        draft.observe_context(list(range(1000)))
    (kept,) = draft._contexts
    assert kept.itemsize * len(kept) == 4000
    assert draft.cached_token_count([0, 1, 2, 9]) == 3
