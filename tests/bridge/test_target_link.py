"""Tests what the target receives and may answer. A target that answers anything else has broken the contract."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from bridge.errors import TargetFault, Unreachable
from bridge.generation import Delta, Finished, generate
from bridge.planning.planner import SpeculationParameters
from bridge.ports import Candidates, FinishReason, Grant, Logprob, Pass, Run
from bridge.request import Request
from bridge.sources.source import Branch, Offer
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.target_link import TargetLink
from services.rpc.status import code_of
from tests.support import tiny

MODEL = tiny.model("byte_level")


class Target:
    """Records what it receives, and answers with given passes."""

    def __init__(self, answers: Sequence[Pass] = ()) -> None:
        self.received: list[Run | Candidates | Grant] = []
        self._answers = answers

    async def run(self, run: Run) -> None:
        self.received.append(run)

    async def candidates(self, candidates: Candidates) -> None:
        self.received.append(candidates)

    async def grant(self, grant: Grant) -> None:
        self.received.append(grant)

    async def passes(self) -> AsyncIterator[Pass]:
        for one in self._answers:
            yield one


def offered(*ids: int) -> Offer:
    return Offer(ids, ("draft",) * len(ids), (0.5,) * len(ids))


def link(target: Target, max_tokens: int = 20, logprobs: int | None = None) -> tuple[TargetLink, Tape]:
    tape = Tape(MODEL.vocabulary, [10, 11])
    return TargetLink(target, MODEL, tape, max_tokens, logprobs=logprobs), tape


async def test_offers_are_numbered_and_a_pass_names_the_one_it_took() -> None:
    target = Target()
    one, tape = link(target)
    await one.start(0)
    await one.offer(offered(20, 21, 22), 2, 0, awaited=False)
    await one.offer(offered(30, 31), 2, 0, awaited=False)
    assert [(sent.offer_id, sent.base_token_count, sent.token_ids) for sent in target.received[1:]] == [  # type: ignore[union-attr]
        (1, 2, (20, 21, 22)),
        (2, 2, (30, 31)),
    ]
    # The target had begun to verify the first offer when the second came.
    outcome = one.commit(Pass(2, (20, 21, 7), 2, 2, offer_id=1))
    assert outcome.tried == offered(20, 21)
    assert outcome.data == tuple(MODEL.vocabulary.token_bytes(id_) for id_ in (20, 21, 7))
    assert list(tape.ids) == [10, 11, 20, 21, 7]
    await one.offer(offered(40, 41, 42), 3, 0, awaited=False)
    outcome = one.commit(Pass(5, (40, 8), 1, 3, offer_id=3))
    assert outcome.tried.token_ids == (40, 41, 42)


async def test_an_accepted_branch_comes_after_the_accepted_candidates() -> None:
    target = Target()
    one, tape = link(target)
    await one.offer(replace(offered(20, 21, 22), branches=BRANCHES), 3, 0, awaited=False)
    assert target.received == [Candidates(1, 2, (20, 21, 22), 3, ((1, 31), (2, 32)))]
    outcome = one.commit(Pass(2, (20, 31, 9), 1, 3, offer_id=1, branch_count=2, branch_accepted=True))
    assert (outcome.tried.token_ids, outcome.tried.branches) == ((20, 21, 22), BRANCHES)
    assert (outcome.accepted_sources, outcome.result.width) == (("draft",) * 2, 6)
    assert list(tape.ids) == [10, 11, 20, 31, 9]
    await one.offer(replace(offered(40, 41), branches=BRANCHES[:1]), 2, 0, awaited=False)
    outcome = one.commit(Pass(5, (40, 31), 1, 2, offer_id=2))
    assert outcome.accepted_sources == ("draft",), "the target has verified no branch"


async def test_a_branch_of_a_candidate_that_is_not_sent_is_not_sent() -> None:
    target = Target()
    one, _ = link(target, 3)
    await one.offer(replace(offered(20, 21, 22), branches=BRANCHES), 3, 0, awaited=False)
    assert target.received == [Candidates(1, 2, (20, 21), 3, ((1, 31),))]


async def test_a_branch_that_the_target_cannot_produce_is_not_sent() -> None:
    """A tokenizer may have more ids than the model has logits. The target would leave that branch out."""
    target = Target()
    one, _ = link(target)
    branches = (Branch(0, MODEL.vocabulary_size, 0.9), *BRANCHES)
    await one.offer(replace(offered(20, 21, 22), branches=branches), 3, 0, awaited=False)
    assert target.received == [Candidates(1, 2, (20, 21, 22), 3, ((1, 31), (2, 32)))]
    outcome = one.commit(Pass(2, (20, 31, 9), 1, 3, offer_id=1, branch_count=2, branch_accepted=True))
    assert outcome.tried.branches == BRANCHES


async def test_the_rest_of_an_offer_is_taken_later() -> None:
    target = Target()
    one, _ = link(target)
    await one.offer(offered(20, 21, 22, 23, 24), 2, 0, awaited=False)
    assert one.commit(Pass(2, (20, 21, 22), 2, 2, offer_id=1)).tried == offered(20, 21)
    assert one.commit(Pass(5, (23, 9), 1, 2, offer_id=1)).tried == offered(23, 24)


async def test_nothing_new_is_not_sent_again() -> None:
    target = Target()
    one, _ = link(target, 100)
    await one.offer(offered(*range(20, 40)), 4, 0, awaited=False)
    await one.offer(offered(*range(20, 44)), 4, 0, awaited=False)
    assert len(target.received) == 1, "the target still has candidates for more than two forwards"
    one.commit(Pass(2, tuple(range(20, 34)), 13, 13, offer_id=1))
    await one.offer(offered(*range(34, 60)), 4, 0, awaited=False)
    assert len(target.received) == 2, "the target is about to run out of candidates"
    one.commit(Pass(16, (99,), 0, 0))
    await one.offer(offered(*range(34, 60)), 4, 0, awaited=False)
    assert len(target.received) == 3, "its candidates were rejected"


async def test_fewer_candidates_replace_more() -> None:
    """A target that still holds candidates does not wait."""
    target = Target()
    one, _ = link(target, 100)
    await one.offer(offered(*range(20, 60)), 8, 0, awaited=False)
    await one.offer(offered(*range(20, 28)), 8, 0, awaited=False)
    assert target.received == [Candidates(1, 2, tuple(range(20, 60)), 8), Candidates(2, 2, tuple(range(20, 28)), 8)]


async def test_no_candidates_are_sent_that_could_not_be_used() -> None:
    target = Target()
    one, _ = link(target, 3)
    await one.offer(offered(*range(20, 60)), 8, 0, awaited=False)
    assert target.received == [Candidates(1, 2, (20, 21), 8)], "the target adds the last token itself"
    last = Target()
    one, _ = link(last, 1)
    await one.offer(offered(20, 21), 8, 0, awaited=False)
    assert last.received == [] and one.candidate_room == 0


async def test_a_pass_that_waited_in_vain_for_all_of_its_patience_has_timed_out() -> None:
    one, _ = link(Target())
    await one.start(5_000_000)
    await one.offer(offered(20), 1, 5_000_000, awaited=True)
    assert not one.commit(Pass(2, (20,), 1, 1, offer_id=1, waited_ns=5_000_000)).timed_out, "candidates came"
    assert not one.commit(Pass(3, (21,), 0, 0, waited_ns=4_999_000)).timed_out
    assert one.commit(Pass(4, (22,), 0, 0, waited_ns=5_000_000)).timed_out
    impatient, _ = link(Target())
    await impatient.start(0)
    assert not impatient.commit(Pass(2, (20,), 0, 0)).timed_out, "it did not wait"


async def test_it_is_told_to_go_on_only_if_it_waits_for_nobody() -> None:
    target = Target()
    one, _ = link(target)
    await one.start(0)
    await one.offer(Offer(), 0, 0, awaited=False)
    assert len(target.received) == 1, "the target does not wait"
    await one.offer(Offer(), 0, 5_000_000, awaited=True)
    assert target.received[1:] == [Grant(patience_us=5000)]
    await one.offer(Offer(), 0, 4_000_000, awaited=False)
    assert target.received[2:] == [Candidates(0, 2, (), 1)], "the new patience is not worth a message"
    await one.offer(Offer(), 0, 0, awaited=False)
    assert target.received[3:] == [Candidates(0, 2, (), 1), Grant(patience_us=0)]


async def test_a_target_is_told_to_wait_before_it_is_told_to_go_on() -> None:
    """In the other order, a target that has not begun its pass would wait in vain."""
    target = Target()
    one, _ = link(target)
    await one.start(0)
    await one.offer(Offer(), 0, 300_000_000, awaited=False)
    assert target.received[1:] == [Grant(patience_us=300_000), Candidates(0, 2, (), 1)]


BRANCHES = Branch(1, 31, 0.2), Branch(2, 32, 0.1)
FAULTS = {
    "starts elsewhere": Pass(3, (20,), 0, 0),
    "starts earlier": Pass(1, (20,), 0, 0),
    "has no token": Pass(2, (), 0, 0),
    "exceeds the credit": Pass(2, tuple(range(20, 45)), 0, 0),
    "a log probability above 0": Pass(2, (20,), 0, 0, logprobs=(Logprob(5.0),)),
    "a log probability that is no number": Pass(2, (20,), 0, 0, logprobs=(Logprob(float("nan")),)),
    "an alternative that is no number": Pass(2, (20,), 0, 0, logprobs=(Logprob(-1.0, ((20, float("nan")),)),)),
    "a log probability without end": Pass(2, (20,), 0, 0, logprobs=(Logprob(float("-inf")),)),
    "an alternative more than was requested": Pass(
        2, (20,), 0, 0, logprobs=(Logprob(-1.0, ((20, -1.0), (21, -2.0), (22, -3.0))),)
    ),
    "a cache larger than the sequence": Pass(2, (20,), 0, 0, cached_token_count=3),
    "an id of no token": Pass(2, (MODEL.vocabulary.size,), 0, 0),
    "a huge id": Pass(2, (2**31,), 0, 0),
    "takes an offer that was never made": Pass(2, (20,), 0, 1, offer_id=9),
    "takes candidates of no offer": Pass(2, (20, 21), 1, 1),
    "takes more than it was offered": Pass(2, (20,), 0, 4, offer_id=1),
    "accepts more than it took": Pass(2, (20, 21, 22), 2, 1, offer_id=1),
    "accepts what was not offered": Pass(2, (20, 99, 22), 2, 3, offer_id=1),
    "accepts more than it returns": Pass(2, (20,), 2, 3, offer_id=1),
    "has a log probability too many": Pass(2, (20,), 0, 0, logprobs=(Logprob(-1.0), Logprob(-1.0))),
    "has an alternative that is no token": Pass(2, (20,), 0, 0, logprobs=(Logprob(-1.0, ((2**31, -2.0),)),)),
    "ends at a limit that is not reached": Pass(2, (20,), 0, 0, finish_reason=FinishReason.LENGTH),
    "takes two hours": Pass(2, (20,), 0, 0, forward_ns=7_200_000_000_000),
    "waits two hours": Pass(2, (20,), 0, 0, waited_ns=7_200_000_000_000),
    "is in a queue for two hours": Pass(2, (20,), 0, 0, queue_ns=7_200_000_000_000),
    "has more near ties than tokens": Pass(2, (20,), 0, 0, near_tie_count=2),
    "verifies only some branches": Pass(2, (20, 9), 1, 3, offer_id=1, branch_count=1),
    "verifies more branches than were offered": Pass(2, (20, 9), 1, 3, offer_id=1, branch_count=3),
    "verifies branches of no offer": Pass(2, (20,), 0, 0, branch_count=2),
    "verifies the branch of a candidate that it left out": Pass(2, (20, 9), 1, 1, offer_id=1, branch_count=2),
    "accepts a branch that was not offered": Pass(
        2, (20, 33, 9), 1, 3, offer_id=1, branch_count=2, branch_accepted=True
    ),
    "accepts a branch at another place": Pass(2, (31, 9), 0, 3, offer_id=1, branch_count=2, branch_accepted=True),
    "accepts a branch that it did not verify": Pass(2, (20, 31, 9), 1, 3, offer_id=1, branch_accepted=True),
    "accepts a branch without a token": Pass(2, (20,), 1, 3, offer_id=1, branch_count=2, branch_accepted=True),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_the_contract_rules_out_is_an_error_of_the_target(fault: str) -> None:
    one, tape = link(Target(), logprobs=2 if FAULTS[fault].logprobs else None)
    await one.offer(replace(offered(20, 21, 22), branches=BRANCHES), 3, 0, awaited=False)
    with pytest.raises(TargetFault, match="the target violates the protocol"):
        one.commit(FAULTS[fault])
    assert list(tape.ids) == [10, 11], "no token of the pass becomes text"


@pytest.mark.parametrize("requested", [None, 0, 2])
async def test_a_target_reports_the_log_probabilities_that_were_requested(requested: int | None) -> None:
    """No more, which nobody reads, and no less."""
    reports = {None: (), 0: (Logprob(-1.0),), 2: (Logprob(-1.0, ((20, -1.0), (21, -2.0))),)}
    for given, logprobs in reports.items():
        one, _ = link(Target(), logprobs=requested)
        if given == requested or (given, requested) == (0, 2):  # a vocabulary may have fewer ids
            assert one.commit(Pass(2, (20,), 0, 0, logprobs=logprobs)).result.logprobs == logprobs
        else:
            with pytest.raises(TargetFault):
                one.commit(Pass(2, (20,), 0, 0, logprobs=logprobs))


async def test_passes_beyond_the_credit_are_refused_before_anybody_commits_them() -> None:
    """A client that reads slowly commits late, and must not let a target fill the memory."""
    one, _ = link(Target([Pass(2 + place, (20,), 0, 0) for place in range(30)]), max_tokens=20)
    count = 0
    with pytest.raises(TargetFault, match="more tokens than its credit"):
        async for _ in one.passes():
            count += 1
    assert count == 20


async def test_an_end_of_text_may_be_a_candidate() -> None:
    one, _ = link(Target())
    await one.offer(offered(20, 2), 3, 0, awaited=False)
    assert one.commit(Pass(2, (20, 2), 2, 2, offer_id=1)).tried.token_ids == (20, 2)


@pytest.mark.parametrize(
    ("answers", "reason", "code"),
    [
        ([Pass(99, (20,), 0, 0)], "TARGET_FAULT", "INTERNAL"),
        ([Pass(2, (20,), 0, 0)], "SERVICE_UNREACHABLE", "UNAVAILABLE"),  # its stream ends without a reason
        ([], "SERVICE_UNREACHABLE", "UNAVAILABLE"),
    ],
)
async def test_a_client_is_told_that_the_target_is_at_fault(answers: list[Pass], reason: str, code: str) -> None:
    request = Request((10, 11), max_tokens=5)
    async with asyncio.timeout(60):
        with pytest.raises(Exception) as caught:
            async for _ in generate(request, MODEL, Target(answers)):
                pass
    assert getattr(caught.value, "reason", "") == reason
    assert code_of(caught.value).name == code  # type: ignore[arg-type]


async def test_an_error_of_the_target_ends_the_request_with_that_error() -> None:
    lost = Unreachable("the target", "gone")

    class Lost(Target):
        async def passes(self) -> AsyncIterator[Pass]:
            yield Pass(2, (20,), 0, 0)
            raise lost

    async with asyncio.timeout(60):
        with pytest.raises(Unreachable) as caught:
            async for _ in generate(Request((10, 11), max_tokens=5), MODEL, Lost()):
                pass
    assert caught.value is lost


async def test_the_pauses_of_a_client_are_not_the_targets_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass counts from when it arrives; a target without credit waits for the client, for an unknown time."""
    monkeypatch.setattr("bridge.target_link.CREDIT_TOKENS", 4)
    now, read, statistics = 0, asyncio.Event(), Statistics()

    def clock() -> int:
        return now

    class Paced(Target):
        async def passes(self) -> AsyncIterator[Pass]:
            nonlocal now
            for place in range(5):
                if place == 4:
                    await read.wait()
                now += 1_000_000
                yield Pass(2 + place, (20 + place,), 0, 0)

    request = Request((10, 11), max_tokens=5)
    async for event in generate(request, MODEL, Paced(), clock=clock, statistics=statistics):
        now += 1_000_000_000
        if isinstance(event, Delta):
            read.set()
    plain = statistics.plans["plain"]
    assert (plain.target_pass_count, plain.elapsed_ns) == (3, 3_000_000)


@pytest.mark.parametrize("asked", [True, False])
async def test_progress_is_reported_every_tenth_of_a_second_if_it_is_asked_for(asked: bool) -> None:
    now, reported = 0, []

    def clock() -> int:
        return now

    request = Request((10, 11), max_tokens=5, reports_progress=asked)
    target = Target([Pass(2 + place, (20 + place,), 0, 0) for place in range(5)])
    async for event in generate(request, MODEL, target, clock=clock):
        if isinstance(event, Delta):
            reported.append(event.progress is not None)
        now += 50_000_000
    assert reported == [False, asked, False, asked, False]
    assert isinstance(event, Finished)
    assert (event.first_token_ns, event.elapsed_ns) == (50_000_000, 300_000_000)


@pytest.mark.parametrize("sources", [("suffix",), ("suffix", "draft")])
async def test_a_draft_is_asked_for_only_if_the_request_allows_it(sources: tuple[str, ...]) -> None:
    asked: list[Exception | None] = []
    request = Request((10, 11), max_tokens=1, speculation=SpeculationParameters(sources=sources))
    target = Target([Pass(2, (20,), 0, 0)])
    events = [event async for event in generate(request, MODEL, target, asked.append)]  # type: ignore[arg-type]
    assert asked == ([None] if "draft" in sources else [])
    (*_, finished) = [event async for event in generate(request, MODEL, target)]
    assert isinstance(events[-1], Finished) and isinstance(finished, Finished)
    assert finished.statistics.note == events[-1].statistics.note == ""


async def test_an_endless_target_is_cut_off_by_its_credit() -> None:
    answers = [Pass(2 + place, (20,), 0, 0) for place in range(1000)]
    events = [event async for event in generate(Request((10, 11), max_tokens=5), MODEL, Target(answers))]
    assert sum(len(getattr(event, "token_ids", ())) for event in events) == 5
