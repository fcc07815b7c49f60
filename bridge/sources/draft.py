"""The draft model as a source: one epoch after the other, each starting at bytes that are committed."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import ClassVar

from bridge.common_prefix import common_prefix_length
from bridge.errors import ProtocolViolation, Unreachable
from bridge.models import Model
from bridge.ports import Drafter, Proposal, Sync
from bridge.sources.source import Continuation, DraftTimes, Opening, Outcome, Pace, SourceState
from bridge.tape import Tape
from bridge.translation import DraftContext
from bridge.vocabulary import Rendering

# Bytes of a draft token, until the draft has proposed some.
_TOKEN_BYTES = 4.0


class DraftEpoch:
    """What the draft has proposed since one sync, beside what the target has committed since then.

    `committed`: what is committed already after the draft's context, where that ends in half a character. In `turns`
    the draft sends its whole credit in one message. `parted`: the target committed other bytes than it proposed.
    """

    def __init__(self, number: int, credit: int, turns: bool, committed: bytes) -> None:
        self.number, self.credit, self.turns = number, credit, turns
        self.token_ids: list[int] = []
        self.data = bytearray()
        self.ended = self.done = self.parted = False
        self._ends: list[int] = []
        self._confidences: list[float] = []
        self._committed = bytearray(committed)
        self._known_byte_count = len(committed)
        self._common = 0

    def add(self, id_: int, data: bytes, confidence: float) -> None:
        """Appends a proposed token."""
        self.token_ids.append(id_)
        self.data += data
        self._ends.append(len(self.data))
        self._confidences.append(confidence)
        self._compare()

    def observe(self, committed: bytes) -> None:
        """Appends committed bytes."""
        self._committed += committed
        self._compare()

    def _compare(self) -> None:
        if not self.parted:
            self._common += common_prefix_length(self.data[self._common :], self._committed[self._common :])
            self.parted = self._common < min(len(self.data), len(self._committed))

    @property
    def turn_over(self) -> bool:
        """Whether the draft has used its credit, or has nothing to add."""
        return self.done or len(self.token_ids) >= self.credit

    @property
    def stale(self) -> bool:
        """Whether a new epoch would do better, because the target has since committed something else, or more."""
        overtaken = self.turn_over and self._common == len(self.data) < len(self._committed)
        return len(self._committed) > self._known_byte_count and (self.parted or overtaken)

    @property
    def lag_byte_count(self) -> int:
        """Committed bytes that the draft did not propose and has not read."""
        return len(self._committed) - self._common

    @property
    def reached_token_count(self) -> int:
        """Proposed tokens that lie wholly within the committed text."""
        return bisect_right(self._ends, len(self._committed))

    def ahead(self, source: str) -> Continuation | None:
        """What is proposed beyond the committed text, as long as the two agree."""
        start = len(self._committed)
        if self._common < start or not (start < len(self.data) or self.ended):
            return None
        starts = [0, *self._ends]
        first = bisect_left(starts, start)
        return Continuation(
            source,
            bytes(self.data[start:]),
            starts=tuple(offset - start for offset in starts[first : len(self._confidences)]),
            confidences=tuple(self._confidences[first:]),
            closes=self.ended,
        )


class DraftSource:
    """Proposes what a draft model proposes; its bytes become candidates in `offer_of`.

    The draft's context always spells committed bytes. As long as what the target commits agrees with what the draft
    proposed, the draft runs on; where they part, a sync sends it back to the last committed byte.
    """

    name: ClassVar[str] = "draft"
    evidence_edges: ClassVar[tuple[float, ...]] = (0.3, 0.5, 0.7, 0.9, 0.97)
    prior_chances: ClassVar[tuple[float, ...]] = (0.3, 0.4, 0.55, 0.7, 0.85, 0.95)

    def __init__(
        self,
        drafter: Drafter,
        model: Model,
        prompt: Rendering,
        times: DraftTimes,
        confidence_threshold: float,
        clock: Callable[[], int],
    ) -> None:
        self._drafter, self._model, self._times, self._clock = drafter, model, times, clock
        self._prompt = prompt
        self._context = DraftContext(model.vocabulary, prompt)
        self._threshold = confidence_threshold
        self._epoch: DraftEpoch | None = None
        self._overdue = False
        self._read_byte_count = self._asked_ns = 0
        self._owed_messages = self._owed_tokens = 0
        self._token_count = self._byte_count = 0
        self._notify: Callable[[], None] = lambda: None
        self._reader: asyncio.Task[None] | None = None
        self.proposed_token_count = self.compute_ns = 0

    @property
    def state(self) -> SourceState:
        """See `CandidateSource`."""
        epoch = self._epoch
        if epoch is None:
            return SourceState(lag_token_count=len(self._context.ids))
        return SourceState(
            lag_token_count=max(round(epoch.lag_byte_count / self._token_bytes), 1),
            token_bytes=self._token_bytes,
            awaited=not (epoch.turn_over or self._overdue or epoch.parted),
            overdue=self._overdue,
            stale=epoch.stale,
            runs_ahead=not (epoch.turns or epoch.turn_over),
        )

    def start(self, notify: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """See `CandidateSource`."""

        async def read() -> None:
            try:
                async for proposal in self._drafter.proposals():
                    self._on_proposal(proposal)
                fail(Unreachable("the draft", "its stream ended in the middle of a generation"))
            except Exception as error:  # the loop tells apart whose fault it is
                fail(error)

        self._notify = notify
        self._reader = asyncio.create_task(read())

    def propose(self, tape: Tape, after: bytes = b"") -> Continuation | None:
        """See `CandidateSource`."""
        return None if self._epoch is None or after else self._epoch.ahead(self.name)

    def observe(self, outcome: Outcome) -> None:
        """See `CandidateSource`."""
        if self._epoch:
            self._epoch.observe(b"".join(outcome.data))
            self._overdue |= outcome.timed_out and self._epoch.turns and not self._epoch.turn_over

    async def advance(self, tape: Tape, pace: Pace) -> None:
        """See `CandidateSource`."""
        epoch = self._epoch
        if pace.lead == 0 or self._overdue:
            return
        if epoch and epoch.turns == pace.turns and not epoch.stale:
            if pace.turns and not epoch.turn_over:
                return  # it has not answered yet, and what it answers may be of use
            if not pace.turns and (epoch.done or self._catches_up(epoch)):
                await self._grant(epoch, pace.lead)
                return
        await self._sync(tape, pace)

    def close(self) -> None:
        """See `CandidateSource`."""
        if self._reader:
            self._reader.cancel()
        self._drafter.close()

    async def _grant(self, epoch: DraftEpoch, lead: int) -> None:
        reached = epoch.reached_token_count + epoch.lag_byte_count / self._token_bytes
        added = round(reached) + lead - epoch.credit
        if added > 0 and not epoch.done:
            epoch.credit += added
            self._owe(added)
            await self._drafter.grant(epoch.number, added)

    async def _sync(self, tape: Tape, pace: Pace) -> None:
        """Starts an epoch at the end of the tape, less half a character, unless there is nothing to continue."""
        before = self._epoch
        keep, ids = self._context.append(tape.data[self._read_byte_count :], before.token_ids if before else ())
        self._read_byte_count = len(tape.data)
        if not ids:
            return
        if before is None:
            keep, ids = 0, self._context.ids
        base, number = self._context.byte_offset, before.number + 1 if before else 1
        committed = self._prompt.text[base:] + bytes(tape.data) if base < 0 else bytes(tape.data[base:])
        self._epoch = DraftEpoch(number, pace.lead, pace.turns, committed)
        self._asked_ns = self._clock()
        self._owe(pace.lead)
        await self._drafter.sync(Sync(number, keep, tuple(ids), max(base, 0), pace.lead, pace.batch))

    def _catches_up(self, epoch: DraftEpoch) -> bool:
        """Whether a draft that has fallen behind proposes the next useful token sooner by going on.

        Starting anew costs a round trip and one forward that takes it past everything committed.
        """
        behind = epoch.lag_byte_count / self._token_bytes
        waited_ns = self._clock() - self._asked_ns
        return behind == 0 or behind * self._times.token_ns - waited_ns <= self._times.round_trip_ns

    def _owe(self, token_count: int) -> None:
        # The draft may send each token by itself, and close an epoch with a message that has none.
        self._owed_messages += token_count + 1
        self._owed_tokens += token_count

    def _on_proposal(self, proposal: Proposal) -> None:
        """Takes a proposal. Raises `ProtocolViolation` for one that the draft may not send."""
        self._check(proposal)
        self.compute_ns += proposal.forward_ns
        self.proposed_token_count += len(proposal.token_ids)
        epoch, now = self._epoch, self._clock()
        if epoch is None or proposal.epoch < epoch.number:
            return
        if proposal.token_ids:
            answers = not epoch.token_ids
            round_trip_ns = now - self._asked_ns - proposal.queue_ns - proposal.forward_ns
            self._times.observe_proposal(proposal, max(round_trip_ns, 0) if answers else None, not epoch.turns)
        self._asked_ns = now
        for id_, confidence in zip(proposal.token_ids, proposal.confidence or (1.0,) * epoch.credit, strict=False):
            self._add(epoch, id_, confidence)
        epoch.done |= proposal.done
        if epoch.turn_over or not epoch.turns:
            self._overdue = False
            self._notify()

    def _check(self, proposal: Proposal) -> None:
        count, size = len(proposal.token_ids), self._model.vocabulary_size
        self._owed_messages -= 1
        self._owed_tokens -= count
        if self._owed_messages < 0 or self._owed_tokens < 0:
            raise ProtocolViolation("the draft sends more than it has credit for")
        if len(proposal.confidence) not in (0, count):
            raise ProtocolViolation("the draft sends a confidence for some of its tokens: it must be all or none")
        if any(not 0 <= id_ < size for id_ in proposal.token_ids):
            raise ProtocolViolation(f"the draft proposes an id outside its vocabulary of {size}")
        if proposal.epoch > (self._epoch.number if self._epoch else 0):
            raise ProtocolViolation(f"the draft proposes for epoch {proposal.epoch}, which was never started")

    def _add(self, epoch: DraftEpoch, id_: int, confidence: float) -> None:
        if epoch.done:
            return
        data = self._model.vocabulary.token_bytes(id_)
        epoch.ended = id_ in self._model.special_ids.eos
        if epoch.ended or not data:
            # A control token other than an end means nothing to another model.
            epoch.done = True
            return
        epoch.add(id_, data, confidence)
        self._token_count, self._byte_count = self._token_count + 1, self._byte_count + len(data)
        epoch.done = confidence < self._threshold

    @property
    def _token_bytes(self) -> float:
        """Bytes of a draft token, on average."""
        return self._byte_count / self._token_count if self._token_count else _TOKEN_BYTES


def open_draft(opening: Opening) -> DraftSource | None:
    """The draft of the request, if it has one that can take its prompt."""
    drafter, model, prompt = opening.drafter, opening.draft_model, opening.draft_prompt
    if drafter is None or model is None or prompt is None or opening.draft_times is None:
        return None
    return DraftSource(drafter, model, prompt, opening.draft_times, opening.confidence_threshold, opening.clock)
