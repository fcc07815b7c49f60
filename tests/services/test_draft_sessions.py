"""Tests the draft's side of a stream: credit, turns, epochs, bounds."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from operator import mul

import pytest

from bridge.errors import InvalidGrammar, PromptTooLong, ProtocolViolation, TokenOutOfRange
from bridge.ports import Proposal, Sync
from bridge.sampling.sampler import Logits
from services.engines.engine import Row
from services.model.draft.session import DraftSession
from tests.services.test_sessions import MODEL, PROMPT, oracle
from tests.support import tiny


@asynccontextmanager
async def draft(engine: tiny.HashEngine | None = None) -> AsyncIterator[tuple[DraftSession, AsyncIterator[Proposal]]]:
    session = DraftSession(MODEL, tiny.scheduler(engine or tiny.HashEngine(MODEL)), tiny.sampler(MODEL))
    try:
        async with asyncio.timeout(60):
            yield session, aiter(session.proposals())
    finally:
        session.close()


async def test_a_draft_proposes_what_it_is_credited() -> None:
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 2))
        got = [await anext(proposals) for _ in range(2)]
        assert [one.token_ids[0] for one in got] == oracle(2)
        assert all(0.0 < one.confidence[0] <= 1.0 for one in got)
        waiting = asyncio.ensure_future(anext(proposals))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.grant(7, 5)  # of another epoch
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.grant(1, 1)
        assert (await waiting).token_ids[0] == oracle(3)[2]


async def test_when_the_client_has_closed_its_side_the_credit_is_used_up() -> None:
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 2))
        await session.grant(1, 1)
        session.on_end_of_requests()
        assert [id_ async for one in proposals for id_ in one.token_ids] == oracle(3)


async def test_a_draft_sends_its_turn_in_one_message() -> None:
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 5, batch_token_count=3))
        got = [await anext(proposals) for _ in range(3)]
        assert [len(one.token_ids) for one in got] == [3, 1, 1]
        assert [id_ for one in got for id_ in one.token_ids] == oracle(5)
        assert all(len(one.confidence) == len(one.token_ids) for one in got)
        assert [one.read_token_count for one in got] == [3, 1, 1]
        assert 0 < got[0].read_ns < got[0].forward_ns


async def test_a_turn_ends_when_it_is_too_uncertain() -> None:
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 8, batch_token_count=8))
        whole = await anext(proposals)
        products = list(accumulate(whole.confidence, mul))
        await session.sync(Sync(2, len(PROMPT), (), 0, 8, 8, min_batch_probability=products[2] * 1.001))
        short = await anext(proposals)
        assert short.done and list(short.token_ids) == list(whole.token_ids[:3])
        # The next turn is certain enough, and the tokens after it are sent whatever their probability.
        await session.sync(Sync(3, len(PROMPT), (), 0, 8, 3, min_batch_probability=products[2]))
        rest = [await anext(proposals) for _ in range(6)]
        assert [id_ for one in rest for id_ in one.token_ids] == list(whole.token_ids)
        assert not any(one.done for one in rest)


class Held(tiny.HashEngine):
    """Waits in its tenth forward until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.forward_count, self.waits, self.goes_on = 0, threading.Event(), threading.Event()

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        self.forward_count += 1
        if self.forward_count == 10:
            self.waits.set()
            assert self.goes_on.wait(60)
        return super().forward(rows)


async def test_a_sync_ends_a_turn_early() -> None:
    engine = Held()
    async with draft(engine) as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 400, batch_token_count=400))
        first = asyncio.ensure_future(anext(proposals))
        assert await asyncio.to_thread(engine.waits.wait, 60)
        await session.sync(Sync(2, 0, PROMPT, 0, 2, batch_token_count=2))
        engine.goes_on.set()
        assert len((await first).token_ids) < 400
        result = await anext(proposals)
        assert (result.epoch, list(result.token_ids)) == (2, oracle(2))


async def test_a_sync_sends_the_draft_back() -> None:
    truth = oracle(4)
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, PROMPT, 0, 3))
        for _ in range(3):
            await anext(proposals)
        await session.sync(Sync(2, 4, (9,), 2, 1))
        result = await anext(proposals)
        assert result.epoch == 2
        again = tiny.decode_alone(MODEL, tiny.HashEngine(MODEL), tiny.sampler(MODEL), (*PROMPT, truth[0], 9), 1)
        assert list(result.token_ids) == again


@pytest.mark.parametrize(
    ("sync", "error"),
    [
        (Sync(0, 0, PROMPT, 0, 1), ProtocolViolation),
        (Sync(1, 5, PROMPT, 0, 1), ProtocolViolation),
        (Sync(1, 0, (), 0, 1), ProtocolViolation),
        (Sync(1, 0, (10_000,), 0, 1), TokenOutOfRange),
    ],
)
async def test_bad_syncs_are_refused(sync: Sync, error: type[Exception]) -> None:
    async with draft() as (session, proposals):
        await session.sync(sync)
        with pytest.raises(error):
            await anext(proposals)


async def test_a_draft_whose_context_is_full_says_so_once() -> None:
    async with draft() as (session, proposals):
        await session.sync(Sync(1, 0, (5,) * 600, 0, 4))
        result = await anext(proposals)
        assert result.done
        assert result.token_ids == ()
        waiting = asyncio.ensure_future(anext(proposals))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.sync(Sync(2, 0, PROMPT, 0, 1))
        assert list((await waiting).token_ids) == oracle(1)


async def test_a_draft_holds_no_more_than_twice_its_context() -> None:
    async with draft() as (session, proposals):
        for number in (1, 2, 3):
            await session.sync(Sync(number, 512 * (number - 1), (5,) * 512, 0, 0))
        with pytest.raises(PromptTooLong, match="1536 tokens"):
            await anext(proposals)


class Followed:
    """A matcher that records in which threads it follows a text, which its grammar does not allow."""

    def __init__(self) -> None:
        self.sought: list[tuple[int, bool]] = []

    def seek(self, data: bytes) -> bool:
        self.sought.append((len(data), threading.current_thread() is threading.main_thread()))
        return False


async def test_a_matcher_of_a_draft_follows_a_long_text_without_holding_up_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.model.draft.session._THREAD_MIN_BYTES", 100)
    async with draft() as (session, proposals):
        session._matcher = matcher = Followed()  # type: ignore[assignment]
        for number, offset in ((1, 10), (2, 200)):
            await session.sync(Sync(number, 0, (70,) * 300, offset, 2))
            assert (await anext(proposals)).token_ids
            assert (await anext(proposals)).token_ids
        assert matcher.sought == [(10, True), (200, False)]


async def test_a_draft_whose_grammar_has_exceeded_a_limit_goes_on_without_it() -> None:
    class Failed(Followed):
        def seek(self, data: bytes) -> bool:
            super().seek(data)
            raise InvalidGrammar("sampling.grammar", "is too complex")

    async with draft() as (session, proposals):
        session._matcher = matcher = Failed()  # type: ignore[assignment]
        for number in (1, 2):
            await session.sync(Sync(number, 0, PROMPT, 1, 2))
            assert (await anext(proposals)).token_ids == (oracle(1)[0],)
            assert (await anext(proposals)).token_ids
        assert len(matcher.sought) == 1, "it never recovers"


async def test_a_grant_before_a_sync_is_refused() -> None:
    async with draft() as (session, proposals):
        await session.grant(0, 2)
        with pytest.raises(ProtocolViolation, match="send the sync first"):
            await anext(proposals)
