"""Tests where branches come from and which are sent: what a draft would have proposed in place of its tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.measuring.draft_estimates import DraftEstimates
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import Pass, Proposal
from bridge.sampling.noise import gumbel
from bridge.sampling.sampler import Sampler, SamplingParameters
from bridge.sources.source import Branch, Continuation, DraftPace, Offer, Outcome, RunnerUp, offer_of
from bridge.sources.source_set import SourceSet
from bridge.text.translation import candidates
from bridge.text.vocabulary import Vocabulary
from tests.support.drafted import MODEL, WORDS, commit, draft_source, ids_of
from tests.support.simulated import MS

DRAFTED = (" fox", " jumps", " over")
OTHERS = (" dog", " sleeps", " and")


def flat(*texts: str) -> tuple[int, ...]:
    return tuple(id_ for text in texts for id_ in ids_of(text))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8}])
@given(seed=st.integers(0, 1 << 30))
def test_the_runner_up_is_what_would_be_chosen_without_the_first(
    temperature: float, truncation: dict, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits, keys = generator.standard_normal(50, np.float32) * 3, generator.integers(-(2**63), 2**63 - 1, 50)
    parameters = SamplingParameters(temperature, **truncation)
    sampler = Sampler(parameters, seed, keys, np.empty(0, np.int64), confident=True)
    choice = sampler.choose(logits, 3, 0)
    assert choice.runner_up is not None and choice.probability is not None
    scores = logits / max(temperature, 1e-6) if temperature else logits
    if temperature and truncation:
        kept = np.argsort(-logits)[: truncation.get("top_k", 50)]
        chances = np.exp(scores - scores.max())[np.argsort(-logits)]
        if "top_p" in truncation:
            kept = kept[: 1 + int(np.searchsorted(np.cumsum(chances / chances.sum()), truncation["top_p"]))]
        scores = np.where(np.isin(np.arange(50), kept), scores, -np.inf)
    weights = np.exp(scores - scores.max())
    sums = scores + gumbel(seed, 3, 0, keys) * (temperature > 0)
    order = np.argsort(-sums)
    assert choice.token_id == order[0]
    if not np.isfinite(sums[order[1]]):
        assert choice.runner_up[1] == 0.0, "nothing else could have been chosen"
    else:
        assert choice.runner_up[0] == order[1]
        np.testing.assert_allclose(choice.runner_up[1], weights[order[1]] / weights.sum(), rtol=1e-3)
    np.testing.assert_allclose(choice.probability, weights[order[0]] / weights.sum(), rtol=1e-3)


async def test_runners_up_become_branches_of_the_candidates_that_they_replace() -> None:
    source, _, tape = draft_source()
    sources = SourceSet([], replace(MODEL, branches=True), None)
    sources.insert(source)
    await sources.advance(DraftPace(20))
    ids, others = flat(*DRAFTED), flat(*OTHERS)
    count = len(ids)
    runners_up = (others[0], *[0] * (count - 2), others[-1])  # a control token has no bytes
    confidences = (0.2,) * count
    source._on_proposal(Proposal(1, ids, (0.5,) * count, runner_up_ids=runners_up, runner_up_confidence=confidences))
    (offer,) = sources.offers()
    assert offer.token_ids == ids
    assert offer.branches[0] == Branch(0, others[0], 0.2)
    assert all(branch.token_id != ids[branch.index] for branch in offer.branches)
    commit(tape, source, DRAFTED[0])
    (later,) = sources.offers()
    assert later.token_ids == ids[len(ids_of(DRAFTED[0])) :]
    assert [(one.index, one.token_id) for one in later.branches] == [
        (one.index - len(ids_of(DRAFTED[0])), one.token_id) for one in offer.branches[1:]
    ]


async def test_what_could_not_be_chosen_in_place_of_a_token_becomes_no_branch() -> None:
    """The draft may report the token itself, or an impossible one, though the target divides its text otherwise."""
    source, *_ = draft_source()
    sources = SourceSet([], replace(MODEL, branches=True), None)
    sources.insert(source)
    await sources.advance(DraftPace(20))
    ids, others = flat(*DRAFTED), flat(*OTHERS)
    confidence, impossible = (1.0,) * len(ids), (others[0], *ids[1:])
    chances = (0.0, *confidence[1:])
    source._on_proposal(Proposal(1, ids, confidence, runner_up_ids=impossible, runner_up_confidence=chances))
    assert source._epoch is not None and not source._epoch.ahead().runners_up  # type: ignore[union-attr]
    (offer,) = sources.offers()
    assert offer.token_ids == ids and not offer.branches


def test_a_branch_is_a_candidate_of_the_target_and_needs_its_own_bytes() -> None:
    """The draft may have other tokens: a runner-up in the middle of one of the target's replaces that whole token."""
    (whole,) = ids_of(" the") if len(ids_of(" the")) == 1 else (None,)
    assert whole is not None, "the tokenizer of the tests has this word"
    part = Continuation(
        "draft",
        b" the fox",
        starts=(0, 2, 4),
        confidences=(0.9, 0.8, 0.7),
        runners_up=(RunnerUp(2, b"o", 0.1), RunnerUp(0, b" the", 0.3), RunnerUp(4, b" dog", 0.2)),
    )
    offer = offer_of(WORDS, [part], branches=True)
    assert offer.token_ids[0] == whole
    first = {branch.index: branch for branch in offer.branches}[0]
    assert first.token_id == ids_of(" to")[0] and first.evidence == pytest.approx(0.9 * 0.1)
    assert {branch.index for branch in offer.branches} == {0, 1}, "the second one proposes the same bytes"
    assert offer.part(1).branches == tuple(replace(one, index=0) for one in offer.branches if one.index == 1)
    assert offer.part(0, 1).branches == (first,)


def planner(conf: float, step: float, mode: Mode = Mode.AUTO) -> Planner:
    """A draft whose runners-up with this probability have been right as often; each further token costs `step`."""
    costs = [(width, int(20 * MS * (1 + step * (width - 1)))) for width in (1, 2, 3, 4, 6, 8, 12, 17)]
    estimates = RequestEstimates(TargetEstimates(costs))
    draft = DraftEstimates([(1, int(MS))])
    for index in range(400):
        draft.branches.observe(conf, float(index % 100 < 100 * conf))
        draft.chances.observe(0.6, float(index % 10 < 6))
    estimates.use_draft(draft)
    return Planner(SpeculationParameters(mode), estimates)


OFFER = Offer((20, 21, 22), ("draft",) * 3, (0.6,) * 3, (Branch(0, 30, 0.2), Branch(2, 32, 0.2), Branch(1, 31, 0.2)))
TURN = Plan("draft in turns", Prediction(2.2, 30 * MS, 6 * MS), DraftPace(3, turns=True), source="draft")


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.LOCKSTEP])
@pytest.mark.parametrize(
    ("conf", "step", "kept"),
    [(0.2, 0.001, [0, 1, 2]), (0.2, 0.06, [0, 1]), (0.2, 0.09, [0]), (0.2, 0.3, []), (0.01, 0.06, [])],
    ids=["width is free", "the two likeliest", "the likeliest", "width is expensive", "hardly ever right"],
)
def test_branches_are_sent_that_save_more_time_than_they_take(
    mode: Mode, conf: float, step: float, kept: list[int]
) -> None:
    offer = replace(OFFER, branches=tuple(replace(one, evidence=conf) for one in OFFER.branches))
    found, width = planner(conf, step, mode).choose([offer], TURN)
    assert width == 3 or mode is Mode.AUTO
    assert [branch.index for branch in found.branches] == [index for index in kept if index < width]


def test_a_trial_has_only_branches_that_are_worth_their_time() -> None:
    trial = replace(TURN, is_trial=True, trial_width=3)
    assert len(planner(0.2, 0.001).choose([OFFER], trial)[0].branches) == 3
    assert planner(0.2, 0.3).choose([OFFER], trial) == (replace(OFFER, branches=()), 3)


def test_the_pass_after_an_accepted_branch_counts_as_wider_because_it_runs_that_token_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimates, widths = RequestEstimates(TargetEstimates()), list[float]()
    monkeypatch.setattr(estimates.forward, "observe", lambda width, _: widths.append(width))
    tried = replace(OFFER, branches=(Branch(1, 31, 0.2),))
    right = Pass(0, (20, 31, 9), 1, 3, 1, branch_count=1, branch_accepted=True)
    for result, offer in ((right, tried), (Pass(3, (7,), 0, 0), Offer()), (Pass(4, (8,), 0, 0), Offer())):
        estimates.observe(Outcome(result, offer, (b"a",) * len(result.token_ids), 20_000_000), TURN)
    assert widths == [5, 2, 1]


def test_how_often_branches_are_right_is_learned() -> None:
    estimates = RequestEstimates(TargetEstimates())
    draft = DraftEstimates()
    estimates.use_draft(draft)
    before = draft.branches.of(0.2)
    tried = replace(OFFER, branches=(Branch(1, 31, 0.2),))

    def observe(*ids: int, accepted: int, branch: bool) -> None:
        result = Pass(0, ids, accepted, 3, 1, branch_count=1, branch_accepted=branch)
        estimates.observe(Outcome(result, tried, (b"a",) * len(ids), 20_000_000), TURN)

    observe(9, accepted=0, branch=False)
    assert draft.branches.of(0.2) == before, "the text did not come to its place"
    for _ in range(8):
        observe(20, 31, 9, accepted=1, branch=True)
    better = draft.branches.of(0.2)
    assert better > before
    for _ in range(8):
        observe(20, 21, 9, accepted=2, branch=False)
    assert draft.branches.of(0.2) < better


def test_no_more_bytes_are_translated_for_a_branch_than_for_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's tokens may be of any length, and the bridge translates while other requests wait."""
    lengths = list[int]()

    def translate(words: Vocabulary, data: bytes) -> list[int]:
        lengths.append(len(data))
        return candidates(words, data)

    monkeypatch.setattr("bridge.sources.source.candidates", translate)
    long = (RunnerUp(0, b" b" * 1000, 0.5), RunnerUp(2, b" c" * 1000, 0.5), RunnerUp(2000, b" d", 0.5))
    part = Continuation("draft", b" a" * 1500, starts=(0, 2, 2000), confidences=(0.9,) * 3, runners_up=long)
    offer = offer_of(WORDS, [part], limit_bytes=40, branches=True)
    assert max(lengths) == 40
    assert [branch.index for branch in offer.branches] == [0, 1], "the third is in place of no candidate"


def test_more_branches_than_can_matter_are_not_translated() -> None:
    data = b" a" * 20
    part = Continuation(
        "draft",
        data,
        starts=tuple(range(0, 40, 2)),
        confidences=(0.9,) * 20,
        runners_up=tuple(RunnerUp(start, b" b", 0.1) for start in range(0, 40, 2)),
    )
    offer = offer_of(WORDS, [part], branches=True)
    assert len(offer.token_ids) == 20
    assert [branch.index for branch in offer.branches] == [0, 1, 2, 3]
