"""Grammars: the text is that of the target alone with the same grammar."""

import asyncio
import json
from contextlib import aclosing, closing
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import InvalidGrammar
from bridge.generation import Delta, Finished, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Candidates, FinishReason, Run, Sync
from bridge.request import Request, render
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.token_matcher import GrammarPosition
from services.model.draft.session import DraftSession
from services.model.target.session import TargetSession
from tests.support import grammars as support
from tests.support import tiny
from tests.support.alone import PROMPT, did, in_order

BYTES = byte_tokenizer()
FLEXIBLE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
# WordPiece writes no spaces and no capitals.
WORDS_ONLY = ("wordpiece",)


def follow(grammar: Grammar) -> ByteMatcher:
    return ByteMatcher(compile_grammar(BYTES, grammar))


async def together(
    target_kind: str,
    draft_kind: str | None,
    grammar: Grammar,
    mode: Mode,
    temperature: float,
    engine_seed: int,
    count: int,
    *,
    stop: tuple[str, ...] = (),
    **options: object,
) -> tuple[str, list[int], Finished]:
    """Generates with real sessions, the draft model's among them."""
    target = tiny.model(target_kind)
    engine = tiny.HashEngine(target, engine_seed)
    logprobs = options.pop("logprobs", None)
    scheduler, sampler = tiny.scheduler(engine), tiny.sampler(target, temperature, **options)
    sampler = replace(sampler, logprobs=logprobs)
    matcher = support.Grammars(target).open(grammar, sampler.ends)
    draft = tiny.model(draft_kind) if draft_kind else None
    drafting = tiny.scheduler(tiny.HashEngine(draft, 1)) if draft else None
    request = Request(PROMPT, max_tokens=count, stop=stop, logprobs=logprobs, speculation=SpeculationParameters(mode))
    text, ids, event = "", [], None
    try:
        drafter = None
        if draft and drafting:
            draft_matcher = support.Grammars(draft).open_draft(grammar)
            drafter = DraftSession(draft, drafting, tiny.sampler(draft, temperature), draft_matcher)
        with closing(TargetSession(target, scheduler, sampler, matcher=matcher)) as session:
            events = generate(
                request, target, session, in_order((draft, drafter)) if draft else None, grammar=follow(grammar)
            )
            async with asyncio.timeout(60), aclosing(events):
                async for event in events:
                    if isinstance(event, Delta):
                        text += event.text
                        ids += event.token_ids
        if drafter:
            drafter.close()
    finally:
        scheduler.close()
        if drafting:
            drafting.close()
    assert isinstance(event, Finished)
    return text, ids, event


def alone(kind: str, grammar: Grammar, temperature: float, seed: int, count: int, **options: object) -> list[int]:
    target = tiny.model(kind)
    prompt = render(Request(PROMPT), target, target).ids
    options.pop("logprobs", None)
    sampler, engine = tiny.sampler(target, temperature, **options), tiny.HashEngine(target, seed)
    return support.decode_alone(target, engine, sampler, prompt, count, grammar)


@pytest.mark.parametrize("target_kind", tiny.KINDS)
@settings(max_examples=15)
@given(
    draft_kind=st.sampled_from([None, *tiny.KINDS]),
    name=st.sampled_from(sorted(support.GRAMMARS)),
    mode=st.sampled_from(list(Mode)),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    options=st.sampled_from(
        [
            {},
            {"min_tokens": 7},
            {"top_k": 3, "repetition_penalty": 1.3},
            {"top_p": 0.8, "stop_token_ids": (70, 71), "min_tokens": 3},
            {"logit_bias": {70: 5.0, 71: -1e9, 80: -1e9}, "presence_penalty": 1.0, "frequency_penalty": -0.5},
            {"logprobs": 2},
        ]
    ),
    engine_seed=st.integers(0, 3),
    count=st.integers(1, 60),
    stop=st.sampled_from([None, None, 0.3, 0.7]),
)
def test_the_text_is_that_of_the_target_alone_with_the_grammar(
    target_kind: str,
    draft_kind: str | None,
    name: str,
    mode: Mode,
    temperature: float,
    options: dict[str, object],
    engine_seed: int,
    count: int,
    stop: float | None,
) -> None:
    grammar = support.GRAMMARS["words" if target_kind in WORDS_ONLY else name]
    try:
        expected = alone(target_kind, grammar, temperature, engine_seed, count, **options)
    except InvalidGrammar as error:  # only a token that ends the text can write what must follow
        with pytest.raises(InvalidGrammar) as caught:
            asyncio.run(together(target_kind, draft_kind, grammar, mode, temperature, engine_seed, count, **options))
        assert str(caught.value) == str(error)
        return
    # A token that ends the text adds nothing to it.
    end_ids = tuple(options.get("stop_token_ids", ()))  # type: ignore[arg-type, var-annotated]
    shown = expected[:-1] if expected and expected[-1] in end_ids else expected
    whole = tiny.vocabulary(target_kind).spell(shown).decode(errors="replace")
    stops = (whole[int(len(whole) * stop) :][:2],) if whole and stop is not None and "\ufffd" not in whole else ()
    text, ids, finished = asyncio.run(
        together(target_kind, draft_kind, grammar, mode, temperature, engine_seed, count, stop=stops, **options)
    )
    if finished.finish_reason is FinishReason.STOP and stops and stops[0] in whole:
        assert ids == expected[: len(ids)] and text == whole[: whole.index(stops[0])]
        return
    assert ids == expected
    if "\ufffd" not in text:  # else the limit has cut a character
        count_, ends = follow(grammar).accepted(b"", text.encode())
        assert count_ == len(text.encode())
        assert ends or finished.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", tiny.EXACT_KINDS)
async def test_a_finished_text_satisfies_its_schema(kind: str) -> None:
    for seed in range(4):
        text, _, finished = await together(kind, None, support.schema(support.PERSON), Mode.AUTO, 1.0, seed, 200)
        assert finished.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(text), support.PERSON)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_stop_string_ends_a_text_also_inside_forced_bytes(mode: Mode) -> None:
    grammar = support.schema(support.PERSON)
    whole, _, _ = await together("byte_level", None, grammar, Mode.OFF, 1.0, 0, 200)
    for stop in ('", "ta', whole[len(whole) // 2 :][:2], '"age"'):
        text, _, finished = await together(
            "byte_level", "unigram", grammar, mode, 1.0, 0, 200, stop=(stop,), min_tokens=5
        )
        assert text == whole[: whole.index(stop)] and finished.finish_reason is FinishReason.STOP


async def test_forced_bytes_are_candidates_and_named() -> None:
    grammar = support.schema(support.PERSON)
    _, ids, finished = await together("byte_level", None, grammar, Mode.AUTO, 1.0, 0, 200)
    source = did(finished.statistics, "grammar")
    assert source.num_accepted_tokens > 10
    assert source.num_accepted_tokens > 0.9 * source.num_draft_tokens
    assert finished.statistics.target_pass_count < 0.7 * len(ids)


@pytest.mark.parametrize("cut_otherwise", [False, True])
async def test_what_the_grammar_refuses_costs_no_width(cut_otherwise: bool) -> None:
    target = tiny.model("byte_level")
    scheduler, sampler = tiny.scheduler(tiny.HashEngine(target)), tiny.sampler(target)
    matcher = support.Grammars(target).open(Grammar.choice(["the quick brown fox"]), sampler.ends)
    prompt = render(Request(PROMPT), target, target).ids
    right = target.vocabulary.pieces(b"the quick brown fox").ids
    # The right bytes in other tokens than the tokenizer's own cannot be chosen, either.
    rest = target.vocabulary.spell(right[2:])
    wrong = target.vocabulary.single_bytes(rest).ids if cut_otherwise else target.vocabulary.pieces(b"zzz").ids
    assert wrong[0] != right[2]
    try:
        with closing(TargetSession(target, scheduler, sampler, matcher=matcher)) as session:
            await session.run(Run(0, tuple(prompt), 0, 0, 20, 0))
            await session.candidates(Candidates(1, len(prompt), (*right[:2], *wrong), 8))
            first = await anext(aiter(session.passes()))
    finally:
        scheduler.close()
    assert (first.candidate_token_count, first.accepted_token_count) == (2, 2)
    assert first.token_ids == tuple(right[:3])


@pytest.mark.parametrize(("logprobs", "needed"), [(None, 1), (2, 4)])
async def test_logits_are_computed_only_where_there_is_a_choice(logprobs: int | None, needed: int) -> None:
    target = tiny.model("byte_level")
    engine, rows = tiny.HashEngine(target), []
    scheduler, sampler = tiny.scheduler(engine), replace(tiny.sampler(target), logprobs=logprobs)
    forward = engine.forward
    engine.forward = lambda batch: (rows.extend(batch), forward(batch))[1]  # type: ignore[method-assign, func-returns-value]
    matcher = support.Grammars(target).open(Grammar.choice(["the quick fox", "the quick dog"]), sampler.ends)
    prompt = render(Request(PROMPT), target, target).ids
    right = target.vocabulary.pieces(b"the quick ").ids[:3]
    try:
        with closing(TargetSession(target, scheduler, sampler, matcher=matcher)) as session:
            await session.run(Run(0, tuple(prompt), 0, 0, 20, 0))
            await session.candidates(Candidates(1, len(prompt), tuple(right), 8))
            first = await anext(aiter(session.passes()))
    finally:
        scheduler.close()
    assert first.token_ids[:3] == tuple(right) and first.accepted_token_count == 3
    assert len(first.logprobs) == (4 if logprobs else 0)
    assert len(rows[0].token_ids) - rows[0].logits_from == needed


async def test_a_text_goes_on_after_a_move_to_another_replica() -> None:
    target, grammar = tiny.model("unigram"), support.GRAMMARS["schema"]
    expected = alone("unigram", grammar, 0.7, 2, 80)
    prompt = render(Request(PROMPT), target, target).ids
    scheduler, sampler = tiny.scheduler(tiny.HashEngine(target, 2)), tiny.sampler(target, 0.7)
    half = expected[: len(expected) // 2]
    offset = len(target.vocabulary.spell(half))
    matcher, ids = support.Grammars(target).open(grammar, sampler.ends), list(half)
    try:
        with closing(TargetSession(target, scheduler, sampler, matcher=matcher)) as session:
            await session.run(Run(0, (*prompt, *half), offset, 0, 80 - len(half), 0, len(half)))
            async with asyncio.timeout(60):
                async for result in session.passes():
                    ids += result.token_ids
                    if result.finish_reason or len(ids) == len(expected):
                        break
    finally:
        scheduler.close()
    assert ids == expected


async def test_no_pass_reports_more_cached_tokens_than_its_sequence_has() -> None:
    """The candidates of the second request, which are certain, are in the cache of the first one."""
    target, grammar = tiny.model("byte_level"), support.GRAMMARS["schema"]
    prompt = render(Request(PROMPT), target, target).ids
    scheduler, sampler = tiny.scheduler(tiny.HashEngine(target, 2)), tiny.sampler(target)
    certain = tuple(target.vocabulary.pieces(b'{"name": ').ids[:-1])
    found = []
    try:
        for _ in range(2):
            matcher = support.Grammars(target).open(grammar, sampler.ends)
            with closing(TargetSession(target, scheduler, sampler, matcher=matcher)) as session:
                await session.run(Run(0, tuple(prompt), 0, 0, 12, 0, 0))
                await session.candidates(Candidates(1, len(prompt), certain, 12))
                passes = session.passes()
                async with asyncio.timeout(60):
                    found.append(await anext(passes))
                    await anext(passes)
                await passes.aclose()
    finally:
        scheduler.close()
    assert [one.cached_token_count for one in found] == [0, len(prompt)]
    assert found[1].accepted_token_count >= 2


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_control_tokens_and_ids_without_bytes_are_never_allowed(kind: str) -> None:
    model = tiny.model(kind)
    matcher = support.Grammars(model).open(Grammar(GrammarKind.REGEX, "(?s:.*)"), frozenset({2}))
    allowed = matcher.allowed()
    empty = [id_ for id_, data in enumerate(model.vocabulary.tokens) if not data]
    assert [id_ for id_ in empty if allowed[id_]] == [2]
    assert allowed.sum() > 0.5 * model.vocabulary.size


def test_what_must_follow_is_found_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("byte_level")
    matcher = support.Grammars(model).open(support.GRAMMARS["schema"], frozenset({2}))
    ids = model.vocabulary.pieces(b'{"name": ').ids
    monkeypatch.setattr(GrammarPosition, "allowed", None)
    assert matcher.certain(ids)[0] >= len(ids) - 1


def test_white_space_may_be_flexible() -> None:
    matcher = follow(support.schema({**support.PERSON, "x-guidance": FLEXIBLE}))
    text = b'{\n  "name" : "x" ,\t"tags":[ ],"age": 5\n}'
    assert matcher.accepted(b"", text) == (len(text), True)
    assert matcher.forced(b"", 512) == (b"{", False)


def test_an_excursion_comes_back() -> None:
    model = tiny.model("sentencepiece")
    matcher = support.Grammars(model).open(support.GRAMMARS["schema"], frozenset({2}))
    ids = model.vocabulary.pieces('{"name": "é🎉", "tags": ["öl"], "age": 5}'.encode()).ids
    before = [matcher.allowed()]
    for id_ in ids:
        assert before[-1][id_]
        with matcher.excursion():
            matcher.advance([id_])
        assert (matcher.allowed() == before[-1]).all()
        matcher.advance([id_])
        before.append(matcher.allowed())
    assert np.flatnonzero(before[-1]).tolist() == [2]
    assert matcher.accepted([2]) == 1 and matcher.accepted([5]) == 0
    matcher.restart(ids[:7])
    assert (matcher.allowed() == before[7]).all()


def test_a_draft_finds_its_position_by_bytes() -> None:
    model = tiny.model("byte_level")
    matcher = support.Grammars(model).open_draft(support.GRAMMARS["schema"])
    assert matcher.seek(b'{"name": "Jo')
    inside = matcher.allowed()
    matcher.advance(model.vocabulary.pieces(b'hn", "ta').ids)
    assert matcher.seek(b'{"name": "Jo') and (matcher.allowed() == inside).all()
    assert not matcher.seek(b'{"name": 5')
    assert matcher.seek(b'{"name": "Jo"') and not (matcher.allowed() == inside).all()


async def test_a_draft_proposes_nothing_that_cannot_be() -> None:
    draft, grammar = tiny.model("unigram"), support.GRAMMARS["schema"]
    scheduler = tiny.scheduler(tiny.HashEngine(draft))
    prompt = draft.vocabulary.pieces(PROMPT.encode(), whole=True).ids
    begun = b'{"name": "x", "ta'
    try:
        matcher = support.Grammars(draft).open_draft(grammar)
        with closing(DraftSession(draft, scheduler, tiny.sampler(draft, 1.5), matcher)) as session:
            context = (*prompt, *draft.vocabulary.pieces(begun).ids)
            await session.sync(Sync(1, 0, context, len(begun), 60, batch_token_count=60))
            first = await anext(aiter(session.proposals()))
            data = draft.vocabulary.spell(first.token_ids)
            assert data.startswith(b'gs": [') and follow(grammar).accepted(begun, data)[0] == len(data)
            # A context that spells something else is not an error: then the draft proposes what it likes.
            await session.sync(Sync(2, len(prompt), tuple(draft.vocabulary.pieces(b"{]").ids), 2, 4))
            assert (await anext(aiter(session.proposals()))).token_ids
    finally:
        scheduler.close()


def test_bytes_are_forced_and_refused() -> None:
    matcher = follow(support.schema(support.PERSON))
    assert matcher.forced(b"", 512) == (b'{"name": "', False)
    assert matcher.forced(b"", 4) == (b'{"na', False)
    assert matcher.forced(b"x", 512) == (b"", False)
    assert matcher.accepted(b"", b'{"name": 5') == (9, False)
    matcher.commit(b'{"name": "\xc3')
    assert matcher.forced(b'\xb6"', 512) == (b', "tags": [', False)
    matcher.commit(b'\xb6", "tags": [], "age": 150')
    assert matcher.forced(b"", 512) == (b"}", True)
    assert matcher.accepted(b"}", b"") == (0, True)
    matcher.commit(b"!")  # the target never sends this; nothing is forced or refused from then on
    assert matcher.forced(b"", 512) == (b"", False)
    assert matcher.accepted(b"", b"anything") == (8, True)


async def test_a_stop_token_in_what_must_be_written_is_avoided() -> None:
    words = tiny.vocabulary("byte_level")
    (stop,) = words.pieces(b"the").ids
    text, ids, finished = await together(
        "byte_level", None, Grammar.choice(["the dog"]), Mode.AUTO, 0.0, 0, 30, stop_token_ids=(stop,)
    )
    assert text == "the dog" and finished.finish_reason is FinishReason.STOP
    assert ids[0] == words.byte_ids[ord("t")] and stop not in ids[:-1]


async def test_what_the_tokenizer_cannot_write_is_an_error_with_its_place() -> None:
    grammar = Grammar.choice(["the\ndog"])  # WordPiece has no line feed
    with pytest.raises(
        InvalidGrammar, match=r"after b'the': it requires one of b'\\n', and tiny-wordpiece has no token"
    ):
        await together("wordpiece", None, grammar, Mode.AUTO, 0.0, 0, 20)
