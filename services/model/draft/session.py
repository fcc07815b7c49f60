"""The session of a draft model."""

from collections.abc import Sequence

from bridge.errors import InvalidGrammar
from bridge.ports import Proposal
from bridge.sampling.sampler import Choice, Logits, Sampler
from bridge.text.models import Model
from services.engines.job import Timed
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from services.grammars.token_matcher import TextMatcher
from services.model.draft.credit import CreditedSession


class DraftSession(CreditedSession):
    """Implements `bridge.ports.Drafter` over a model in this process. Each proposed token takes one forward.

    `proposals` also raises `SlotsExhausted` and `EngineFailure`. With a `matcher`, it proposes only what a grammar
    allows, unless the context spells something else, as after a tokenizer that changes texts.
    """

    def __init__(
        self, model: Model, scheduler: Scheduler, sampler: Sampler, matcher: TextMatcher | None = None
    ) -> None:
        super().__init__(model)
        self._matcher = matcher
        # Whether the matcher is at the end of the sequence.
        self._follows = False
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
        if self._matcher:
            generated = self._generated(byte_offset)
            self._follows = len(generated) == byte_offset and self._matcher.seek(generated)

    async def _propose(self) -> Proposal:
        read_token_count = self._sequence.uncached_token_count
        try:
            first = await self._forward()
        except InvalidGrammar:  # this tokenizer cannot write what the grammar requires
            return Proposal(self._epoch, (), (), done=True)
        forwards = [first]
        room = min(self._batch, self._credit, self._model.context_length - self._held + 1)
        while len(forwards) < room and not self._ends(forwards[-1]):
            if self._inbox:
                break  # it may end this epoch
            try:
                forwards.append(await self._forward())
            except InvalidGrammar:
                break
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
        done = await self._sequence.forward((), lambda logits: self._choose(logits[0], offset))
        self._sequence.accept((done.value.token_id,), 0)
        self._offset += len(self._model.vocabulary.token_bytes(done.value.token_id))
        if self._matcher and self._follows and not self._ends(done):
            self._matcher.advance((done.value.token_id,))
        return done

    def _choose(self, logits: Logits, offset: int) -> Choice:
        if self._matcher and self._follows:
            return self._sampler.choose(logits, offset, 0, None, self._matcher.allowed())
        return self._sampler.choose(logits, offset, 0)

    def _generated(self, byte_count: int) -> bytes:
        """Returns the last bytes that the sequence spells."""
        parts, length = [], 0
        for id_ in reversed(self._sequence.ids):
            if length >= byte_count:
                break
            parts.append(self._model.vocabulary.token_bytes(id_))
            length += len(parts[-1])
        return b"".join(reversed(parts))[max(length - byte_count, 0) :]

    def _ends(self, done: Timed[Choice]) -> bool:
        return done.value.token_id in self._model.special_ids.eos
