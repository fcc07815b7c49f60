"""The health of a loaded model: bad while all its forwards fail, good again when a trial forward succeeds."""

import asyncio
from contextlib import suppress

from bridge.errors import DraftBridgeError
from services.engines.scheduler import Scheduler

# A forward may fail because of its request. So many in a row, of sequences that ran alone, are the model's fault.
_MAX_FAILURES = 3


class ModelHealth:
    """Called once a second, returns whether the model can serve. Must be called in an event loop.

    A service that reports bad health gets no more requests, and so it would never learn that its model works again:
    while the health is bad, a forward of one token is tried after each call.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._trial: asyncio.Task[None] | None = None

    def __call__(self) -> bool:
        healthy = self._scheduler.alive and self._scheduler.failure_count < _MAX_FAILURES
        if not healthy and self._scheduler.alive and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self._try())
        return healthy

    async def _try(self) -> None:
        holder = object()
        with suppress(DraftBridgeError):
            await self._scheduler.run(holder, (0,), (), 0, lambda logits: None)
        self._scheduler.release(holder)
