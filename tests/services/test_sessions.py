"""Tests the target's side of a stream: credit, patience, candidates at any time."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import pytest

from bridge.errors import PromptTooLong, ProtocolViolation, TokenOutOfRange
from bridge.ports import MAX_MEASURED_NS, Candidates, FinishReason, Grant, Pass, Proposal, Run
from bridge.sampling.sampler import Logits
from services.engines.engine import Row
from services.engines.scheduler import Scheduler
from services.errors import BaseMismatch, SlotsExhausted
from services.model.target.session import TargetSession
from services.rpc import codec
from tests.support import tiny

MODEL = tiny.model("byte_level")
PROMPT = (10, 20, 30)


@asynccontextmanager
async def target(
    scheduler: Scheduler | None = None, engine: tiny.HashEngine | None = None
) -> AsyncIterator[TargetSession]:
    scheduler = scheduler or tiny.scheduler(engine or tiny.HashEngine(MODEL))
    session = TargetSession(MODEL, scheduler, tiny.sampler(MODEL))
    try:
        async with asyncio.timeout(60):
            yield session
    finally:
        session.close()


def oracle(count: int) -> list[int]:
    return tiny.decode_alone(MODEL, tiny.HashEngine(MODEL), tiny.sampler(MODEL), PROMPT, count)


def run(**changes: object) -> Run:
    fields = {
        "base_token_count": 0,
        "token_ids": PROMPT,
        "byte_offset": 0,
        "empty_token_count": 0,
        "credit": 1,
        "patience_us": 0,
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def offer(base: int, ids: Sequence[int], width: int = 8, number: int = 1) -> Candidates:
    return Candidates(number, base, tuple(ids), width)


async def test_credit_is_how_far_the_target_goes() -> None:
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=3))
        got = [id_ for _ in range(3) for id_ in (await anext(passes)).token_ids]
        assert got == oracle(3)
        waiting = asyncio.ensure_future(anext(passes))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.grant(Grant(credit=2))
        got += (await waiting).token_ids
        got += (await anext(passes)).token_ids
        assert got == oracle(5)


async def test_when_the_client_has_closed_its_side_the_credit_is_used_up_without_waiting() -> None:
    async with target() as session:
        await session.run(run(credit=3, patience_us=60_000_000_000))
        session.on_end_of_requests()
        assert [id_ async for result in session.passes() for id_ in result.token_ids] == oracle(3)


async def test_candidates_are_taken_along_and_the_bonus_is_the_targets_own() -> None:
    truth = oracle(6)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=6))
        # They continue the prompt itself, so that the first forward verifies them.
        await session.candidates(offer(3, (*truth[:3], 7, 8)))
        result = await anext(passes)
        assert result.token_ids == tuple(truth[:4])
        assert (result.accepted_token_count, result.candidate_token_count) == (3, 5)
        assert (await anext(passes)).base_token_count == 7


async def test_credit_and_width_limit_what_a_forward_takes() -> None:
    truth = oracle(6)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=3))
        await session.candidates(offer(3, truth, width=8))
        assert (await anext(passes)).token_ids == tuple(truth[:3])
        await session.run(run(credit=6))
        await session.candidates(offer(3, truth, width=1, number=2))
        assert (await anext(passes)).token_ids == tuple(truth[:2])


async def test_patience_is_how_long_it_waits_and_an_empty_offer_ends_it() -> None:
    truth = oracle(6)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=6, patience_us=60_000_000))
        await anext(passes)  # the prompt is read without waiting
        waiting = asyncio.ensure_future(anext(passes))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.candidates(offer(4, truth[1:3]))
        result = await waiting
        assert result.accepted_token_count == 2
        assert result.waited_ns > 1_000_000
        waiting = asyncio.ensure_future(anext(passes))
        await session.candidates(offer(7, (), number=2))
        assert (await waiting).candidate_token_count == 0
        await session.grant(Grant(patience_us=1000))
        started = perf_counter()
        assert (await anext(passes)).token_ids
        assert perf_counter() - started < 30


@pytest.mark.parametrize(
    ("base", "ids", "accepted"),
    [
        (3, "0123", 2),  # late, but the beginning agrees with the target's tokens: the rest is verified
        (3, "x123", 0),  # late, and different from the target's tokens: all are dropped
        (4, "123", 2),
        (5, "23", 2),
        (6, "3", 0),  # a gap: the tokens before them are unknown
        (3, "0", 0),
    ],
)
async def test_late_candidates_are_trimmed_or_dropped(base: int, ids: str, accepted: int) -> None:
    truth = oracle(6)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=2))
        await anext(passes)
        await anext(passes)  # the sequence now holds the prompt and two tokens
        await session.candidates(offer(base, [9 if one == "x" else truth[int(one)] for one in ids]))
        await session.grant(Grant(credit=4))
        result = await anext(passes)
        assert result.accepted_token_count == accepted
        assert result.token_ids == tuple(truth[2 : 3 + accepted])


async def test_an_offer_replaces_the_one_before_and_a_pass_names_the_one_it_took() -> None:
    truth = oracle(8)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=8))
        await session.candidates(offer(3, (9, 9, 9), number=4))
        await session.candidates(offer(3, truth[:4], width=2, number=5))
        result = await anext(passes)
        assert (result.offer_id, result.candidate_token_count, result.accepted_token_count) == (5, 2, 2)
        result = await anext(passes)  # the rest of the offer, after the target's own token
        assert (result.offer_id, result.candidate_token_count, result.accepted_token_count) == (5, 1, 1)
        result = await anext(passes)
        assert (result.offer_id, result.candidate_token_count) == (0, 0)


async def test_an_offer_that_comes_too_late_leaves_the_one_before() -> None:
    truth = oracle(8)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=1))
        await anext(passes)
        await session.candidates(offer(4, truth[1:4], number=1))
        await session.candidates(offer(3, (9, 9), number=2))  # the target has already chosen another token there
        await session.grant(Grant(credit=4))
        result = await anext(passes)
        assert (result.offer_id, result.accepted_token_count) == (1, 3)


async def test_a_run_keeps_what_it_says_and_a_wrong_base_is_refused() -> None:
    truth = oracle(4)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=2))
        await anext(passes)
        await anext(passes)
        offset = len(MODEL.vocabulary.spell(truth[:1]))
        await session.run(run(base_token_count=4, token_ids=(), byte_offset=offset, credit=1))
        assert (await anext(passes)).token_ids == tuple(truth[1:2])
        await session.run(run(base_token_count=99, token_ids=(1,)))
        with pytest.raises(BaseMismatch, match="base_token_count 0"):
            await anext(passes)


async def test_a_new_run_voids_the_forward_under_way() -> None:
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=50))
        first = asyncio.ensure_future(anext(passes))
        await asyncio.sleep(0)  # the forward has begun
        await session.run(run(token_ids=(10, 20, 30, 40), credit=1))
        result: Pass = await first
        if result.base_token_count == 3:  # the forward ended before the new run arrived
            result = await anext(passes)
        assert result.base_token_count == 4


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (run(token_ids=()), ProtocolViolation),
        (run(token_ids=(10_000,)), TokenOutOfRange),
        (run(token_ids=(5,) * 512), PromptTooLong),
    ],
)
async def test_bad_runs_are_refused(message: Run, error: type[Exception]) -> None:
    async with target() as session:
        await session.run(message)
        with pytest.raises(error):
            await anext(aiter(session.passes()))


async def test_the_end_of_text_ends_the_pass() -> None:
    engine = tiny.HashEngine(MODEL)
    for id_ in range(100, 400):
        logits = engine.logits([20, 30, id_]).copy()
        logits[2] = 100.0
        engine._memo[20, 30, id_] = logits
    truth = oracle(1)
    async with target(engine=engine) as session:
        await session.run(run(credit=9))
        await session.candidates(offer(3, (truth[0], 2, 7, 8)))
        result = await anext(aiter(session.passes()))
        assert result.token_ids == (truth[0], 2)
        assert result.finish_reason is FinishReason.STOP


async def test_an_ended_text_stays_ended_until_the_next_run() -> None:
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(token_ids=(5,) * 511, credit=9))
        assert (await anext(passes)).finish_reason is FinishReason.CONTEXT_FULL
        await session.grant(Grant(credit=5))
        waiting = asyncio.ensure_future(anext(passes))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await session.run(run())
        assert list((await waiting).token_ids) == oracle(1)


async def test_candidates_for_which_there_is_no_room_are_not_counted() -> None:
    truth = oracle(90)
    async with target() as session:
        passes = aiter(session.passes())
        await session.run(run(credit=90))
        await session.candidates(offer(3, truth[:80], 80))
        result = await anext(passes)
        assert result.candidate_token_count < 80
        assert result.accepted_token_count == result.candidate_token_count == len(result.token_ids) - 1
        # The other candidates never went through the model: a run after the pass must not rely on them.
        held = 3 + len(result.token_ids)
        await session.run(run(base_token_count=held, token_ids=(17,), byte_offset=99, generated_token_count=9))
        after = [*PROMPT, *result.token_ids, 17]
        expected = tiny.sampler(MODEL).choose(tiny.HashEngine(MODEL).logits(after), 99, 0).token_id
        assert (await anext(passes)).token_ids == (expected,)


async def test_candidates_that_cannot_be_are_cut_off() -> None:
    truth = oracle(4)
    async with target() as session:
        await session.run(run(credit=4))
        await session.candidates(offer(3, (*truth[:2], 99_999, 7)))
        result = await anext(aiter(session.passes()))
        assert (result.accepted_token_count, result.candidate_token_count) == (2, 2)


async def test_slots_run_out_and_come_back_with_their_cache() -> None:
    scheduler = tiny.scheduler(tiny.HashEngine(MODEL, slot_count=1), queue_limit=0)
    async with target(scheduler) as first:
        await first.run(run())
        await anext(aiter(first.passes()))
        async with target(scheduler) as second:
            await second.run(run())
            with pytest.raises(SlotsExhausted, match="--slots"):
                await anext(aiter(second.passes()))
    async with target(scheduler) as third:
        await third.run(run())
        result = await anext(aiter(third.passes()))
        assert result.cached_token_count == 2  # all but the last, which must run for its logits
        assert list(result.token_ids) == oracle(1)


async def test_a_failure_that_nobody_waits_for_any_more_is_not_logged() -> None:
    class Failing(tiny.HashEngine):
        def forward(self, rows: Sequence[Row]) -> list[Logits]:
            if rows[0].keep:
                raise RuntimeError("out of memory")
            return super().forward(rows)

    problems = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with target(engine=Failing(MODEL)) as session:
        passes = session.passes()
        await session.run(run(credit=9))
        await anext(passes)  # the next forward has begun, and fails before its result is wanted
        running = session._running
        assert running is not None
        await asyncio.wait([running])
        await passes.aclose()
    del session, running, passes
    gc.collect()
    await asyncio.sleep(0)
    assert not problems


async def test_a_grant_before_a_run_is_refused() -> None:
    async with target() as session:
        await session.grant(Grant(credit=2))
        with pytest.raises(ProtocolViolation, match="send the run first"):
            await anext(aiter(session.passes()))


def test_a_prompt_that_takes_hours_is_reported_within_the_limit_that_the_bridge_checks() -> None:
    hours = 3 * MAX_MEASURED_NS
    passed = codec.read_pass(codec.write_pass(Pass(0, (5,), 0, 0, forward_ns=hours, queue_ns=hours, waited_ns=7)))
    assert (passed.forward_ns, passed.queue_ns, passed.waited_ns) == (MAX_MEASURED_NS, MAX_MEASURED_NS, 7)
    sent = Proposal(1, (5,), (), forward_ns=hours, queue_ns=hours, read_ns=hours)
    proposal = codec.read_proposal(codec.write_proposal(sent))
    assert {proposal.forward_ns, proposal.queue_ns, proposal.read_ns} == {MAX_MEASURED_NS}
