"""Whatever the draft proposes, the text is the target's own."""

import asyncio
from contextlib import aclosing, closing
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import Unreachable
from bridge.generation import Finished, generate
from bridge.loop import speculate
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import FinishReason, Proposal, Sync
from bridge.request import Request, render
from bridge.sampling.sampler import Choice, History, Logits, Sampler, SamplingParameters
from bridge.sources.draft import DraftSource
from bridge.sources.source import Draft, DraftPace, Opening, Outcome
from bridge.sources.source_set import SourceSet
from bridge.sources.suffix import SuffixSource
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.target_link import TargetLink
from bridge.text.models import Model
from bridge.text.translation import candidates
from services.model.draft.session import DraftSession
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.alone import PROMPT, QueuedDrafter, answer, oracle
from tests.support.simulated import estimates_of

MODES = st.sampled_from([Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO])


class ScriptedDrafter(QueuedDrafter):
    """Proposes a given list of ids in each epoch, and checks what it receives.

    `dies_at`: the epoch in which it is lost. `truth`: the target's own continuation of `prompt`; the context that the
    draft is given must always spell the beginning of both.
    """

    def __init__(
        self, model: Model, script: list[list[int]], prompt: bytes, truth: bytes, tape: Tape, dies_at: int | None
    ) -> None:
        super().__init__()
        self._words = model.vocabulary
        self._script = script
        self._prompt = prompt
        self._truth = truth
        self._tape = tape
        self._dies_at = dies_at
        self._held: list[int] = []
        self.epochs = 0

    async def sync(self, sync: Sync) -> None:
        assert sync.keep_token_count <= len(self._held)
        self._held[sync.keep_token_count :] = sync.token_ids
        self._check_context(sync.byte_offset)
        ids = self._script[self.epochs % len(self._script)][: sync.credit] if self._script else []
        self.epochs += 1
        self._held += [id_ for id_ in ids if id_ not in self._words.special]
        if sync.epoch > 1 and len(ids) < sync.credit:
            self.queue.put_nowait(Proposal(sync.epoch - 1, (5,), (1.0,)))  # late, from an old epoch
        if self.epochs == self._dies_at:
            self.queue.put_nowait(Unreachable("the draft", "gone"))
            return
        self.queue.put_nowait(Proposal(sync.epoch, tuple(ids), (0.5,) * len(ids), done=True))

    def _check_context(self, byte_offset: int) -> None:
        spelled = self._words.spell(self._held)
        committed = self._prompt + bytes(self._tape.data)
        assert (self._prompt + self._truth).startswith(committed)
        if self._words is tiny.vocabulary("wordpiece"):
            # This vocabulary cannot spell white space or capitals, so that ids are compared instead of bytes.
            assert self._held == self._words.pieces(committed, whole=True).ids
            return
        spelled = spelled.removeprefix(b" ")  # some tokenizers begin every text with a space
        assert committed.startswith(spelled)
        assert len(committed) - len(spelled) <= 3, "only half a character may be missing"
        assert byte_offset == len(spelled) - len(self._prompt)


# Options that depend on earlier tokens, that truncate, and that end a text earlier or later.
OPTIONS: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"top_k": 4, "min_tokens": 6},
    {"top_p": 0.8, "stop_token_ids": tuple(range(100, 130)), "min_tokens": 3},
    {"min_p": 0.1, "ignore_eos": True, "logit_bias": {2: 5.0, 1: 3.0}},
]


class Recording:
    """A sampler that records the offset and counter of each draw."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.ends = sampler.ends
        self.draws: list[tuple[int, int]] = []

    def choose(self, logits: Logits, offset: int, counter: int, history: History) -> Choice:
        self.draws.append((offset, counter))
        return self._sampler.choose(logits, offset, counter, history)


class OwnText(SuffixSource):
    """Prompt lookup in a text of its own, to which it adds what the target commits."""

    def observe(self, outcome: Outcome) -> None:
        self._tape.commit(outcome.result.token_ids)


class Erratic(Planner):
    """Makes arbitrary plans in AUTO: the text must not depend on them.

    The plans are not drawn from Hypothesis: how many a request makes depends on timing.
    """

    def __init__(self, parameters: SpeculationParameters, estimates: RequestEstimates, seed: int) -> None:
        super().__init__(parameters, estimates)
        self._dice = Random(seed)

    def plan(self, offers, state, room=64) -> Plan:  # type: ignore[no-untyped-def]
        if self.mode is not Mode.AUTO:
            return super().plan(offers, state, room)
        lead, turns = min(self._dice.randint(0, 9), room), self._dice.random() < 0.5
        pace = DraftPace(lead, turns)
        return Plan("erratic", Prediction(1.0, 1.0), pace, self._dice.choice([0.0, 1e6]))

    def choose(self, offers, plan):  # type: ignore[no-untyped-def]
        if self.mode is not Mode.AUTO or not offers:
            return super().choose(offers, plan)
        offer = self._dice.choice(offers)
        return offer, self._dice.randint(1, len(offer.token_ids))


@st.composite
def scripts(draw: st.DrawFn) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, 275), max_size=24), max_size=6))


@pytest.mark.parametrize("target_kind", tiny.KINDS)
@pytest.mark.parametrize("draft_kind", tiny.KINDS)
@settings(max_examples=25)
@given(
    script=scripts(),
    honest=st.booleans(),
    mode=MODES,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
    options=st.sampled_from(OPTIONS),
    draft_length=st.none() | st.integers(1, 12),
    dies_at=st.none() | st.integers(1, 5),
    said_before=st.booleans(),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 24),
)
def test_output_is_the_targets_own_for_any_proposals(
    target_kind: str,
    draft_kind: str,
    script: list[list[int]],
    honest: bool,
    mode: Mode,
    temperature: float,
    options: dict[str, object],
    draft_length: int | None,
    dies_at: int | None,
    said_before: bool,
    seed: int,
    count: int,
) -> None:
    target, draft = tiny.model(target_kind), tiny.model(draft_kind)
    engine = tiny.HashEngine(target, seed=seed % 4)
    expected = oracle(target, engine, temperature, count, **options)
    truth = target.vocabulary.spell(expected)
    if honest:
        # Proposals in the draft's own tokens are partly right; they start at places that need not be token boundaries.
        right = [draft.vocabulary.pieces(truth[at:]).ids for at in range(0, len(truth), 3)]
        script = [part for pair in zip(right, [*script, *right], strict=False) for part in pair]

    async def run() -> list[int]:
        scheduler = tiny.scheduler(engine)
        try:
            sampler = Recording(tiny.sampler(target, temperature, **options))
            with closing(TargetSession(target, scheduler, sampler)) as session:  # type: ignore[arg-type]
                request = Request(PROMPT)
                tape = Tape(target.vocabulary, render(request, target, target).ids)
                drafter = ScriptedDrafter(draft, script, PROMPT.encode(), truth, tape, dies_at)
                estimates = TargetEstimates()
                # The text before may already hold what the target is going to produce.
                known = PROMPT.encode() + truth + PROMPT.encode() if said_before else b""
                suffix = OwnText(Tape(target.vocabulary, candidates(target.vocabulary, known)))
                parameters = SpeculationParameters(mode, draft_length)
                opening = Opening(tape, lambda model: render(request, model, target))
                source = DraftSource(Draft(draft, drafter, estimates.draft("draft")), opening)
                sources = [suffix] if mode is Mode.AUTO else []
                chain = SourceSet(sources, target, target.special_ids.eos[0])
                chain.insert(source)
                own = estimates_of(estimates, estimates.draft("draft"), sources)
                planner = Erratic(parameters, own, seed)
                loop = speculate(
                    TargetLink(session, target, tape, count),
                    chain,
                    planner,
                    Statistics(),
                )
                async with asyncio.timeout(60), aclosing(loop) as outcomes:
                    async for outcome in outcomes:
                        result = outcome.result
                        assert len(outcome.tried.token_ids) == result.candidate_token_count
                        assert result.candidate_token_count >= result.accepted_token_count
                assert drafter.epochs >= (count > 1) or mode is Mode.AUTO
                assert scheduler.free_slot_count == engine.slot_count - 1
                assert len(set(sampler.draws)) == len(sampler.draws), "the same noise was used twice"
                return list(tape.ids[len(tape.ids) - tape.generated_token_count :])
        finally:
            scheduler.close()

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("target_kind", "draft_kind"), [("byte_level", "unigram"), ("sentencepiece", "byte_level")])
async def test_two_real_sessions_agree_with_the_target_alone(
    mode: Mode, temperature: float, target_kind: str, draft_kind: str
) -> None:
    target, draft = tiny.model(target_kind), tiny.model(draft_kind)
    engine = tiny.HashEngine(target)
    expected = oracle(target, engine, temperature, 60)
    scheduler = tiny.scheduler(tiny.HashEngine(draft, seed=1))
    request = Request(
        PROMPT,
        sampling=SamplingParameters(temperature=temperature),
        seed=0,
        max_tokens=60,
        speculation=SpeculationParameters(mode),
    )
    with closing(DraftSession(draft, scheduler, tiny.sampler(draft, temperature))) as session:
        text, ids, finished = await answer(target, engine, session, draft, request, temperature)
    scheduler.close()
    assert ids == expected
    assert text == target.vocabulary.spell(expected).decode(errors="replace")
    # Only in lockstep does the target wait for the draft, however slow the machine is.
    assert finished.statistics.sources["draft"].proposed_token_count > 0 or mode is not Mode.LOCKSTEP
    assert finished.statistics.note == ""


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC])
async def test_a_draft_that_knows_the_target_is_accepted(mode: Mode) -> None:
    """Draft and target are the same model.

    Not every token is accepted: a random model's ids are seldom what the tokenizer gives for their text, and the draft
    continues from those.
    """
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    expected = oracle(model, engine, 0.0, 60)
    scheduler = tiny.scheduler(tiny.HashEngine(model))
    request = Request(PROMPT, max_tokens=60, speculation=SpeculationParameters(mode, num_assistant_tokens=4))
    with closing(DraftSession(model, scheduler, tiny.sampler(model))) as session:
        _, ids, finished = await answer(model, engine, session, model, request, 0.0)
    scheduler.close()
    assert ids == expected
    statistics = finished.statistics
    if mode is Mode.LOCKSTEP:
        assert statistics.num_accepted_tokens > 0.3 * len(expected)
    assert len(expected) == statistics.target_pass_count + statistics.num_accepted_tokens
    assert sum(statistics.num_accepted_tokens_per_position) == statistics.num_accepted_tokens


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_max_tokens_is_never_overrun(limit: int) -> None:
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    scheduler = tiny.scheduler(tiny.HashEngine(model))
    request = Request(
        PROMPT, max_tokens=limit, speculation=SpeculationParameters(Mode.LOCKSTEP, num_assistant_tokens=8)
    )
    with closing(DraftSession(model, scheduler, tiny.sampler(model))) as session:
        _, ids, finished = await answer(model, engine, session, model, request, 0.0)
    scheduler.close()
    assert len(ids) == limit
    assert finished.finish_reason is FinishReason.LENGTH


async def test_a_full_context_ends_the_text() -> None:
    model = tiny.model("byte_level", context_length=30)
    engine = tiny.HashEngine(model, seed=4)
    prompt_count = len(render(Request(PROMPT), model, model).ids)
    _, ids, finished = await answer(model, engine, None, None, Request(PROMPT), 0.0)
    assert prompt_count + len(ids) == 30
    assert finished.finish_reason is FinishReason.CONTEXT_FULL


@pytest.mark.parametrize("max_tokens", [None, 5])
async def test_a_replica_with_a_longer_context_ends_the_text_where_the_first_one_would(max_tokens: int | None) -> None:
    """A request may move to one in the middle of its text; its limit was found out before."""
    model = tiny.model("byte_level", context_length=30)
    longer = replace(model, context_length=60)
    scheduler = tiny.scheduler(tiny.HashEngine(longer, seed=4))
    with closing(TargetSession(longer, scheduler, tiny.sampler(longer))) as session:
        *_, finished = [event async for event in generate(Request(PROMPT, max_tokens=max_tokens), model, session)]
    scheduler.close()
    assert isinstance(finished, Finished)
    count = 30 - len(render(Request(PROMPT), model, model).ids)
    assert finished.generated_token_count == (max_tokens or count)
    assert finished.finish_reason is (FinishReason.LENGTH if max_tokens else FinishReason.CONTEXT_FULL)


async def test_a_stop_string_in_the_middle_of_a_pass_ends_the_text_there() -> None:
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    expected = oracle(model, engine, 0.0, 60)
    whole = model.vocabulary.spell(expected).decode(errors="replace")
    stop = whole[20:23]
    scheduler = tiny.scheduler(tiny.HashEngine(model))
    request = Request(PROMPT, max_tokens=60, stop=(stop,), speculation=SpeculationParameters(Mode.LOCKSTEP))
    with closing(DraftSession(model, scheduler, tiny.sampler(model))) as session:
        text, ids, finished = await answer(model, engine, session, model, request, 0.0)
    scheduler.close()
    assert text == whole[: whole.index(stop)]
    assert ids == expected[: len(ids)]
    assert finished.finish_reason is FinishReason.STOP
    assert finished.generated_token_count == len(ids)


async def test_padding_ids_are_never_chosen() -> None:
    """Ids beyond the tokenizer get the best logits and must not win."""
    model = tiny.model("byte_level", padding=20)
    engine = tiny.HashEngine(model)
    original = engine.logits

    def tempting(ids: list[int]) -> object:
        scores = original(ids).copy()
        scores[model.vocabulary.size :] = 1000.0
        return scores

    engine.logits = tempting  # type: ignore[method-assign, assignment]
    for temperature in (0.0, 1.0):
        request = Request(PROMPT, max_tokens=30)
        _, ids, _ = await answer(model, engine, None, None, request, temperature)
        assert max(ids) < model.vocabulary.size


async def test_an_unsure_token_ends_the_drafts_turn() -> None:
    model = tiny.model("byte_level")
    engine = tiny.HashEngine(model)
    proposed = {}
    for threshold in (0.0, 0.99):
        scheduler = tiny.scheduler(tiny.HashEngine(model))
        speculation = SpeculationParameters(Mode.LOCKSTEP, 6, assistant_confidence_threshold=threshold)
        request = Request(PROMPT, max_tokens=40, speculation=speculation)
        with closing(DraftSession(model, scheduler, tiny.sampler(model))) as session:
            _, ids, finished = await answer(model, engine, session, model, request, 0.0)
        scheduler.close()
        assert ids == oracle(model, engine, 0.0, 40)
        proposed[threshold] = finished.statistics.num_draft_tokens
    assert 0 < proposed[0.99] < proposed[0.0]


async def test_a_prompt_too_long_for_the_draft_goes_on_without_it() -> None:
    target, draft = tiny.model("byte_level"), tiny.model("unigram", context_length=5)
    engine = tiny.HashEngine(target)
    scheduler = tiny.scheduler(tiny.HashEngine(draft))
    request = Request(PROMPT, max_tokens=20, speculation=SpeculationParameters(Mode.LOCKSTEP))
    with closing(DraftSession(draft, scheduler, tiny.sampler(draft))) as session:
        async with asyncio.timeout(60):
            _, ids, finished = await answer(target, engine, session, draft, request, 0.0)
    scheduler.close()
    assert ids == oracle(target, engine, 0.0, 20)
    assert finished.statistics.num_drafts == 0
    assert finished.statistics.waited_ns < 4e9, "an empty offer: the target does not wait"
