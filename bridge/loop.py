"""Runs the verification loop: draft and target each run under a credit and are reconciled at byte offsets.

Proposals of the sources become candidates for the target, and what the target commits is the text. Losing a source
costs speed but never changes text, because every token is the target's own.

The loop follows Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and
Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(2025). Shared noise replaces their rejection sampling, so verification is a comparison of tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from time import perf_counter_ns
from typing import TypeAlias

from bridge.errors import Unreachable
from bridge.planning.planner import Planner
from bridge.ports import Pass
from bridge.sources.source import Outcome
from bridge.sources.source_set import SourceSet
from bridge.speculation import Speculation
from bridge.statistics import Statistics
from bridge.target_link import TargetLink

# A pass, and the nanoseconds since the one before.
_Arrival: TypeAlias = tuple[Pass, int | None]


async def speculate(
    link: TargetLink,
    sources: SourceSet,
    planner: Planner,
    statistics: Statistics,
    clock: Callable[[], int] = perf_counter_ns,
) -> AsyncGenerator[Outcome, None]:
    """Yields the outcome of each pass, already committed to the tape, until the text ends or the credit is used up.

    Raises the target's own errors, `Unreachable` if its stream ends early, and `TargetFault`.
    """
    speculation = Speculation(sources, planner, statistics, link.candidate_room)
    await link.start(speculation.plan.patience_ns)
    await sources.advance(speculation.plan.pace)
    async with aclosing(_events(link, sources)) as events:
        async for event in events:
            started, outcome = clock(), None
            if event:  # 1. take a pass and commit it
                outcome = link.commit(*event)
                # 2. report which candidates were accepted
                speculation.observe(outcome)
                if outcome.result.finish_reason is not None or link.remaining == 0:
                    yield outcome
                    return
                await link.extend()
            # 3. plan: after each pass, and when the draft's current epoch has become useless
            speculation.refresh()
            if outcome or speculation.stale:
                await speculation.replan(link.candidate_room)
            # 4. send the best offer; when draft and target take turns, wait until the draft's turn is complete
            choice = speculation.choose()
            await link.offer(choice.offer, choice.width, speculation.plan.patience_ns, awaited=choice.awaited)
            statistics.bridge_ns += clock() - started
            if outcome:  # yielded last, so that the models keep working while the text is sent
                yield outcome


async def _events(link: TargetLink, sources: SourceSet) -> AsyncGenerator[_Arrival | None, None]:
    """Yields every pass of the target with its time, and None when a source has news. Raises the target's errors.

    The queue needs no limit: the target's credit bounds the passes, and at most one notice of news is pending.
    """
    queue: asyncio.Queue[_Arrival | Exception | None] = asyncio.Queue()
    news = False

    def notify() -> None:
        nonlocal news
        if not news:
            news = True
            queue.put_nowait(None)

    async def listen() -> None:
        try:
            async for result in link.passes():
                queue.put_nowait(result)
            queue.put_nowait(Unreachable("the target", "its stream ended in the middle of a generation"))
        except Exception as error:  # raised again below
            queue.put_nowait(error)

    listener = asyncio.create_task(listen())
    try:
        sources.start(notify)
        while True:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            news = news and event is not None
            yield event
    finally:
        listener.cancel()
        sources.close()
        await asyncio.gather(listener, return_exceptions=True)
