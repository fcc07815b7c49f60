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

from bridge.errors import TargetFault, Unreachable
from bridge.planning.planner import Planner
from bridge.ports import Pass, Verifier
from bridge.sources.chain import SourceChain
from bridge.sources.source import CandidateSource, Outcome
from bridge.statistics import Statistics
from bridge.target_link import TargetLink


async def speculate(
    target: Verifier,
    link: TargetLink,
    sources: SourceChain,
    planner: Planner,
    statistics: Statistics,
    clock: Callable[[], int] = perf_counter_ns,
) -> AsyncGenerator[Outcome, None]:
    """Yields the outcome of each pass, already committed to the tape, until the text ends or the credit is used up.

    Raises what the target reports, `Unreachable` if its stream ends early, and `TargetFault`.
    """
    plan = planner.plan((), sources.state)
    await link.start(plan.patience_ns)
    async with _events(target, sources, link.remaining) as events:
        await sources.advance(plan.pace.within(link.remaining - 1))
        async for event in events:
            started, outcome = clock(), None
            if isinstance(event, Pass):  # 1. take a pass and commit it
                outcome = link.commit(event)
                # 2. tell everyone what became of the candidates
                sources.observe(outcome)
                planner.observe(outcome, plan)
                statistics.observe(outcome, plan)
                if event.finish_reason is not None or link.remaining == 0:
                    yield outcome
                    return
            # 3. plan: after a pass, and when a source has worked in vain
            more = (
                link.remaining > 1
            )  # the target adds a token of its own to every pass: with one to go, nobody guesses
            offers = sources.offers(planner.max_candidates) if more else []
            state = sources.state if more else None
            if outcome or (state and state.stale):
                plan = planner.plan(offers, state)
                await sources.advance(plan.pace.within(link.remaining - 1))
                await link.be_patient(plan.patience_ns)
                state = sources.state if more else None
            # 4. send the best offer; in turns, only when the turn is over
            awaited = plan.pace.lead > 0 and state is not None and state.awaited
            if not (awaited and plan.pace.turns):
                await link.offer(*planner.choose(offers, plan), awaited=awaited)
            statistics.bridge_ns += clock() - started
            if outcome:  # both go on while the text is sent
                yield outcome


@asynccontextmanager
async def _events(target: Verifier, sources: SourceChain, max_tokens: int) -> AsyncIterator[AsyncIterator[Pass | None]]:
    """Every pass of the target, and None where a source has news. What the target raises is raised.

    The queue is bounded: the target has credit for so many passes, each source is lost once, and of news that nobody
    has seen yet there is no more than one.
    """
    queue: asyncio.Queue[Pass | Exception | tuple[CandidateSource, Exception] | None] = asyncio.Queue()
    news = False

    def notify() -> None:
        nonlocal news
        if not news:
            news = True
            queue.put_nowait(None)

    async def listen() -> None:
        credit = max_tokens
        try:
            async for result in target.passes():
                credit -= max(len(result.token_ids), 1)
                if credit < 0:  # it is checked here, too, because nobody may take events while a client reads slowly
                    raise TargetFault("it sends more tokens than it has credit for")
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
            if isinstance(event, tuple):
                sources.drop(*event)
                event = None
            if event is None:
                news = False
            yield event

    listener = asyncio.create_task(listen())
    sources.start(notify, lambda source, error: queue.put_nowait((source, error)))
    try:
        yield events()
    finally:
        listener.cancel()
        sources.close()
        await asyncio.gather(listener, return_exceptions=True)
