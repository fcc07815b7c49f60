"""Tests the target's credit: a client that reads slowly makes its target wait, and one that keeps up never does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from bridge.generation import Delta, generate
from bridge.planning.estimates import TargetEstimates
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Candidates, Grant, Pass, Run
from bridge.request import Request
from bridge.target_link import CREDIT_TOKENS
from tests.support import tiny

MODEL = tiny.model("byte_level", context_length=20_000)


class CreditedTarget:
    """Produces one token for each pass, as fast as its credit allows."""

    def __init__(self) -> None:
        self.credit = self.produced = self.waits = 0
        self._base = 0
        self._more = asyncio.Event()

    async def run(self, run: Run) -> None:
        self.credit, self._base = run.credit, len(run.token_ids)
        self._more.set()

    async def candidates(self, candidates: Candidates) -> None:
        pass

    async def grant(self, grant: Grant) -> None:
        self.credit += grant.credit
        self._more.set()

    async def passes(self) -> AsyncIterator[Pass]:
        while True:
            while self.produced == self.credit:
                self.waits += 1
                self._more.clear()
                await self._more.wait()
            self.produced += 1
            yield Pass(self._base + self.produced - 1, (70,), 0, 0)
            await asyncio.sleep(0)


async def passes(target: CreditedTarget, max_tokens: int, pause_after: int) -> int:
    """Returns how many tokens the target had produced a while after the client stopped reading; then reads the rest."""
    request = Request("a", max_tokens=max_tokens, speculation=SpeculationParameters(mode=Mode.OFF))
    read, held, estimates = 0, 0, TargetEstimates()
    before = estimates.text_tokens.count
    async with aclosing(generate(request, MODEL, target, estimates=lambda: estimates)) as events:
        async for event in events:
            if isinstance(event, Delta):
                read += len(event.token_ids)
                if read == pause_after:
                    for _ in range(4 * max_tokens):
                        await asyncio.sleep(0)
                    held = target.produced
    assert read == max_tokens
    assert estimates.text_tokens.count == before + 1, "the text's length is recorded"
    return held


@pytest.mark.parametrize("pause_after", [1, 700, 1500])
async def test_a_target_stays_within_its_credit_of_a_slow_client(pause_after: int) -> None:
    target = CreditedTarget()
    held = await passes(target, 3000, pause_after)
    assert pause_after < held <= pause_after + CREDIT_TOKENS


@pytest.mark.parametrize("max_tokens", [1, CREDIT_TOKENS - 1, CREDIT_TOKENS, CREDIT_TOKENS + 1, 2000])
async def test_a_client_that_keeps_up_holds_nothing_back(max_tokens: int) -> None:
    target = CreditedTarget()
    await passes(target, max_tokens, 0)
    assert target.produced == target.credit == max_tokens
    assert target.waits <= 2, "before the run and after the last token"
