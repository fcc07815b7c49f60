"""A draft model's side of one stream."""

from collections.abc import Sequence

from bridge.models import Model
from bridge.ports import Proposal
from bridge.sampling import Sampler
from services.draft.credit import CreditedSession
from services.engine.scheduler import Scheduler
from services.engine.sequence import CachedSequence


class DraftSession(CreditedSession):
    """Implements `bridge.ports.Drafter` over a model in this process: a proposal for each token, from a forward each.

    `proposals` raises `SlotsExhausted` or `EngineFailure` besides.
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
        offset = self._offset
        done = await self._sequence.forward((), lambda logits: self._sampler.choose(logits[0], offset, 0))
        id_, confidence = done.value.token_id, done.value.probability
        self._sequence.accept((id_,), 0)
        self._offset += len(self._model.vocabulary.token_bytes(id_))
        return Proposal(
            self._epoch,
            (id_,),
            () if confidence is None else (confidence,),
            done=id_ in self._model.special_ids.eos,
            cached_token_count=done.cached_token_count,
            queue_ns=done.queue_ns,
            forward_ns=done.forward_ns,
        )
