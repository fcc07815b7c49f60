"""What the policy chooses from what it has seen, against what would have been best."""

import random

import pytest

from bridge.estimates import Acceptance, Average, Drafting, Estimates, PassCost, Trial
from bridge.policy import Mode, Policy, SpeculationParameters
from bridge.ports import Pass

MS = 1_000_000
# Milliseconds of a forward by width, as two engines have them: nearly flat, and steep with a step behind one.
FLAT = {width: 30.0 + 0.3 * width for width in range(1, 65)}
STEEP = {1: 5.5} | {width: 7.0 + 0.8 * width for width in range(2, 65)}


def a_pass(candidates: int = 0, accepted: int = 0, forward_ms: float = 10.0, waited_ms: float = 0.0) -> Pass:
    return Pass(
        0, (1,) * (accepted + 1), accepted, candidates, forward_ns=int(forward_ms * MS), waited_ns=int(waited_ms * MS)
    )


def automatic(estimates: Estimates | None = None) -> Policy:
    return Policy(SpeculationParameters(Mode.AUTO), estimates)


@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_a_forward_costs_what_such_forwards_have_cost(times: dict[int, float]) -> None:
    cost, noise = PassCost(), random.Random(0)
    for _ in range(300):
        width = noise.choice([1, 1, 1, 2, 3, 5, 9, 17])
        cost.learn(width, int(times[width] * MS * noise.uniform(0.9, 1.1)))
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width) == pytest.approx(times[width] * MS, rel=0.1)


def test_one_forward_that_took_long_does_not_count_for_many() -> None:
    cost = PassCost()
    for _ in range(20):
        cost.learn(1, 10 * MS)
    cost.learn(1, 1000 * MS)
    assert cost.of(1) < 13 * MS


@pytest.mark.parametrize("times", [FLAT, STEEP])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.95])
def test_as_many_candidates_as_pay(times: dict[int, float], rate: float) -> None:
    """Within 3% of the best count, and of none at all; what a pass takes is what the bridge sees."""
    policy, noise = automatic(), random.Random(0)

    def speed(count: int) -> float:
        return sum(rate**index for index in range(count + 1)) / times[count + 1]

    for _ in range(400):
        count = noise.choice([0, 1, 2, 4, 8, 16])
        accepted = next((index for index in range(count) if noise.random() > rate), count)
        policy.learn(a_pass(count, accepted, times[count + 1]), 20, 1)
    chosen = policy.suffix_count(20)
    assert speed(chosen) >= 0.97 * max(speed(count) for count in range(25))


def test_matches_of_some_length_do_not_speak_for_others() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn(5, 4, 0)
        acceptance.learn(40, 4, 4)
    assert acceptance.of(5) < 0.2
    assert acceptance.of(40) > 0.9
    assert Acceptance(acceptance).of(40) == pytest.approx(acceptance.of(40))


def test_the_target_waits_only_while_waiting_pays() -> None:
    policy = automatic()
    assert policy.patience_us == 0
    for _ in range(20):
        policy.suffix_count(64)
        policy.learn(a_pass(8, 7, 10.0, 0.5), 64, 10 * MS)
    assert policy.patience_us >= 1500
    for _ in range(40):
        policy.suffix_count(0)
        policy.learn(a_pass(waited_ms=0.5), 0, 10 * MS)
    assert policy.patience_us == 0


def test_it_gives_up_waiting_for_a_bridge_that_is_far_away() -> None:
    """Candidates that would gain 30 ms and never come within it."""
    policy = automatic()
    patience = []
    for _ in range(40):
        policy.suffix_count(20)
        waited = policy.patience_us / 1000
        policy.learn(a_pass(0, 0, 10.0, waited), 0, 10 * MS)
        patience.append(policy.patience_us)
    assert max(patience) < 200_000
    assert patience[-1] == 0


@pytest.mark.parametrize("gain", [0.5, 0.9, 1.2, 3.0])
def test_a_draft_is_used_if_it_pays_and_tried_seldom_if_not(gain: float) -> None:
    trial, noise = Trial(), random.Random(0)
    elapsed = alone = 0.0
    for _ in range(4000):
        time = noise.uniform(0.5, 1.5)
        alone += time
        taken = (
            time / gain
            if trial.drafting is Drafting.AHEAD
            else 1.2 * time / gain
            if trial.drafting is Drafting.AWAITED
            else time
        )
        elapsed += taken
        trial.learn(1, int(taken * MS))
    assert alone / elapsed > 0.97 * max(gain, 1.0)
    assert all(way.speed.count > 1 for way in trial.ways.values())


def test_lockstep_follows_acceptance() -> None:
    policy = Policy(SpeculationParameters(Mode.LOCKSTEP))
    before = policy.num_assistant_tokens
    policy.learn(a_pass(5, 5), 0, MS)
    assert policy.num_assistant_tokens == before + 2
    policy.learn(a_pass(7, 3), 0, MS)
    assert policy.num_assistant_tokens == before + 1


def test_an_average_begins_with_its_first_value() -> None:
    average = Average(100.0)
    average.learn(10.0)
    assert average.value == 10.0
    average.learn(20.0)
    assert average.value == 15.0
