"""The session of a draft model."""

from collections.abc import Sequence

from bridge.ports import Proposal
from bridge.sampling.sampler import Choice, Sampler
from bridge.text.models import Model
from services.engines.scheduler import Scheduler, Timed
from services.engines.sequence import CachedSequence
from services.model.draft.credit import CreditedSession


class DraftSession(CreditedSession):
    """Implements `bridge.ports.Drafter` over a model in this process. Each proposed token takes one forward.

    `proposals` also raises `SlotsExhausted` and `EngineFailure`.
    """

    def __init__(self, model: Model, scheduler: Scheduler, sampler: Sampler) -> None:
        super().__init__(model)
        self._sampler = sampler
        self._sequence = CachedSequence(scheduler)
        self._offset = 0

    def close(self) -> None:
        """Frees the slot."""
        self._sequence.close()

    @property
    def _held(self) -> int:
        return len(self._sequence.ids)

    def _replace(self, keep: int, token_ids: Sequence[int], byte_offset: int) -> None:
        self._sequence.replace(keep, token_ids)
        self._offset = byte_offset

    async def _propose(self) -> Proposal:
        read_token_count = self._sequence.uncached_token_count
        first = await self._forward()
        forwards = [first]
        room = min(self._batch, self._credit, self._model.context_length - self._held + 1)
        while len(forwards) < room and not self._ends(forwards[-1]):
            if self._inbox:
                break  # it may end this epoch
            forwards.append(await self._forward())
        self._batch = 1  # the rest of the epoch is sent token by token
        confidences = [one.value.probability for one in forwards]
        return Proposal(
            self._epoch,
            tuple(one.value.token_id for one in forwards),
            tuple(one for one in confidences if one is not None),
            done=self._ends(forwards[-1]),
            cached_token_count=first.cached_token_count,
            queue_ns=sum(one.queue_ns for one in forwards),
            forward_ns=sum(one.forward_ns for one in forwards),
            read_token_count=max(read_token_count - first.cached_token_count, 1),
            read_ns=first.forward_ns,
        )

    async def _forward(self) -> Timed[Choice]:
        offset = self._offset
        done = await self._sequence.forward((), lambda logits: self._sampler.choose(logits[0], offset, 0))
        self._sequence.accept((done.value.token_id,), 0)
        self._offset += len(self._model.vocabulary.token_bytes(done.value.token_id))
        return done

    def _ends(self, done: Timed[Choice]) -> bool:
        return done.value.token_id in self._model.special_ids.eos
