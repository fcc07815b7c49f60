"""The base of draft sessions, which handles epochs and credit."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from bridge.errors import PromptTooLong, ProtocolViolation
from bridge.ports import Proposal, Sync
from bridge.text.models import Model
from services.engines.sequence import check_ids
from services.model.inbox import Inbox


@dataclass(frozen=True)
class Grant:
    """Adds `credit` tokens to an epoch."""

    epoch: int
    credit: int


class CreditedSession(ABC):
    """Implements `bridge.ports.Drafter`; subclasses hold the sequence and make the proposals.

    Incoming messages wait in an inbox, which `proposals` reads between two proposals.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._inbox: Inbox[Sync | Grant] = Inbox()
        self._news = asyncio.Event()
        self._epoch = 0
        self._credit = 0
        self._batch, self._min_probability = 1, 0.0
        self._done = False
        self._last = False  # the client has closed its side

    async def sync(self, sync: Sync) -> None:
        """See `DraftSync`."""
        await self._tell(sync)

    async def grant(self, epoch: int, credit: int) -> None:
        """See `DraftGrant`."""
        await self._tell(Grant(epoch, credit))

    def on_end_of_requests(self) -> None:
        """Announces that no message follows: `proposals` ends when the credit is used up."""
        self._last = True
        self._news.set()

    async def proposals(self) -> AsyncGenerator[Proposal, None]:
        """Yields proposals while there is credit.

        Raises `ProtocolViolation`, `PromptTooLong` or `TokenOutOfRange` for an invalid message, and what the subclass
        raises.
        """
        while True:
            self._read()
            if self._credit == 0 or self._done:
                if self._last:
                    return
                await self._news.wait()
            elif self._held >= self._model.context_length:
                self._done = True
                yield Proposal(self._epoch, (), (), done=True)
            else:
                proposal = await self._propose()
                self._credit -= len(proposal.token_ids)
                self._done = proposal.done
                yield proposal

    @abstractmethod
    def close(self) -> None:
        """Frees the resources of the session."""

    @property
    @abstractmethod
    def _held(self) -> int:
        """The number of tokens of the sequence, both synced and proposed."""

    @abstractmethod
    def _replace(self, keep: int, token_ids: Sequence[int], byte_offset: int) -> None:
        """Keeps the first `keep` tokens and appends others. `byte_offset`: see `DraftSync`."""

    @abstractmethod
    async def _propose(self) -> Proposal:
        """Adds the next proposal of this epoch to the sequence and returns it: at least one token, or `done`.

        It must not exceed the credit, and should have `_batch` tokens.
        """

    async def _tell(self, message: Sync | Grant) -> None:
        await self._inbox.put(message)
        self._news.set()

    def _read(self) -> None:
        """Applies the messages in the inbox. Only between proposals, because these read the sequence."""
        while self._inbox:
            match self._inbox.popleft():
                case Sync() as sync:
                    self._begin(sync)
                case Grant(epoch, credit):
                    if self._epoch == 0:
                        raise ProtocolViolation("a grant came before the first sync: send the sync first")
                    # A grant for an old epoch was sent before the sync that ended the epoch arrived.
                    self._credit += credit if epoch == self._epoch else 0
        self._news.clear()

    def _begin(self, sync: Sync) -> None:
        if sync.epoch <= self._epoch:
            raise ProtocolViolation(f"epoch {sync.epoch} follows epoch {self._epoch}: number epochs upwards from 1")
        if sync.keep_token_count > self._held:
            raise ProtocolViolation(
                f"the sync keeps {sync.keep_token_count} tokens, but the draft holds {self._held}: "
                "keep at most the tokens that were synced and proposed"
            )
        length, context = sync.keep_token_count + len(sync.token_ids), self._model.context_length
        if length == 0:
            raise ProtocolViolation("a sync needs at least one token: send the prompt's ids")
        # `limits.read_sync` bounds the ids of one sync; this bounds the whole sequence.
        if length > 2 * context:
            raise PromptTooLong(length, context, self._model.name)
        check_ids(sync.token_ids, self._model)
        self._replace(sync.keep_token_count, sync.token_ids, sync.byte_offset)
        self._epoch, self._credit, self._batch = sync.epoch, sync.credit, max(sync.batch_token_count, 1)
        self._min_probability = sync.min_batch_probability
        self._done = False
