"""Tests how a target verifies branches, and that they change the text as little as candidates do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from grpc import aio

from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.ports import Candidates, FinishReason, Pass, Run
from bridge.request import Request
from draftbridge.v1 import model_pb2, model_pb2_grpc, target_pb2, target_pb2_grpc
from services.cli.processes import Fleet
from services.model.draft.session import DraftSession
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.alone import PROMPT as TEXT
from tests.support.alone import answer, did, oracle
from tests.support.branching import BranchingEngine, SecondBest

MODEL = tiny.model("byte_level", branches=True)
PROMPT = (10, 20, 30)


@asynccontextmanager
async def target(engine: tiny.HashEngine, temperature: float = 0.0) -> AsyncIterator[TargetSession]:
    session = TargetSession(MODEL, tiny.scheduler(engine), tiny.sampler(MODEL, temperature))
    try:
        async with asyncio.timeout(60):
            yield session
    finally:
        session.close()


def truth(count: int, temperature: float = 0.0) -> list[int]:
    return tiny.decode_alone(MODEL, tiny.HashEngine(MODEL), tiny.sampler(MODEL, temperature), PROMPT, count)


async def first_pass(session: TargetSession, offer: Candidates, credit: int = 8) -> Pass:
    await session.run(Run(0, PROMPT, 0, 0, credit, 0))
    await session.candidates(offer)
    return await anext(aiter(session.passes()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_where_a_candidate_is_wrong_a_branch_may_be_right(temperature: float) -> None:
    own = truth(6, temperature)
    engine = BranchingEngine(MODEL)
    async with target(engine, temperature) as session:
        result = await first_pass(
            session, Candidates(1, 3, (own[0], own[1] + 1, 7), 8, ((0, own[0] + 1), (1, own[1]), (1, 9), (2, 9)))
        )
        assert result.token_ids == tuple(own[:3]), "the candidate, the branch, and the token after the branch"
        assert (result.accepted_token_count, result.candidate_token_count) == (1, 3)
        assert (result.branch_count, result.branch_accepted) == (4, True)
        assert (await anext(aiter(session.passes()))).token_ids == (own[3],), "the cache has the branch's token now"
    assert engine.branch_counts == [4, 0, 0] or engine.branch_counts == [4, 0]


async def test_a_branch_in_place_of_a_right_candidate_costs_only_width() -> None:
    own = truth(6)
    async with target(BranchingEngine(MODEL)) as session:
        result = await first_pass(session, Candidates(1, 3, tuple(own[:2]), 8, ((0, 9), (1, 9))))
        assert result.token_ids == tuple(own[:3])
        assert (result.accepted_token_count, result.branch_count, result.branch_accepted) == (2, 2, False)


async def test_an_engine_without_branches_ignores_them() -> None:
    own = truth(6)
    async with target(tiny.HashEngine(MODEL)) as session:
        result = await first_pass(session, Candidates(1, 3, (own[0] + 1,), 8, ((0, own[0]),)))
        assert result.token_ids == (own[0],)
        assert (result.branch_count, result.branch_accepted) == (0, False)


@pytest.mark.parametrize(
    ("credit", "width"), [(2, 8), (8, 1)], ids=["no credit for the second candidate", "no width for it"]
)
async def test_branches_of_candidates_that_do_not_run_do_not_run(credit: int, width: int) -> None:
    own = truth(6)
    async with target(BranchingEngine(MODEL)) as session:
        offer = Candidates(1, 3, (own[0] + 1, 7), width, ((0, own[0]), (1, 9)))
        result = await first_pass(session, offer, credit)
        assert result.token_ids == tuple(own[:2])
        assert (result.candidate_token_count, result.branch_count) == (1, 1)


async def test_branches_move_with_the_candidates_that_came_too_late() -> None:
    own = truth(6)
    async with target(BranchingEngine(MODEL)) as session:
        await session.run(Run(0, PROMPT, 0, 0, 8, 60_000_000))
        passes = aiter(session.passes())
        assert (await anext(passes)).token_ids == (own[0],)
        branches = ((0, 9), (1, own[1]), (7, 9), (1, 10_000_000))
        await session.candidates(Candidates(1, 3, (own[0], own[1] + 1, 7), 8, branches))
        result = await anext(passes)
        assert result.token_ids == (own[1], own[2])
        assert (result.branch_count, result.branch_accepted) == (1, True), "one is late, one of no candidate, one no id"


async def test_a_branch_may_end_the_text() -> None:
    end = 2
    engine = BranchingEngine(MODEL)
    plain = engine.logits
    bonus = np.eye(1, MODEL.vocabulary_size, end, dtype=np.float32)[0]
    engine.logits = lambda ids: plain(ids) + 1000 * (len(ids) > 3) * bonus  # type: ignore[method-assign]
    async with target(engine) as session:
        first = int(engine.logits(PROMPT).argmax())
        result = await first_pass(session, Candidates(1, 3, (first, 9), 8, ((1, end),)))
        assert result.token_ids == (first, end), "nothing follows the end"
        assert result.finish_reason is FinishReason.STOP
        assert not result.branch_accepted
        result = await first_pass(session, Candidates(2, 3, (first + 1,), 8, ((0, first),)))
        assert result.token_ids == (first, end) and result.finish_reason is FinishReason.STOP
        assert result.branch_accepted, "the end came after the branch"


async def test_sequences_that_share_a_forward_have_no_branches() -> None:
    own = truth(6)
    engine = BranchingEngine(MODEL)
    shared = tiny.scheduler(engine)
    sessions = [TargetSession(MODEL, shared, tiny.sampler(MODEL)) for _ in range(2)]
    try:
        offer = Candidates(1, 3, (own[0] + 1,), 8, ((0, own[0]),))
        results = await asyncio.gather(*(first_pass(one, offer) for one in sessions))
    finally:
        for one in sessions:
            one.close()
    for result in results:
        assert result.token_ids[0] == own[0]
    assert len(engine.branch_counts) > 1 or engine.branch_counts == [0]


@pytest.mark.parametrize("mode", ["lockstep", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_the_targets_own_and_branches_save_passes(
    temperature: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether they are worth verifying depends on the time of a forward, which is next to none here.
    monkeypatch.setattr(Planner, "_branched", lambda self, offer, width, plan: offer)
    counts = []
    request = Request(TEXT, max_tokens=120, speculation=SpeculationParameters(Mode(mode), 4, sources=("draft",)))
    for engine in (tiny.HashEngine(MODEL), BranchingEngine(MODEL)):
        drafts = tiny.scheduler(SecondBest(MODEL))
        drafter = DraftSession(MODEL, drafts, tiny.sampler(MODEL, temperature))
        try:
            _, ids, finished = await answer(MODEL, engine, drafter, MODEL, request, temperature)
        finally:
            drafts.close()
        assert ids == oracle(MODEL, tiny.HashEngine(MODEL), temperature, 120)
        counts.append(finished.statistics.target_pass_count)
        statistics = finished.statistics
        assert did(statistics, "draft").num_accepted_tokens == statistics.num_accepted_tokens
        assert did(statistics, "draft").num_draft_tokens == statistics.num_draft_tokens
        assert sum(statistics.num_accepted_tokens_per_position) == statistics.num_accepted_tokens
        assert len(ids) == statistics.num_accepted_tokens + statistics.target_pass_count
    # In `auto`, the times decide how often candidates are sent at all.
    assert mode == "auto" or counts[1] < counts[0], counts


async def test_a_server_says_that_it_verifies_branches_and_does(tiny_fleet: Fleet) -> None:
    async with asyncio.timeout(60), aio.insecure_channel(tiny_fleet.target) as channel:
        described = await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
        assert described.model.branches and described.model.engine == "torch"

        async def passes(*offers: target_pb2.VerifyCandidates) -> list[target_pb2.VerifyResponse]:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify()
            await call.write(target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()))
            run = target_pb2.VerifyRun(token_ids=[1, 70, 71], credit=3, patience_us=60_000_000 if offers else 0)
            await call.write(target_pb2.VerifyRequest(run=run))
            found = [await call.read()]
            for offer in offers:
                await call.write(target_pb2.VerifyRequest(candidates=offer))
            while sum(len(one.token_ids) for one in found) < 3:
                found.append(await call.read())
            return found

        own = [id_ for one in await passes() for id_ in one.token_ids]
        wrong, branches = [own[1] + 1 if own[1] < 100 else own[1] - 1], [{"index": 0, "token_id": own[1]}]
        offer = {"offer_id": 1, "base_token_count": 4, "token_ids": wrong, "width": 4, "branches": branches}
        _, second = await passes(target_pb2.VerifyCandidates(**offer))
        assert list(second.token_ids) == own[1:]
        assert (second.candidate_token_count, second.branch_count, second.branch_accepted) == (1, 1, True)
