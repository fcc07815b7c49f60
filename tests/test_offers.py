"""Whose candidates a pass took, how sure their draft was, and what is learnt of that."""

import asyncio
from contextlib import aclosing, closing

import pytest

from bridge.estimates import Estimates
from bridge.generation import Delta, Request, Source, _attributed, render
from bridge.lead import Lead
from bridge.models import Model
from bridge.policy import Policy, SpeculationParameters, Worth
from bridge.ports import Candidates, Grant, Pass, Proposal, Sync
from bridge.speculation import Guess, Speculation
from bridge.suffix import MOST_DATA, Match, SuffixDrafter
from bridge.tape import Tape
from bridge.trial import Drafting, DraftRecord, Trial
from draftbridge.v1 import bridge_pb2
from services.demo import _by_source
from services.target.session import TargetSession
from tests import tiny
from tests.alone import PROMPT, QueuedDrafter, oracle


def flat() -> Estimates:
    """Of a target whose passes take the same, however wide they are."""
    estimates = Estimates()
    estimates.costs.single = 1e7
    for width in (2, 25) * 100:
        estimates.costs.steps.learn(width, 0.0)
    return estimates


class Patient(Policy):
    """Lets the target wait for candidates, so that they come in time on any machine."""

    patience_us = 1_000_000


class TwoTokens(QueuedDrafter):
    """Says the next two tokens of a text, half sure."""

    def __init__(self, model: Model, text: bytes) -> None:
        super().__init__()
        self._model, self._text = model, text

    async def sync(self, sync: Sync) -> None:
        says = self._model.vocabulary.pieces(self._text[sync.byte_offset :]).ids[:2]
        self.queue.put_nowait(Proposal(sync.epoch, tuple(says), (0.5,) * len(says), done=True))


@pytest.mark.parametrize("sources", [{Source.TEXT}, {Source.DRAFT}, {Source.DRAFT, Source.TEXT}], ids=str)
async def test_candidates_are_told_apart_and_learnt_of(sources: set[Source]) -> None:
    """Of an honest draft that is half sure, of a text that says all that the target will say, or of that behind it."""
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    truth = model.vocabulary.spell(oracle(model, engine, 0.0, 40))
    scheduler = tiny.scheduler(engine)
    estimates, trial = flat(), Trial(DraftRecord())
    trial.drafting = Drafting.AHEAD if Source.DRAFT in sources else Drafting.NONE
    trial.learn = lambda *_: None  # type: ignore[method-assign]
    with closing(TargetSession(model, scheduler, tiny.sampler(model, 0.0))) as session:
        request = Request(PROMPT)
        tape = Tape(model.vocabulary, render(request, model, model).ids)
        suffix = SuffixDrafter(PROMPT.encode() + truth + PROMPT.encode()) if Source.TEXT in sources else None
        policy = Patient(SpeculationParameters(), estimates, trial)
        lead = Lead(model, render(request, model, model))
        loop = Speculation(model, tape, session, TwoTokens(model, truth), lead, policy, suffix=suffix)
        if len(sources) == 2:  # by itself the text would be believed
            policy.suffix_worth = lambda _: Worth(0, 0.0)  # type: ignore[method-assign]
        accepted = from_text = 0
        async with asyncio.timeout(20), aclosing(loop.run(40)) as passes:
            async for event in passes:
                accepted, from_text = accepted + event.accepted_token_count, from_text + loop.from_text
    scheduler.close()
    did = loop.statistics
    assert tape.data == truth
    assert (accepted, from_text) == (did.num_accepted_tokens, did.num_suffix_accepted_tokens)
    assert bool(did.num_suffix_draft_tokens) == (Source.TEXT in sources)
    assert bool(did.num_draft_tokens - did.num_suffix_draft_tokens) == (Source.DRAFT in sources)
    learnt = [tried for _, tried in estimates.confidences._counts]
    assert sum(learnt) == learnt[2], "the draft is half sure of each token"
    assert sum(learnt) <= did.num_draft_tokens - did.num_suffix_draft_tokens
    assert bool(sum(learnt)) == (Source.DRAFT in sources)
    of_matches = sum(accepted for accepted, _ in estimates.lengths._counts)
    assert of_matches <= did.num_suffix_accepted_tokens
    assert bool(of_matches) == (Source.TEXT in sources)


def test_offers_are_told_apart_by_what_a_pass_took() -> None:
    """One from the text, then the draft's while the forward with the text's is under way."""
    model = tiny.model("byte_level")
    tape = Tape(model.vocabulary, [5, 6])
    loop = Speculation(model, tape, None, None, None, Policy(SpeculationParameters()))  # type: ignore[arg-type]
    loop._offers = [(2, Guess([7, 8, 9, 10], 3, 20)), (2, Guess([7, 8, 4], 3, 0, [0.9, 0.8, 0.7]))]
    assert loop._verified(Pass(2, (7, 8, 3), 2, 3)).match_length == 20
    assert loop._offers == []
    loop._offers = [(2, Guess([7, 8, 9, 10], 2, 20)), (2, Guess([7, 8, 4], 3, 0, [0.9, 0.8, 0.7]))]
    assert loop._verified(Pass(2, (7, 8), 1, 1)).match_length == 20
    assert loop._verified(Pass(4, (4,), 0, 1)).match_length == 20
    loop._offers = [(2, Guess([7, 8, 4, 1], 3, 0, [0.9, 0.8, 0.7, 0.6]))]
    loop._verified(Pass(2, (7,), 0, 0))
    assert loop._verified(Pass(3, (8, 4, 9), 2, 3)).confidences == [0.8, 0.7, 0.6]


def test_the_text_goes_on_behind_what_the_draft_says() -> None:
    """Also in the middle of a word; and what became of both is learnt of each."""
    model = tiny.model("byte_level")
    text = b"the small house on the hill"
    suffix, tape = SuffixDrafter(text + b" and "), Tape(model.vocabulary, [])
    lead = Lead(model, render(Request(text.decode() + " and "), model, model))
    assert lead.sync(tape, 8)
    said = model.vocabulary.pieces(b"the small ho").ids
    assert lead.hear(Proposal(1, tuple(said), (0.9,) * len(said)))
    estimates, trial = flat(), Trial(DraftRecord())
    trial.drafting = Drafting.AHEAD
    policy = Policy(SpeculationParameters(), estimates, trial)
    loop = Speculation(model, tape, None, None, lead, policy, suffix=suffix)  # type: ignore[arg-type]
    guess = loop._guess()
    whole = model.vocabulary.pieces(text).ids
    assert guess.ids == whole[: len(guess.ids)]
    drafted = len(guess.confidences)
    begins = sum(len(model.vocabulary.token_bytes(id_)) for id_ in guess.ids[: drafted - 1])
    assert begins < len("the small ho") <= begins + len(model.vocabulary.token_bytes(guess.ids[drafted - 1]))
    assert guess.match_length == len(" the small ho") - 1
    assert guess.from_text(len(guess.ids)) == len(guess.ids) - drafted > 0
    assert drafted < guess.width == len(guess.ids)
    loop._offers = [(0, guess)]
    loop._passed_ns = 1
    taken = Pass(0, (*guess.ids[: drafted + 1], 5), drafted + 1, len(guess.ids), forward_ns=1000)
    loop._count(taken)
    assert loop.from_text == loop.statistics.num_suffix_accepted_tokens == 1
    assert loop.statistics.num_suffix_draft_tokens == len(guess.ids) - drafted
    assert [sum(column) for column in zip(*estimates.confidences._counts, strict=True)] == [drafted, drafted]
    assert sum(accepted for accepted, _ in estimates.lengths._counts) == 1


def behind(match: Match | None, said: bytes, *, eos: bool = False) -> tuple[Speculation, Guess]:
    """What is guessed where the text has that match behind what a sure draft said."""
    model = tiny.model("byte_level")
    lead, tape = Lead(model, render(Request(PROMPT), model, model)), Tape(model.vocabulary, [])
    assert lead.sync(tape, 8)
    ids = (*model.vocabulary.pieces(said).ids, *(model.special_ids.eos if eos else ()))
    assert lead.hear(Proposal(1, ids, (0.9,) * len(ids), done=eos))
    suffix, trial = SuffixDrafter(), Trial(DraftRecord())
    suffix.match = lambda ahead=b"": match if ahead else None  # type: ignore[method-assign]
    trial.drafting = Drafting.AHEAD
    policy = Policy(SpeculationParameters(), flat(), trial)
    loop = Speculation(model, tape, None, None, lead, policy, suffix=suffix)  # type: ignore[arg-type]
    return loop, loop._guess()


def test_what_is_cut_off_is_no_candidate() -> None:
    """The text's data ends in the middle of a word; where it ends by itself, nothing is left out."""
    vocabulary = tiny.model("byte_level").vocabulary
    said, long = b"the small ho", b"use on the hill and " * 13
    _, guess = behind(Match(20, long[:MOST_DATA]), said)
    assert guess.ids
    assert vocabulary.spell(guess.ids) == (said + long)[: len(vocabulary.spell(guess.ids))]
    _, guess = behind(Match(20, b"u"), said)
    assert vocabulary.spell(guess.ids) == said + b"u"
    _, guess = behind(Match(7, long[:MOST_DATA]), said)
    assert (vocabulary.spell(guess.ids), guess.match_length) == (said, 0), "too short to tell how a word goes on"
    _, guess = behind(Match(20, long[:MOST_DATA]), said, eos=True)
    assert vocabulary.spell(guess.ids) == said, "nothing goes on behind the end"
    assert guess.from_text(len(guess.ids)) == 0


def test_a_match_behind_a_draft_is_not_blamed_for_what_the_draft_said() -> None:
    loop, guess = behind(Match(20, (b"use on the hill and " * 13)[:MOST_DATA]), b"the small ho")
    estimates, drafted = loop._policy._estimates, len(guess.confidences)
    estimates.untried, loop._passed_ns = 50, 1
    loop._offers = [(0, guess)]
    loop._count(Pass(0, (guess.ids[0], 5), 1, len(guess.ids), forward_ns=1000))
    assert estimates.lengths.total == 0 and not any(tried for _, tried in estimates.lengths._counts)
    assert sum(tried for _, tried in estimates.confidences._counts) == 2
    assert estimates.untried == 0
    estimates.untried = 50
    loop._offers = [(0, guess)]
    loop._count(Pass(0, (guess.ids[0], 5), 1, drafted, forward_ns=1000))
    assert estimates.untried >= 50, "none of the text's was tried"


def test_a_draft_that_says_more_is_told_at_once() -> None:
    """What the target has of the text behind the draft's is replaced, however much of it there is."""
    loop, guess = behind(Match(20, (b"use on the hill and " * 13)[:MOST_DATA]), b"the small ho")
    sent: list[tuple[int, ...]] = []

    class Target:
        async def candidates(self, candidates: Candidates) -> None:
            sent.append(candidates.token_ids)

        async def grant(self, grant: Grant) -> None: ...

    loop._target = Target()  # type: ignore[assignment]
    asyncio.run(loop._send_candidates())
    assert sent == [tuple(guess.ids)]
    more = tuple(loop._model.vocabulary.pieces(b"rse").ids)
    assert loop._lead and loop._lead.hear(Proposal(1, more, (0.9,) * len(more)))
    asyncio.run(loop._send_candidates())
    assert loop._model.vocabulary.spell(sent[1]).startswith(b"the small horse")


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("from_text", range(5))
def test_a_delta_says_whose_its_bytes_are(accepted: int, from_text: int) -> None:
    """And the demo colours every byte of it once."""
    if from_text > accepted:
        return
    model = tiny.model("byte_level")
    ids = tuple(model.vocabulary.byte_ids[byte] for byte in "abéd".encode())
    delta = _attributed(model, Delta("abéd", ids), Pass(0, ids, accepted, 5), from_text)
    assert delta.accepted_byte_count == accepted
    assert delta.suffix_byte_count == from_text
    sources = {Source.NOBODY: not accepted, Source.TEXT: 0 < accepted == from_text, Source.DRAFT: accepted > from_text}
    assert sources[delta.source]
    parts = _by_source(
        bridge_pb2.GenerateDelta(text=delta.text, accepted_byte_count=accepted, suffix_byte_count=from_text)
    )
    assert "".join(part for part, _ in parts) == delta.text
    ends = [accepted - from_text, accepted, 5]
    for (part, _), begin, end in zip(parts, [0, *ends], ends, strict=False):
        assert end - begin - 1 <= len(part.encode()) <= end - begin + 1, "a cut character is the next part's"


def test_a_candidate_is_as_sure_as_the_drafts_tokens_that_begin_in_it() -> None:
    model = tiny.model("byte_level")
    lead = Lead(model, render(Request(PROMPT), model, model))
    tape = Tape(model.vocabulary, [])
    assert lead.sync(tape, 8)
    ids = [id_ for id_, data in enumerate(model.vocabulary.tokens) if data and len(data) == 2][:3]
    assert lead.hear(Proposal(1, tuple(ids), (0.9, 0.8, 0.5)))
    assert lead.confidences([1, 1, 4]) == [0.9, 1.0, pytest.approx(0.4)]
    assert lead.confidences([3, 3]) == [pytest.approx(0.72), 0.5]
    assert lead.confidences([3, 4, 2]) == [pytest.approx(0.72), 0.5], "none of what it did not say"
    tape.commit([ids[0]])
    assert lead.ahead(tape)
    assert lead.confidences([2, 2]) == [0.8, 0.5]
