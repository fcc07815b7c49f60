"""Generates a text with the target alone, and with a draft and the other sources."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from bridge.generation import Delta, Finished, NextDraft, generate
from bridge.measuring.draft_estimates import DraftEstimates
from bridge.ports import Proposal
from bridge.request import Request, render
from bridge.sources.ngrams import NgramMemory
from bridge.sources.source import Draft
from bridge.text.models import Model
from services.model.target.session import TargetSession
from tests.support import tiny

PROMPT = "The quick brown"


class QueuedDrafter:
    """A draft that yields the proposals in its queue and raises the errors in it. Subclasses add `sync`."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Proposal | Exception] = asyncio.Queue()

    async def grant(self, epoch: int, credit: int) -> None:
        pass

    def close(self) -> None:
        pass

    async def proposals(self) -> AsyncIterator[Proposal]:
        while True:
            queued = await self.queue.get()
            if isinstance(queued, Exception):
                raise queued
            yield queued


def did(statistics: Any, source: str) -> Any:
    """Returns the statistics of a source, from the bridge's or the contract's statistics."""
    sources = statistics.sources
    return sources[source] if isinstance(sources, dict) else next(one for one in sources if one.name == source)


def oracle(target: Model, engine: tiny.HashEngine, temperature: float, count: int, **options: object) -> list[int]:
    prompt = render(Request(PROMPT), target, target)
    return tiny.decode_alone(target, engine, tiny.sampler(target, temperature, **options), prompt.ids, count)


def in_order(*drafts: tuple[Model, object]) -> NextDraft:
    """Returns what gives a request one draft after the other."""
    left = [Draft(model, drafter, DraftEstimates(model.forward_costs)) for model, drafter in drafts]  # type: ignore[arg-type]
    return lambda _: left.pop(0) if left else None


async def answer(
    target: Model,
    engine: tiny.HashEngine,
    drafter: object,
    draft: Model | None,
    request: Request,
    temperature: float,
    memory: NgramMemory | None = None,
    **options: object,
) -> tuple[str, list[int], Finished]:
    scheduler = tiny.scheduler(engine)
    text, ids, drafts = "", [], in_order((draft, drafter)) if draft else None
    try:
        with closing(TargetSession(target, scheduler, tiny.sampler(target, temperature, **options))) as session:
            async for event in generate(request, target, session, drafts, memory=memory):  # type: ignore[arg-type]
                if isinstance(event, Delta):
                    text += event.text
                    ids += event.token_ids
        assert scheduler.free_slot_count == engine.slot_count
    finally:
        scheduler.close()
    assert isinstance(event, Finished)
    return text, ids, event
