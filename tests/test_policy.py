"""What the policy chooses from what it has seen, against what would have been best."""

import random
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, stdev

import pytest

from bridge.average import Average
from bridge.estimates import Acceptance, Estimates, PassCost, Steps
from bridge.policy import Mode, Policy, SpeculationParameters
from bridge.ports import Pass, Proposal
from bridge.trial import Drafting, DraftRecord, Rate, Trial

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
    cost, steps, noise = PassCost(), Steps(), random.Random(0)
    for _ in range(300):
        width = noise.choice([1, 1, 1, 2, 3, 5, 9, 17])
        cost.learn(width, int(times[width] * MS * noise.uniform(0.9, 1.1)), steps)
    for width in (1, 2, 4, 8, 16, 24):
        assert cost.of(width, steps) == pytest.approx(times[width] * MS, rel=0.1)


def test_one_forward_that_took_long_does_not_count_for_many() -> None:
    cost, steps = PassCost(), Steps()
    for _ in range(20):
        cost.learn(1, 10 * MS, steps)
    cost.learn(1, 1000 * MS, steps)
    assert cost.of(1, steps) < 13 * MS


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
    chosen = policy.suffix_worth(20).count
    assert speed(chosen) >= 0.97 * max(speed(count) for count in range(25))


def test_matches_of_some_length_do_not_speak_for_others() -> None:
    acceptance = Acceptance((8, 16, 32), (0.3, 0.5, 0.65, 0.8))
    for _ in range(50):
        acceptance.learn(5, 4, 0)
        acceptance.learn(40, 4, 4)
    assert acceptance.of(5) < 0.2
    assert acceptance.of(40) > 0.9
    assert acceptance.of_request().of(40) == pytest.approx(acceptance.of(40))


def test_the_target_waits_only_while_waiting_pays() -> None:
    policy = automatic()
    for number in range(5):
        policy.learn(a_pass(), 0, number)
    assert policy.patience_us == 0
    for _ in range(20):
        policy.suffix_worth(64)
        policy.learn(a_pass(8, 7, 10.0, 0.5), 64, 10 * MS)
    assert policy.patience_us >= 1500
    for _ in range(40):
        policy.suffix_worth(0)
        policy.learn(a_pass(waited_ms=0.5), 0, 10 * MS)
    assert policy.patience_us == 0


def test_it_gives_up_waiting_for_a_bridge_that_is_far_away() -> None:
    """Candidates that would gain 30 ms and never come within it."""
    policy = automatic()
    patience = []
    for _ in range(40):
        policy.suffix_worth(20)
        waited = policy.patience_us / 1000
        policy.learn(a_pass(0, 0, 10.0, waited), 0, 10 * MS)
        patience.append(policy.patience_us)
    assert 0 < max(patience) < 200_000
    assert patience[-1] == 0


@dataclass(frozen=True)
class Kind:
    """A way to use a draft: what a pass takes, and how many candidates of it are accepted how often."""

    takes_ms: float
    count: int
    accepted: float

    def draw(self, noise: random.Random) -> tuple[int, int]:
        """Tokens and nanoseconds of a pass."""
        right = next((index for index in range(self.count) if noise.random() > self.accepted), self.count)
        return right + 1, int(self.takes_ms * noise.uniform(0.9, 1.1) * MS)

    @property
    def speed(self) -> float:
        return sum(self.accepted**index for index in range(self.count + 1)) / self.takes_ms


# Without a draft, with one that runs ahead, with one that is waited for.
WORLDS = {
    "it costs more than it gains": (Kind(10, 0, 0), Kind(20, 4, 0.4), Kind(22, 4, 0.4)),
    "it gains a little": (Kind(10, 0, 0), Kind(12.5, 1, 0.5), Kind(15, 2, 0.5)),
    "waiting is best": (Kind(10, 0, 0), Kind(13, 3, 0.8), Kind(15, 8, 0.8)),
    "the text is better": (Kind(11, 8, 0.6), Kind(16, 3, 0.6), Kind(18, 5, 0.6)),
    "it makes no difference": (Kind(10, 0, 0), Kind(15, 1, 0.5), Kind(25.3, 3, 0.7)),
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_draft_is_used_as_it_pays(world: str) -> None:
    """Over requests of 50 passes, from the sixth on; the best way is not known to begin with."""
    kinds, noise = dict(zip(Drafting, WORLDS[world], strict=True)), random.Random(0)
    tokens = time = 0
    for _ in range(20):
        estimates = Estimates()
        for request in range(30):
            trial = estimates.trial("draft")
            for _ in range(50):
                trial.hear()
                token_count, elapsed_ns = kinds[trial.drafting].draw(noise)
                trial.learn(token_count, elapsed_ns)
                if request > 5:
                    tokens, time = tokens + token_count, time + elapsed_ns
    assert tokens / time * MS > 0.97 * max(kind.speed for kind in kinds.values())


def test_a_draft_that_turns_bad_is_found_out_within_a_request() -> None:
    """What is known from others counts for a while only."""
    estimates, noise = Estimates(), random.Random(0)
    kinds = dict(zip(Drafting, WORLDS["waiting is best"], strict=True))
    useless = {way: kind if kind.count == 0 else Kind(30, 4, 0.2) for way, kind in kinds.items()}
    for _ in range(40):
        trial = estimates.trial("draft")
        for _ in range(50):
            trial.hear()
            trial.learn(*kinds[trial.drafting].draw(noise))
    trial, used = estimates.trial("draft"), []
    for _ in range(150):
        trial.hear()
        trial.learn(*useless[trial.drafting].draw(noise))
        used.append(trial.drafting)
    assert used[0] is not Drafting.NONE
    assert used[-50:].count(Drafting.NONE) > 30


def test_passes_before_a_draft_has_said_anything_say_nothing_of_it() -> None:
    """It reads a long prompt first. One that never says anything is not waited for."""
    record = DraftRecord()
    trial = Trial(record)
    while trial.drafting is Drafting.NONE:
        trial.learn(1, 10 * MS)
    before = record.rates[Drafting.AHEAD].passes
    for _ in range(10):
        trial.learn(1, 10 * MS)
    assert record.rates[Drafting.AHEAD].passes == before == 0
    trial.hear()
    for _ in range(4):
        trial.learn(2, 10 * MS)
    assert record.rates[Drafting.AHEAD].speed == pytest.approx(2 / (10 * MS))
    silent = Trial(record := DraftRecord())
    for _ in range(100):
        silent.learn(1, 10 * MS)
    assert record.rates[Drafting.AHEAD].passes > 0


@pytest.mark.parametrize("passes", [3, 10, 15])
def test_short_requests_learn_of_a_draft_that_is_never_heard(passes: int) -> None:
    """Beside it a pass takes 1.8 times as long; most requests end before it would count."""
    estimates, elapsed = Estimates(), 0
    for _ in range(200):
        trial = estimates.trial("draft")
        for _ in range(passes):
            taken = 10 * MS if trial.drafting is Drafting.NONE else 18 * MS
            trial.learn(1, taken)
            elapsed += taken
        trial.close()
    assert 200 * passes * 10 * MS > 0.9 * elapsed


def test_the_target_waits_for_no_draft_longer_than_for_a_pass() -> None:
    estimates = Estimates()
    trial = estimates.trial("draft")
    trial.drafting = Drafting.AWAITED
    policy = Policy(SpeculationParameters(), estimates, trial)
    for _ in range(5):
        policy.learn(a_pass(0, 0, 10.0), 0, 10 * MS)
    policy.learn_draft(Proposal(1, (1,), (1.0,), forward_ns=10**17), 0)
    assert policy.patience_us <= 10_000


def test_a_draft_that_was_lost_teaches_nothing_more() -> None:
    record = DraftRecord()
    trial = Trial(record)
    policy = Policy(SpeculationParameters(), Estimates(), trial)
    trial.drafting = Drafting.AHEAD
    policy.alone()
    for _ in range(50):
        policy.learn(a_pass(0, 0, 10.0), 0, 10 * MS)
    policy.close()
    assert not any(rate.passes for rate in record.rates.values())
    assert not policy.drafting


def test_a_draft_that_takes_the_targets_cores_is_given_up_at_once() -> None:
    """A pass beside it takes ten times as long, before it has said anything and after."""
    for heard in (False, True):
        trial, slow = Trial(DraftRecord()), 0
        for _ in range(100):
            slow += trial.drafting is not Drafting.NONE
            if heard:
                trial.hear()
            trial.learn(1, 10 * MS if trial.drafting is Drafting.NONE else 100 * MS)
        assert slow <= 4


def test_what_was_chosen_is_told_with_how_often_it_was() -> None:
    """Only what was measured, by this request or others."""
    trial = Trial(record := DraftRecord())
    trial.token.learn(MS)
    done = dict.fromkeys(Drafting, 0)
    while trial.drafting is not Drafting.AWAITED:
        assert Drafting.AWAITED.value not in trial.choice
        done[trial.drafting] += 1
        trial.hear()
        trial.learn(2, 10 * MS if trial.drafting is Drafting.AHEAD else 40 * MS)
    assert trial.choice == (
        f"50.0 tokens/s without the draft model ({done[Drafting.NONE]} passes here), "
        f"200.0 tokens/s with the draft model running ahead ({done[Drafting.AHEAD]} passes here)"
    )
    assert min(done[Drafting.NONE], done[Drafting.AHEAD]) > 5
    assert "50.0 tokens/s without the draft model (no passes here)" in Trial(record).choice
    assert Trial(DraftRecord()).choice == ""


def test_the_error_of_a_rate_is_that_of_its_trials() -> None:
    noise, kind = random.Random(0), Kind(10, 4, 0.6)
    found = []
    for _ in range(300):
        rate = Rate()
        for _ in range(100):
            rate.learn(*kind.draw(noise))
        found.append((rate.speed, rate.error))
    speeds = [speed for speed, _ in found]
    assert median(speeds) == pytest.approx(kind.speed / MS, rel=0.03)
    assert median(error for _, error in found) == pytest.approx(stdev(speeds), rel=0.15)


def test_others_wait_for_what_one_verifies() -> None:
    """A forward of all: what a request adds to it counts for each."""
    counts = []
    for others in (0, 1, 15):
        estimates = Estimates()
        with ExitStack() as stack:
            for _ in range(others + 1):
                stack.enter_context(estimates.request())
            policy = automatic(estimates)
            for width in [1, 1, 1, 1, 8, 1, 4, 1, 16] * 20:
                policy.learn(a_pass(width - 1, (width - 1) // 2, STEEP[width]), 20, 1)
            counts.append(policy.suffix_worth(20).count)
    assert counts[0] > counts[1] > counts[2] == 0
    assert estimates.load == 1


@pytest.mark.parametrize("rate", [0.1, 0.95])
def test_what_did_not_pay_once_is_tried_now_and_then(rate: float) -> None:
    """Requests of 30 passes, each with a match, on a target whose widths cost a lot at first, and then nothing."""
    estimates, noise = Estimates(), random.Random(0)
    dear, taken, tokens, candidates = {width: 10.0 * width for width in range(1, 65)}, 0.0, 0, 0
    for request in range(120):
        times = dear if request < 60 else FLAT
        policy = automatic(estimates)
        for number in range(30):
            count = policy.suffix_worth(20).count
            right = rate if request >= 60 else 0.1
            accepted = next((index for index in range(count) if noise.random() > right), count)
            policy.learn(a_pass(count, accepted, times[count + 1]), 20 if count else 0, number)
            if 30 < request < 60:
                taken, tokens, candidates = taken + times[count + 1], tokens + accepted + 1, candidates + count
    assert tokens / taken > 0.98 / dear[1], "trying costs next to nothing"
    assert candidates > 0
    assert (automatic(estimates).suffix_worth(20).count > 8) == (rate > 0.5)


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_widths_that_become_dear_are_found_out(rate: float) -> None:
    """Every pass has a match, so that none is of one token by itself; requests of 60 passes."""
    estimates, noise = Estimates(), random.Random(0)
    taken, tokens = 0.0, 0
    for request in range(160):
        times = FLAT if request < 60 else {width: 10.0 * width for width in range(1, 65)}
        policy = automatic(estimates)
        for number in range(60):
            count = policy.suffix_worth(20).count
            accepted = next((index for index in range(count) if noise.random() > rate), count)
            policy.learn(a_pass(count, accepted, times[count + 1]), 20 if count else 0, number)
            if request >= 100:
                taken, tokens = taken + times[count + 1], tokens + accepted + 1
    assert tokens / taken > 0.95 / times[1]


def test_many_requests_try_what_does_not_pay_no_more_often_together() -> None:
    """Each of them waits for what one tries."""
    estimates = Estimates()
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(estimates.request())
        policies = [automatic(estimates) for _ in range(8)]
        for number in range(1, 20):
            policies[0].learn(a_pass(0, 0, STEEP[1]), 0, number)
            policies[0].learn(a_pass(1 + number % 2, 0, STEEP[2 + number % 2]), 20, number)
        tried = 0
        for number in range(300):
            counts = [policy.suffix_worth(20).count for policy in policies]
            tried += sum(counts)
            for policy, count in zip(policies, counts, strict=True):
                policy.learn(a_pass(count, 0, STEEP[count + 1]), 20 if count else 0, number)
    assert 1 <= tried <= 3


def test_candidates_of_a_draft_by_how_sure_it_is() -> None:
    policy, noise = automatic(), random.Random(0)
    assert policy.draft_worth(()).count == 0
    for _ in range(200):
        for confidence in (0.99, 0.2):
            accepted = int(noise.random() < confidence)
            policy.learn(a_pass(1, accepted, STEEP[2]), 0, 1, [confidence])
            policy.learn(a_pass(0, 0, STEEP[1]), 0, 1)
            policy.learn(a_pass(8, 0, STEEP[9]), 20, 1)
    assert policy.draft_worth([0.99] * 8).count == 8
    assert policy.draft_worth([0.99, 0.99, 0.2, 0.99]).count == 2
    assert policy.draft_worth([0.2, 0.99, 0.99]).count == 0


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
