"""The loop: draft and target each run under a credit, and the bridge reconciles them at byte offsets.

What the sources propose becomes candidates of the target; what the target commits is the text. Losing a source costs
speed, never text, because every token is the target's own.

After Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and Timor et al.,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (2025); with
shared noise in place of rejection sampling, so that verifying is comparing.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter_ns

from bridge.errors import Unreachable
from bridge.planning.planner import Planner
from bridge.ports import Pass
from bridge.sources.chain import SourceChain
from bridge.sources.source import Offer, Outcome
from bridge.statistics import Statistics
from bridge.target_link import TargetLink


async def speculate(
    link: TargetLink,
    sources: SourceChain,
    planner: Planner,
    statistics: Statistics,
    clock: Callable[[], int] = perf_counter_ns,
) -> AsyncGenerator[Outcome, None]:
    """Yields the outcome of each pass, already committed to the tape, until the text ends or the credit is used up.

    Raises what the target reports, `Unreachable` if its stream ends early, and `TargetFault`.
    """
    plan = planner.plan((), sources.state, link.candidate_room)
    await link.start(plan.patience_ns)
    async with _events(link, sources) as events:
        await sources.advance(plan.pace)
        async for event in events:
            started, outcome = clock(), None
            if event:  # 1. take a pass and commit it
                outcome = link.commit(event)
                # 2. tell everyone what became of the candidates
                sources.observe(outcome)
                planner.observe(outcome, plan)
                statistics.observe(outcome, plan)
                if event.finish_reason is not None or link.remaining == 0:
                    yield outcome
                    return
            # 3. plan: after a pass, and when what the draft works on has become useless
            offers, state = sources.offers(), sources.state
            if outcome or (state and state.stale):
                plan = planner.plan(offers, state, link.candidate_room)
                await sources.advance(plan.pace)
                state = sources.state
            # 4. send the best offer; in turns, nothing until the draft's turn is complete
            awaited = plan.pace.lead > 0 and state is not None and state.awaited
            offer, width = (Offer(), 0) if awaited and plan.pace.turns else planner.choose(offers, plan)
            await link.offer(offer, width, plan.patience_ns, awaited=awaited)
            statistics.bridge_ns += clock() - started
            if outcome:  # the models go on while the text is sent
                yield outcome


@asynccontextmanager
async def _events(link: TargetLink, sources: SourceChain) -> AsyncIterator[AsyncIterator[Pass | None]]:
    """Yields every pass of the target, and None where a source has news. What the target raises is raised.

    The queue is bounded: the target has credit for so many passes, and of news that nobody has seen yet there is one.
    """
    queue: asyncio.Queue[Pass | Exception | None] = asyncio.Queue()
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
        except Exception as error:  # raised again where the event is taken
            queue.put_nowait(error)

    async def events() -> AsyncIterator[Pass | None]:
        nonlocal news
        while True:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                news = False
            yield event

    listener = asyncio.create_task(listen())
    try:
        sources.start(notify)
        yield events()
    finally:
        listener.cancel()
        sources.close()
        await asyncio.gather(listener, return_exceptions=True)
