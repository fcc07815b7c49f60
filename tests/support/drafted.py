"""A draft that records what it receives, as a source, and what its target commits."""

import asyncio
from collections.abc import Callable
from time import perf_counter_ns

from bridge.measuring.draft_estimates import DraftEstimates
from bridge.ports import Pass, Proposal, Sync
from bridge.request import Request, render
from bridge.sources.draft import DraftSource
from bridge.sources.source import DRAFT, Draft, Offer, Opening, Outcome
from bridge.tape import Tape
from tests.support import tiny
from tests.support.alone import PROMPT, QueuedDrafter

MODEL = tiny.model("byte_level")
WORDS = MODEL.vocabulary


class RecordingDrafter(QueuedDrafter):
    """Records the messages that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[Sync] = []
        self.grants: list[tuple[int, int]] = []
        self.closed = False

    async def sync(self, sync: Sync) -> None:
        self.syncs.append(sync)

    async def grant(self, epoch: int, credit: int) -> None:
        self.grants.append((epoch, credit))

    def close(self) -> None:
        self.closed = True


def draft_source(
    prompt: str = PROMPT,
    threshold: float = 0.0,
    times: DraftEstimates | None = None,
    clock: Callable[[], int] = perf_counter_ns,
) -> tuple[DraftSource, RecordingDrafter, Tape]:
    drafter, rendering = RecordingDrafter(), render(Request(prompt), MODEL, MODEL)
    tape = Tape(WORDS, rendering.ids)
    opening = Opening(tape, lambda _: rendering, threshold, clock=clock)
    source = DraftSource(Draft(MODEL, drafter, times or DraftEstimates()), opening)
    return source, drafter, tape


def commit(tape: Tape, source: DraftSource, text: str, *, tried: str = "", timed_out: bool = False) -> None:
    """Lets the target commit a text, whose beginning `tried` it has accepted from the draft."""
    ids, offered = ids_of(text), ids_of(tried)
    offer = Offer(offered, (DRAFT,) * len(offered), (0.5,) * len(offered))
    result = Pass(len(tape.ids), ids, len(offered), len(offered))
    source.observe(Outcome(result, offer, tape.commit(ids), timed_out=timed_out))


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(WORDS.pieces(text.encode()).ids)


async def propose(source: DraftSource, drafter: RecordingDrafter, text: str, done: bool = False) -> None:
    """Lets the draft propose a text in the newest epoch, and the source take it."""
    ids = ids_of(text)
    news = asyncio.Event()
    source.start(news.set)
    drafter.queue.put_nowait(Proposal(drafter.syncs[-1].epoch, ids, (0.5,) * len(ids), done))
    async with asyncio.timeout(60):
        await news.wait()
    assert source._reader is not None and source._error is None
    source._reader.cancel()
