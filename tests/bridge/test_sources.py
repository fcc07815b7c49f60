"""Tests sources of candidates, the offers that they make together, and that a new source needs a class and a line."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from typing import ClassVar

import pytest

from bridge.errors import InvalidField, ProtocolViolation, TokenizerNotUnderstood, Unreachable
from bridge.planning.planner import SpeculationParameters
from bridge.ports import Pass, Proposal
from bridge.request import Request
from bridge.sources import SOURCES
from bridge.sources.draft import DraftSource
from bridge.sources.source import (
    MAX_OFFERED_BYTES,
    CandidateSource,
    Continuation,
    DraftPace,
    Offer,
    Opening,
    Outcome,
    offer_of,
)
from bridge.sources.source_set import SourceSet
from bridge.sources.suffix import SuffixSource
from bridge.tape import Tape
from bridge.text.models import Model
from services.cli.pieces import pieces
from services.model.draft.session import DraftSession
from services.rpc.codec import write_delta
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle
from tests.support.drafted import MODEL, WORDS, draft_source, ids_of, propose

PROPOSAL_FAULTS = {
    "over its credit": [Proposal(1, ids_of(" fox jumps over the lazy dog"), ())],
    "over its credit bit by bit": [Proposal(1, (50,), ())] * 5,
    "messages without end": [Proposal(1, (), ())] * 9,
    "half a confidence": [Proposal(1, (50, 60), (0.5,))],
    "no number": [Proposal(1, (50,), (float("nan"),))],
    "below 0": [Proposal(1, (50,), (-0.5,))],
    "above 1": [Proposal(1, (50,), (1e38,))],
    "an id too large": [Proposal(1, (MODEL.vocabulary_size,), ())],
    "negative": [Proposal(1, (-1,), ())],
    "an epoch that never began": [Proposal(7, (50,), ())],
    "takes centuries": [Proposal(1, (50,), (), forward_ns=2**63)],
    "waits centuries": [Proposal(1, (50,), (), queue_ns=2**63)],
    "reads longer than it computes": [Proposal(1, (50, 60), (), forward_ns=1000, read_ns=2000)],
    "half the runners-up": [Proposal(1, (50, 60), (), runner_up_ids=(51,), runner_up_confidence=(0.1,))],
    "a runner-up without its probability": [Proposal(1, (50,), (), runner_up_ids=(51,))],
    "no number as its probability": [Proposal(1, (50,), (), runner_up_ids=(51,), runner_up_confidence=(float("nan"),))],
    "a runner-up that is no token": [
        Proposal(1, (50,), (), runner_up_ids=(MODEL.vocabulary_size,), runner_up_confidence=(0.1,))
    ],
}


@pytest.mark.parametrize("proposals", PROPOSAL_FAULTS.values(), ids=PROPOSAL_FAULTS)
async def test_a_draft_that_breaks_the_contract_is_lost(proposals: Sequence[Proposal]) -> None:
    source, drafter, _ = draft_source()
    chain, news = SourceSet([], MODEL, None), asyncio.Event()
    chain.insert(source)
    chain.start(news.set)
    await chain.advance(DraftPace(4))
    for proposal in proposals:
        drafter.queue.put_nowait(proposal)
    async with asyncio.timeout(60):
        while not chain.empty:
            await news.wait()
            news.clear()
            assert chain.offers() is not None
    assert drafter.closed, "its slot is free at once"
    assert "PROTOCOL_VIOLATION" in chain.note


@pytest.mark.parametrize("error", [KeyError("a bug"), TokenizerNotUnderstood("the tokenizer crashed")])
async def test_a_bug_of_ours_is_not_reported_as_a_lost_draft(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in a source, and a text that the target's tokenizer cannot encode."""
    source, drafter, _ = draft_source()
    sought: list[Exception | None] = []

    async def find_draft(error: Exception | None) -> DraftSource:
        sought.append(error)
        return source

    chain = SourceSet([], MODEL, None)
    await chain.use_drafts(find_draft)

    def broken(*_: object, **__: object) -> Continuation:
        raise error

    if isinstance(error, TokenizerNotUnderstood):
        monkeypatch.setattr("bridge.sources.source_set.offer_of", broken)
        await chain.advance(DraftPace(8))
        await propose(source, drafter, " fox")
    else:
        source.propose = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        assert chain.offers() == []
    await asyncio.sleep(0)
    assert sought == [None], "no draft is to blame, and another one would meet the same bug"
    assert "Traceback" in caplog.text and type(error).__name__ in caplog.text
    assert "lost" not in chain.note and "INTERNAL" in chain.note
    assert drafter.closed


async def test_a_bug_in_one_source_does_not_cost_another() -> None:
    source, drafter, _ = draft_source()
    suffix = SuffixSource(Tape(WORDS, ()))
    chain = SourceSet([suffix, SuffixSource(Tape(WORDS, ()))], MODEL, None)
    chain.insert(source)
    assert chain._sources[0] is source, "a draft comes before all others"
    await chain.advance(DraftPace(8))
    await propose(source, drafter, " fox")

    def broken(*_: object) -> Continuation:
        raise KeyError("a bug")

    suffix.propose = broken  # type: ignore[method-assign]
    assert [offer.sources[0] for offer in chain.offers()] == ["draft"]
    assert "suffix" in chain.note and not drafter.closed


async def test_a_draft_that_comes_later_does_not_replace_prompt_lookup() -> None:
    source, _, _ = draft_source()
    suffix = SuffixSource(Tape(WORDS, ()))
    chain = SourceSet([suffix], MODEL, None)

    def broken(*_: object) -> Continuation:
        raise Unreachable("host:1", "gone")

    suffix.propose = broken  # type: ignore[method-assign]
    assert chain.offers() == []
    chain.insert(source)
    assert chain.note == "the suffix stopped (SERVICE_UNREACHABLE); the target went on without it"
    chain.close()


async def test_another_draft_that_was_found_too_late_is_closed() -> None:
    source, _, _ = draft_source()
    other, found, _ = draft_source()

    async def find_draft(error: Exception | None) -> DraftSource:
        return other if error else source

    chain, news = SourceSet([], MODEL, None), asyncio.Event()
    await chain.use_drafts(find_draft)
    chain.start(news.set)
    source._error = Unreachable("host:1", "gone")
    assert chain.offers() == []
    async with asyncio.timeout(60):
        await news.wait()
    chain.close()
    assert found.closed


async def test_the_first_fault_is_the_one_that_is_noted() -> None:
    source, _, _ = draft_source()
    chain = SourceSet([], MODEL, None)
    chain.insert(source)
    source._error = Unreachable("host:1", "gone")
    assert chain.offers() == [] and chain.empty
    later, _, _ = draft_source()
    chain.insert(later)
    assert chain.note == "the draft stopped (SERVICE_UNREACHABLE); another draft replaced it"
    later._error = ProtocolViolation("later")
    assert chain.offers() == []
    assert chain.note == "the draft stopped (SERVICE_UNREACHABLE); the target went on without it"


def pass_alone(chain: SourceSet, tape: Tape) -> None:
    """Lets the target make a pass without candidates."""
    ids = ids_of(" a")[:1]
    chain.observe(Outcome(Pass(len(tape.ids), ids, 0, 0), Offer(), tape.commit(ids)))


async def test_a_new_draft_gets_as_many_passes_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.sources.source_set._UNUSED_PASSES", 8)
    (first, _, tape), (second, _, _) = draft_source(), draft_source()
    found, searches = asyncio.Event(), 0

    async def find_draft(error: Exception | None) -> DraftSource | None:
        nonlocal searches
        searches += 1
        if searches == 2:
            await found.wait()
        return (first, second, None)[searches - 1]

    chain = SourceSet([], MODEL, None)
    await chain.use_drafts(find_draft)
    for _ in range(14):  # six of them while the second draft is opened
        pass_alone(chain, tape)
    found.set()
    while chain.draft is first:
        await asyncio.sleep(0)
        chain.take_over()
    for number in range(8):
        assert not chain.seeking, f"pass {number}"
        pass_alone(chain, tape)
    assert chain.seeking
    chain.close()


@pytest.mark.parametrize("better", [True, False])
async def test_a_draft_that_is_lost_during_a_search_for_a_better_one_is_replaced(
    better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.sources.source_set._UNUSED_PASSES", 1)
    (first, _, tape), (second, _, _) = draft_source(), draft_source()
    asked: list[Exception | None] = []

    async def find_draft(error: Exception | None) -> DraftSource | None:
        asked.append(error)
        if len(asked) == 1:
            return first
        return second if error or better else None

    chain, lost = SourceSet([], MODEL, None), Unreachable("host:1", "gone")
    await chain.use_drafts(find_draft)
    pass_alone(chain, tape)
    first._error = lost
    assert chain.offers() == []
    async with asyncio.timeout(60):
        while chain.draft is not second:
            await asyncio.sleep(0)
            chain.take_over()
    assert asked == ([None, None] if better else [None, None, lost])
    assert "another draft replaced it" in chain.note
    chain.close()


def test_the_text_goes_on_after_what_the_draft_proposes() -> None:
    """The suffix match continues the draft even in the middle of a word."""
    drafted = Continuation("draft", b"the small ho", starts=(0, 3, 9), confidences=(0.9, 0.8, 0.7))
    offer = offer_of(WORDS, [drafted, Continuation("suffix", b"use on the hill", 20.0)])
    assert WORDS.spell(offer.token_ids) == b"the small house on the hill"
    count = offer.sources.count("draft")
    assert offer.sources == ("draft",) * count + ("suffix",) * (len(offer.sources) - count)
    begins = len(WORDS.spell(offer.token_ids[: count - 1]))
    assert begins < len("the small ho") <= begins + len(WORDS.token_bytes(offer.token_ids[count - 1]))
    assert set(offer.evidence[count:]) == {20.0}


def test_a_candidate_is_as_sure_as_the_draft_tokens_that_start_in_it() -> None:
    one = Continuation("draft", b"aabbcc", starts=(0, 2, 4), confidences=(0.9, 0.8, 0.5))
    assert [one.evidence_of(*span) for span in ((0, 1), (1, 2), (2, 6))] == [0.9, 1.0, pytest.approx(0.4)]
    assert [one.evidence_of(*span) for span in ((0, 3), (3, 6))] == [pytest.approx(0.72), 0.5]


def test_evidence_grows_with_the_bytes_that_are_right() -> None:
    offer = offer_of(WORDS, [Continuation("suffix", b"use on the hill", 20.0, gain=1.0)])
    begins = [len(WORDS.spell(offer.token_ids[:count])) for count in range(len(offer.token_ids))]
    assert list(offer.evidence) == [20.0 + begin for begin in begins]


def test_what_is_cut_off_is_no_candidate() -> None:
    """The last token of data that was cut off is left out, as it may be part of a word; otherwise it is kept."""
    long = b"use on the hill and " * 13
    cut = offer_of(WORDS, [Continuation("suffix", long[:200], 20.0, cut=True)])
    spelled = WORDS.spell(cut.token_ids)
    assert long.startswith(spelled) and len(spelled) < 200
    whole = offer_of(WORDS, [Continuation("suffix", b"use on the", 20.0)])
    assert WORDS.spell(whole.token_ids) == b"use on the"
    endless = offer_of(WORDS, [Continuation("draft", b"use on the hill and " * 1000)])
    spelled = WORDS.spell(endless.token_ids)
    assert len(spelled) <= MAX_OFFERED_BYTES and (b"use on the hill and " * 1000).startswith(spelled)


def test_a_proposed_end_of_text_is_the_targets_own_end() -> None:
    closing_ = Continuation("draft", b"so.", starts=(0, 3), confidences=(0.9, 0.6), closes=True)
    offer = offer_of(WORDS, [closing_], end_id=2)
    assert offer.token_ids[-1] == 2
    assert (offer.sources[-1], offer.evidence[-1]) == ("draft", 0.6)
    assert offer_of(WORDS, [closing_]).token_ids == offer.token_ids[:-1]
    assert offer_of(WORDS, [Continuation("draft", b"", starts=(0,), confidences=(0.7,), closes=True)], 2) == Offer(
        (2,), ("draft",), (0.7,)
    )


async def test_a_draft_is_closed_whatever_happens_to_its_estimates() -> None:
    source, drafter, _ = draft_source()
    await source.advance(DraftPace(8))
    await propose(source, drafter, " fox")

    def broken(ids: Sequence[int]) -> None:
        raise KeyError("a bug")

    source.times.observe_context = broken  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        source.close()
    assert drafter.closed


class Fixed(CandidateSource):
    """Proposes a continuation of one text only."""

    def __init__(self, after: bytes, continuation: Continuation) -> None:
        self.name, self._after, self._continuation = continuation.source, after, continuation  # type: ignore[misc]

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        return self._continuation if after == self._after else None


@pytest.mark.parametrize(("more", "spelled"), [("", b"a fox jumps"), ("closes", b"a fox"), ("cut", b"a f")])
def test_a_source_is_continued_by_another_unless_it_ends_the_text_or_has_more(more: str, spelled: bytes) -> None:
    first = Fixed(b"", Continuation("suffix", b"a fox", **({more: True} if more else {})))  # type: ignore[arg-type]
    (offer,) = SourceSet([first, Fixed(b"a fox", Continuation("learned", b" jumps"))], MODEL, 2).offers()
    assert WORDS.spell(offer.token_ids) == spelled and (offer.token_ids[-1] == 2) == (more == "closes")


class Oracle(CandidateSource):
    """Proposes a given text from its current end on. The whole source is this class and one line of registration."""

    name: ClassVar[str] = "oracle"
    evidence_edges: ClassVar[tuple[float, ...]] = ()
    prior_chances: ClassVar[tuple[float, ...]] = (0.9,)
    answer: ClassVar[bytes] = b""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @classmethod
    def open(cls, opening: Opening) -> "Oracle":
        return cls(opening.tape)

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        rest = self.answer.removeprefix(bytes(self._tape.data) + after)
        return Continuation(self.name, rest) if rest != self.answer or not self._tape.data else None


@pytest.mark.parametrize("with_draft", [False, True])
async def test_a_new_source_is_one_class_and_one_line(with_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.HashEngine(MODEL)
    expected = oracle(MODEL, engine, 0.0, 60)
    monkeypatch.setitem(SOURCES, "oracle", Oracle.open)
    monkeypatch.setattr(Oracle, "answer", WORDS.spell(expected))
    scheduler = tiny.scheduler(tiny.HashEngine(MODEL, seed=5))
    names = ("draft", "oracle") if with_draft else ("oracle",)
    request = Request(PROMPT, max_tokens=60, speculation=SpeculationParameters(sources=names))
    with closing(DraftSession(MODEL, scheduler, tiny.sampler(MODEL))) as session:
        _, ids, finished = await answer(
            MODEL, engine, session if with_draft else None, MODEL if with_draft else None, request, 0.0
        )
    scheduler.close()
    assert ids == expected
    assert "oracle" in finished.statistics.sources
    oracled = did(finished.statistics, "oracle")
    assert oracled.num_accepted_tokens > 20
    assert oracled.accepted_byte_count > 0
    assert "oracle" in finished.statistics.plans


async def test_a_delta_names_whoever_proposed_it_and_the_demo_shows_every_byte_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bridge.generation import Delta, generate
    from services.model.target.session import TargetSession

    engine = tiny.HashEngine(MODEL)
    expected = oracle(MODEL, engine, 0.0, 60)
    monkeypatch.setitem(SOURCES, "oracle", Oracle.open)
    monkeypatch.setattr(Oracle, "answer", WORDS.spell(expected))
    scheduler, text, by_source = tiny.scheduler(engine), "", {"": 0, "oracle": 0}
    with closing(TargetSession(MODEL, scheduler, tiny.sampler(MODEL))) as session:
        request = Request(PROMPT, max_tokens=60, speculation=SpeculationParameters(sources=("oracle",)))
        async for event in generate(request, MODEL, session):
            if isinstance(event, Delta):
                assert sum(span.byte_count for span in event.spans) == len(event.text.encode())
                spans = write_delta(event).spans
                parts = list(pieces(event.text, ((span.byte_count, span.source) for span in spans)))
                assert "".join(part for part, _ in parts) == event.text
                text += event.text
                for span in event.spans:
                    by_source[span.source] += span.byte_count
    scheduler.close()
    assert text == WORDS.spell(expected).decode(errors="replace")
    assert by_source["oracle"] > 20 and by_source[""] > 0


async def test_a_source_that_nobody_knows_is_refused() -> None:
    request = Request(PROMPT, speculation=SpeculationParameters(sources=("draft", "oracle")))
    with pytest.raises(InvalidField, match="a selection of grammar, draft, suffix, learned, got oracle"):
        await answer(MODEL, tiny.HashEngine(MODEL), None, None, request, 0.0)


def test_models_are_told_apart_by_name_only() -> None:
    assert isinstance(MODEL, Model)
    assert list(SOURCES) == ["grammar", "draft", "suffix", "learned"]
