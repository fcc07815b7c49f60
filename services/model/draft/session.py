"""The session of a draft model."""

import asyncio
from collections.abc import Sequence
from functools import partial

from bridge.errors import InvalidGrammar
from bridge.ports import Proposal
from bridge.sampling.sampler import Choice, Logits, Sampler
from bridge.text.models import Model
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence
from services.grammars.token_matcher import TextMatcher
from services.model.draft.credit import CreditedSession

# A matcher takes milliseconds to follow a longer text, so it does that in a thread.
_THREAD_MIN_BYTES = 1 << 12


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
        # Whether the matcher is at the end of the sequence; None after a sync, until it has tried to follow.
        self._follows: bool | None = False
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
        self._follows = None

    async def _propose(self) -> Proposal:
        if self._matcher and self._follows is None:
            long = self._offset >= _THREAD_MIN_BYTES
            seek = partial(self._seek, self._matcher)
            self._follows = await asyncio.to_thread(seek) if long else seek()
        room = min(self._batch, self._credit, self._model.context_length - self._held + 1)
        chosen: list[Choice] = []
        likelihood = 1.0

        def choose(logits: Logits) -> Choice | None:
            nonlocal likelihood
            try:
                choice = self._choose(logits[0])
            except InvalidGrammar:  # this tokenizer cannot write what the grammar requires
                return None
            chosen.append(choice)
            likelihood *= 1.0 if choice.probability is None else choice.probability
            return choice

        def next_id(choice: Choice | None) -> int | None:
            if choice is None or len(chosen) == room or self._ends(choice) or likelihood < self._min_probability:
                return None
            # A message may end this epoch.
            return None if self._inbox else choice.token_id

        forwards = await self._sequence.run_on(choose, next_id)
        self._sequence.accept(tuple(one.token_id for one in chosen), len(forwards) - 1)
        uncertain = likelihood < self._min_probability
        self._batch, self._min_probability = 1, 0.0  # the rest of the epoch is sent token by token
        first = forwards[0]
        runners_up = [one.runner_up for one in chosen if one.runner_up]
        return Proposal(
            self._epoch,
            tuple(one.token_id for one in chosen),
            tuple(one.probability for one in chosen if one.probability is not None),
            done=not chosen or self._ends(chosen[-1]) or uncertain,
            cached_token_count=first.cached_token_count,
            queue_ns=sum(one.queue_ns for one in forwards),
            forward_ns=sum(one.forward_ns for one in forwards),
            read_token_count=first.token_count,
            read_ns=first.forward_ns,
            runner_up_ids=tuple(id_ for id_, _ in runners_up),
            runner_up_confidence=tuple(confidence for _, confidence in runners_up),
        )

    def _choose(self, logits: Logits) -> Choice:
        """Chooses the next token, and moves on to its end. The model's thread calls it."""
        mask = self._matcher.allowed() if self._matcher and self._follows else None
        choice = self._sampler.choose(logits, self._offset, 0, None, mask)
        self._offset += len(self._model.vocabulary.token_bytes(choice.token_id))
        if self._matcher and self._follows and not self._ends(choice):
            self._matcher.advance((choice.token_id,))
        return choice

    def _seek(self, matcher: TextMatcher) -> bool:
        """Moves the matcher to the end of the sequence. Returns whether the grammar allows the generated text."""
        generated = self._generated(self._offset)
        try:
            return len(generated) == self._offset and matcher.seek(generated)
        except InvalidGrammar:  # it has exceeded a limit, and never recovers; the bridge cuts what it would refuse
            self._matcher = None
            return False

    def _generated(self, byte_count: int) -> bytes:
        """Returns the last bytes that the sequence spells."""
        parts, length = [], 0
        for id_ in reversed(self._sequence.ids):
            if length >= byte_count:
                break
            parts.append(self._model.vocabulary.token_bytes(id_))
            length += len(parts[-1])
        return b"".join(reversed(parts))[max(length - byte_count, 0) :]

    def _ends(self, choice: Choice) -> bool:
        return choice.token_id in self._model.special_ids.eos
