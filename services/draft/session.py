"""A draft's side of one stream: proposes as long as it has credit."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from bridge.errors import ProtocolViolation
from bridge.models import Model
from bridge.ports import Proposal, Sync
from bridge.sampling import Sampler
from services.engine.scheduler import Scheduler
from services.engine.sequence import CachedSequence, check_ids


@dataclass(frozen=True)
class Grant:
    """Adds credit to an epoch."""

    epoch: int
    credit: int


class DraftSession:
    """Implements `bridge.ports.Drafter` over a model in this process.

    What it is told waits in an inbox; `proposals` reads it between forwards, and runs them.
    """

    def __init__(self, model: Model, scheduler: Scheduler, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler
        self._sequence = CachedSequence(scheduler)
        self._inbox: deque[Sync | Grant | Exception] = deque()
        self._news = asyncio.Event()
        self._epoch = 0
        self._offset = 0
        self._credit = 0
        self._done = False
        self._last = False  # nothing more will be told

    async def sync(self, sync: Sync) -> None:
        """See `DraftSync`."""
        self._tell(sync)

    async def grant(self, epoch: int, credit: int) -> None:
        """See `DraftGrant`."""
        self._tell(Grant(epoch, credit))

    def no_more(self, error: Exception | None = None) -> None:
        """Nothing more will be told: `proposals` ends when the credit does, or raises what went wrong."""
        self._last = True
        if error:
            self._inbox.append(error)
        self._news.set()

    async def proposals(self) -> AsyncGenerator[Proposal, None]:
        """One for each token.

        Raises `ProtocolViolation` or `TokenOutOfRange` for a bad message, `SlotsExhausted` or `EngineFailure`.
        """
        while True:
            self._read()
            if self._credit == 0 or self._done:
                if self._last:
                    return
                await self._news.wait()
            elif len(self._sequence.ids) >= self._model.context_length:
                self._done = True
                yield Proposal(self._epoch, (), (), done=True)
            else:
                yield await self._propose()

    def close(self) -> None:
        """Frees the slot."""
        self._sequence.close()

    def _tell(self, message: Sync | Grant) -> None:
        self._inbox.append(message)
        self._news.set()

    def _read(self) -> None:
        """Takes over what came; only between forwards, which read the ids."""
        while self._inbox:
            match self._inbox.popleft():
                case Exception() as error:
                    raise error
                case Sync() as sync:
                    self._begin(sync)
                case Grant(epoch, credit):
                    # One for an old epoch crossed the sync that ended it.
                    self._credit += credit if epoch == self._epoch else 0
        self._news.clear()

    def _begin(self, sync: Sync) -> None:
        held = len(self._sequence.ids)
        if sync.epoch <= self._epoch:
            raise ProtocolViolation(f"epoch {sync.epoch} follows epoch {self._epoch}: count epochs upwards")
        if sync.keep_token_count > held:
            raise ProtocolViolation(
                f"the sync keeps {sync.keep_token_count} tokens, the draft holds {held}: "
                "keep no more than were synced and proposed"
            )
        if sync.keep_token_count + len(sync.token_ids) == 0:
            raise ProtocolViolation("a sync needs at least one token: send the prompt's ids")
        check_ids(sync.token_ids, self._model)
        self._sequence.replace(sync.keep_token_count, sync.token_ids)
        self._epoch, self._offset, self._credit = sync.epoch, sync.byte_offset, sync.credit
        self._done = False

    async def _propose(self) -> Proposal:
        epoch, offset = self._epoch, self._offset
        done = await self._sequence.forward((), lambda logits: self._sampler.choose(logits[0], offset, 0))
        id_, confidence = done.value.token_id, done.value.probability
        self._sequence.accept((id_,), 0)
        self._offset += len(self._model.vocabulary.token_bytes(id_))
        self._credit -= 1
        self._done = id_ in self._model.special_ids.eos
        return Proposal(
            epoch,
            (id_,),
            () if confidence is None else (confidence,),
            done=self._done,
            cached_token_count=done.cached_token_count,
            queue_ns=done.queue_ns,
            forward_ns=done.forward_ns,
        )
