"""The health of a loaded model: bad while all its forwards fail, or while one of them does not end."""

import asyncio
import logging
from contextlib import suppress

import numpy as np

from bridge.errors import BrokenLogits, DraftBridgeError
from bridge.sampling.sampler import Logits
from services.engines.scheduler import Forward, Scheduler

_log = logging.getLogger(__name__)

# A forward may fail because of its request. So many in a row, of sequences that ran alone, are the model's fault.
_MAX_FAILURES = 3
# A forward may take this many times as long as was measured for its tokens, or as the slowest one so far.
_PATIENCE = 10


class ModelHealth:
    """Called once a second, returns whether the model can serve. Must be called in an event loop.

    A service that reports bad health gets no more requests, and so it would never learn that its model works again:
    while its forwards fail, a forward of one token is tried after each call.

    A forward hangs if it does not end within `limit_seconds`, and within ten times what a slow model may need:
    `token_ns` is the measured time of a token in a wide forward. Its sequences fail then, so that bridges continue
    them on a replica. Seconds are counted by calls, so that a pause of the whole process is not a forward that hangs.
    """

    def __init__(self, scheduler: Scheduler, limit_seconds: float = 120.0, token_ns: float = 0.0) -> None:
        self._scheduler, self._limit_seconds, self._token_ns = scheduler, limit_seconds, token_ns
        self._trial: asyncio.Task[None] | None = None
        self._seen: Forward | None = None
        self._seconds = 0

    def __call__(self) -> bool:
        scheduler = self._scheduler
        if self._hangs():
            return False
        healthy = scheduler.alive and scheduler.failure_count < _MAX_FAILURES
        if not healthy and scheduler.alive and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self._try())
        return healthy

    def _hangs(self) -> bool:
        present = self._scheduler.present
        self._seconds = self._seconds + 1 if present and present is self._seen else 0
        self._seen = present
        if present is None or self._scheduler.hangs:
            return present is not None
        expected_ns = max(present.token_count * self._token_ns, self._scheduler.slowest_ns)
        if self._seconds <= max(self._limit_seconds, _PATIENCE * expected_ns / 1e9):
            return False
        _log.error(
            "a forward of %d tokens has not ended after %d s; its sequences fail, and the health is NOT_SERVING until "
            "it ends: if it never does, restart this server, and if it is only slow, increase --forward-limit",
            present.token_count,
            self._seconds,
        )
        self._scheduler.give_up(present)
        return True

    async def _try(self) -> None:
        holder = object()
        with suppress(DraftBridgeError):
            await self._scheduler.run(holder, (0,), (), 0, _check)
        self._scheduler.release(holder)


def _check(logits: Logits) -> None:
    if not np.isfinite(logits).any():  # a model may have some for ids that it never chooses
        raise BrokenLogits(float(np.max(logits)))
