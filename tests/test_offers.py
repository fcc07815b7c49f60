"""Whose candidates a pass took, how sure their draft was, and what is learnt of that."""

import asyncio
from contextlib import aclosing, closing

import pytest

from bridge.estimates import Estimates
from bridge.generation import Request, render
from bridge.lead import Lead
from bridge.policy import Policy, SpeculationParameters
from bridge.ports import Pass, Proposal
from bridge.speculation import Guess, Source, Speculation
from bridge.suffix import SuffixDrafter
from bridge.tape import Tape
from bridge.trial import Drafting, DraftRecord, Trial
from services.target.session import TargetSession
from tests import tiny
from tests.alone import PROMPT, oracle
from tests.test_loop import ScriptedDrafter


@pytest.mark.parametrize("source", [Source.TEXT, Source.DRAFT])
async def test_candidates_are_told_apart_and_learnt_of(source: Source) -> None:
    """Of an honest draft that is half sure, or of a text that says all that the target will say."""
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    truth = model.vocabulary.spell(oracle(model, engine, 0.0, 40))
    right = [model.vocabulary.pieces(truth[at:]).ids for at in range(len(truth))]
    scheduler = tiny.scheduler(engine)
    estimates, trial = Estimates(), Trial(DraftRecord())
    trial.drafting = Drafting.NONE if source is Source.TEXT else Drafting.AHEAD
    trial.learn = lambda *_: None  # type: ignore[method-assign]
    with closing(TargetSession(model, scheduler, tiny.sampler(model, 0.0))) as session:
        request = Request(PROMPT)
        tape = Tape(model.vocabulary, render(request, model, model).ids)
        drafter = ScriptedDrafter(model, right, PROMPT.encode(), truth, tape, None)
        suffix = SuffixDrafter(PROMPT.encode() + truth + PROMPT.encode()) if source is Source.TEXT else None
        policy = Policy(SpeculationParameters(), estimates, trial)
        lead = Lead(model, render(request, model, model))
        loop = Speculation(model, tape, session, drafter, lead, policy, suffix=suffix)
        sources = set()
        async with asyncio.timeout(20), aclosing(loop.run(40)) as passes:
            async for event in passes:
                await asyncio.sleep(0.01)  # so that candidates come in time
                sources |= {loop.source} if event.accepted_token_count else set()
    scheduler.close()
    did = loop.statistics
    assert sources <= {source}
    assert did.num_draft_tokens > 0
    assert did.num_suffix_draft_tokens == (did.num_draft_tokens if source is Source.TEXT else 0)
    assert bool(estimates.lengths.total) == (source is Source.TEXT and did.num_accepted_tokens > 0)
    learnt = [tried for _, tried in estimates.confidences._counts]
    assert bool(sum(learnt)) == (source is Source.DRAFT)
    assert sum(learnt) == learnt[2], "the draft is half sure of each token"


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


def test_a_candidate_is_as_sure_as_the_drafts_tokens_that_begin_in_it() -> None:
    model = tiny.model("byte_level")
    lead = Lead(model, render(Request(PROMPT), model, model))
    tape = Tape(model.vocabulary, [])
    assert lead.sync(tape, 8)
    ids = [id_ for id_, data in enumerate(model.vocabulary.tokens) if data and len(data) == 2][:3]
    assert lead.hear(Proposal(1, tuple(ids), (0.9, 0.8, 0.5)))
    assert lead.confidences([1, 1, 4]) == [0.9, 1.0, pytest.approx(0.4)]
    assert lead.confidences([3, 3]) == [pytest.approx(0.72), 0.5]
    tape.commit([ids[0]])
    assert lead.ahead(tape)
    assert lead.confidences([2, 2]) == [0.8, 0.5]
