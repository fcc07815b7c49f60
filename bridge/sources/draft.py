"""Makes a draft model a source. The draft works in epochs, each of which starts at committed bytes."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import ClassVar

from bridge.errors import PromptTooLong, ProtocolViolation, Unreachable, require
from bridge.ports import MAX_MEASURED_NS, Proposal, Sync
from bridge.sources.source import (
    DRAFT,
    MAX_OFFERED_BYTES,
    CandidateSource,
    Continuation,
    Draft,
    DraftPace,
    DraftState,
    Opening,
    Outcome,
    RunnerUp,
)
from bridge.text.common_prefix import common_prefix_length
from bridge.text.translation import DraftContext
from bridge.threads import run

# The assumed average bytes of a draft token, until the draft has proposed some.
_TOKEN_BYTES = 4.0
# The passes of the target that wait in vain for a draft that runs ahead, with nothing from it in between, after which
# the target no longer waits for it.
_VAIN_PASSES = 4
# A draft that owes an answer for this long is given up: its stream is closed, which frees its slot. Until its first
# proposal it has this multiple of the time that it is expected to read the prompt in addition.
_MAX_SILENCE_NS, _READING_FACTOR = 30_000_000_000, 4.0
# Rounding may make a probability larger than 1.
_MAX_CONFIDENCE = 1.001
# More committed bytes than this are encoded in a thread, so that other requests do not wait.
_MAX_ENCODED_BYTES = 4096


class DraftEpoch:
    """Compares what the draft has proposed since one sync with what the target has committed since then.

    `unread`: committed bytes that the draft has neither proposed nor read. `unconfirmed`: proposed bytes that the
    target has not committed. Bytes that agree are removed from both. In `turns` the draft sends its whole credit in
    one message, or less if it `may_end_early`.
    """

    def __init__(self, number: int, credit: int, turns: bool, unread: bytes, may_end_early: bool = False) -> None:
        self.number, self.credit, self.turns, self.may_end_early = number, credit, turns, may_end_early
        self.unread, self.unconfirmed = bytearray(unread), bytearray()
        self.token_ids: list[int] = []
        self.ended = self.done = False
        self._committed = False
        self._confirmed_byte_count = 0
        # Where proposed tokens start, and the end of the last one.
        self._offsets = [0]
        self._confidences: list[float] = []
        # The bytes and probability of what might have come in place of each token; no bytes if that is not known.
        self._runners_up: list[tuple[bytes, float]] = []

    def add(self, id_: int, data: bytes, confidence: float, runner_up: tuple[bytes, float] = (b"", 0.0)) -> None:
        self.token_ids.append(id_)
        self.unconfirmed += data
        self._offsets.append(self._confirmed_byte_count + len(self.unconfirmed))
        self._confidences.append(confidence)
        self._runners_up.append(runner_up)
        self._match()

    def end(self, confidence: float) -> None:
        """Ends the text after the last token. `confidence`: the probability of that."""
        self.ended = self.done = True
        self._confidences.append(confidence)

    def observe(self, committed: bytes) -> None:
        """Appends committed bytes."""
        self.unread += committed
        self._committed |= bool(committed)
        self._match()

    def _match(self) -> None:
        count = common_prefix_length(self.unconfirmed, self.unread)
        del self.unconfirmed[:count], self.unread[:count]
        self._confirmed_byte_count += count

    @property
    def parted(self) -> bool:
        """Returns whether the target committed other bytes than the draft proposed."""
        return bool(self.unconfirmed and self.unread)

    @property
    def turn_over(self) -> bool:
        """Returns whether the draft has used up its credit, or proposes no more."""
        return self.done or len(self.token_ids) >= self.credit

    @property
    def ended_early(self) -> bool:
        """Returns whether the draft has ended its turn early, though not the text."""
        return self.may_end_early and self.done and not self.ended and len(self.token_ids) < self.credit

    @property
    def stale(self) -> bool:
        """Returns whether it is useless: the target committed other bytes, or more than the draft will propose.

        Before the target has committed anything, a new epoch would only repeat the same proposal.
        """
        return self._committed and bool(self.unread) and (self.parted or self.turn_over)

    @property
    def reached_token_count(self) -> int:
        """Returns the number of proposed tokens that end within the length of the committed text."""
        return bisect_right(self._offsets, self._confirmed_byte_count + len(self.unread)) - 1

    def ahead(self) -> Continuation | None:
        """Returns the proposal beyond the committed text; None if there is none or the two disagree."""
        if self.unread or not (self.unconfirmed or self.ended):
            return None
        start = self._confirmed_byte_count
        first = bisect_left(self._offsets, start)
        return Continuation(
            DRAFT,
            bytes(self.unconfirmed),
            starts=tuple(offset - start for offset in self._offsets[first : len(self._confidences)]),
            confidences=tuple(self._confidences[first:]),
            closes=self.ended,
            runners_up=tuple(
                RunnerUp(offset - start, data, confidence)
                for offset, (data, confidence) in zip(self._offsets[first:], self._runners_up[first:], strict=False)
                if data
            ),
        )


async def open_draft(draft: Draft, opening: Opening) -> "DraftSource":
    """Returns a draft as a source, once a thread has encoded its prompt. The draft is closed if that fails.

    Raises a `DraftBridgeError` if the prompt cannot be rendered, because its template may refuse what the target's
    accepts, and `PromptTooLong` if the prompt does not fit into the draft's context.
    """
    try:
        return await run(opening.threads(draft.model), DraftSource, draft, opening)
    except BaseException:  # also if it is cancelled
        draft.drafter.close()
        raise


class DraftSource(CandidateSource):
    """Proposes the bytes that a draft model proposes; `offer_of` turns them into candidates.

    The draft's context always spells committed bytes. While the target commits what the draft proposed, the draft
    continues; where they differ, a sync resets it to the last committed byte. It works in `advance`, which raises
    `PromptTooLong` when its context is full. `propose` raises the error that made the draft unusable.

    Creating one encodes its prompt; see `open_draft`.
    """

    name: ClassVar[str] = DRAFT

    def __init__(self, draft: Draft, opening: Opening) -> None:
        self._tape, self._clock, self._threshold = opening.tape, opening.clock, opening.confidence_threshold
        self._drafter, self.model, self.times, self.on_use = draft.drafter, draft.model, draft.times, draft.on_use
        self._context = DraftContext(draft.model.vocabulary, opening.render(draft.model))
        self._token_count = self._byte_count = 0
        ids, context = self._context.ids, draft.model.context_length
        count = len(ids) + self._generated_lag
        require(count < context, PromptTooLong, count, context, draft.model.name)
        # The tokens that it must read before its first proposal.
        self._first_lag = max(len(ids) - self.times.cached_token_count(ids), 1)
        self._epoch: DraftEpoch | None = None
        # Whether the target has waited for it in vain.
        self.overdue = False
        self._encoding = False
        self._vain_pass_count = 0
        # The time of the last sync or the last proposal, from which the time of the next proposal counts.
        self._asked_ns = 0
        # The time since which the draft owes an answer and has sent nothing; None if it owes none.
        self._silent_since_ns: int | None = None
        # What the draft may still send, in all epochs together.
        self._credited_messages = self._credited_tokens = 0
        self._on_fault = draft.on_fault
        self._notify: Callable[[], None] = lambda: None
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    @property
    def stale(self) -> bool:
        """Returns whether its present work has become useless."""
        return self._epoch is not None and self._epoch.stale

    @property
    def state(self) -> DraftState:
        """Returns how far its proposals are."""
        epoch = self._epoch
        if epoch is None:
            return DraftState(lag_token_count=self._first_lag + self._generated_lag)
        return DraftState(
            lag_token_count=max(round(len(epoch.unread) / self._token_bytes), 1),
            token_bytes=self._token_bytes,
            awaited=not (epoch.turn_over or self.overdue or epoch.parted),
            overdue=self.overdue,
            runs_ahead=not (epoch.turns or epoch.turn_over),
        )

    def start(self, notify: Callable[[], None]) -> None:
        """Starts to receive proposals; `notify` is called when there is news."""

        async def read() -> None:
            try:
                async for proposal in self._drafter.proposals():
                    self._on_proposal(proposal)
                self._error = Unreachable("the draft", "its stream ended in the middle of a generation")
            except Exception as error:  # raised again by `propose`
                self._error = error
                if isinstance(error, ProtocolViolation):
                    self._on_fault(error)
            notify()

        self._notify = notify
        self._reader = asyncio.create_task(read())

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        if self._error:
            raise self._error
        return None if self._epoch is None or after else self._epoch.ahead()

    def observe(self, outcome: Outcome) -> None:
        if self._epoch:
            self._epoch.observe(b"".join(outcome.data))
            if self._epoch.may_end_early:
                count = outcome.tried.sources.count(DRAFT)
                right_count = min(outcome.result.accepted_token_count, count)
                # A pass may take only a part of the turn along.
                ended = self._epoch.ended_early and not self._epoch.unconfirmed
                self.times.observe_verified_turn(count, right_count, ended_early=ended)
            self._vain_pass_count += outcome.timed_out
            if outcome.timed_out and not self._epoch.turn_over:
                self.overdue |= self._epoch.turns or self._vain_pass_count >= _VAIN_PASSES
        if self._silent_since_ns is not None and not self._error:
            silent_ns, reads = self._clock() - self._silent_since_ns, not self.proposed_token_count
            reading_ns = _READING_FACTOR * self.times.reading_ns(self._first_lag) if reads else 0.0
            if silent_ns > _MAX_SILENCE_NS + reading_ns:
                self._error = error = Unreachable("the draft", f"it has sent nothing for {silent_ns / 1e9:.0f} seconds")
                self._on_fault(error)

    async def advance(self, pace: DraftPace) -> None:
        """Lets the draft work on what follows the tape."""
        epoch = self._epoch
        if pace.lead == 0 or self.overdue or self._encoding:
            return
        if epoch and epoch.turns == pace.turns and not epoch.stale:
            if pace.turns and not epoch.turn_over:
                return  # the draft has not answered yet, and its answer may be useful
            if not pace.turns and (epoch.done or self._catches_up(epoch)):
                await self._grant(epoch, pace.lead)
                return
        await self._sync(pace)

    def close(self) -> None:
        """Stops the draft and frees its slot. May be called twice."""
        if self._reader:
            self._reader.cancel()
        self._drafter.close()
        if self.proposed_token_count and not self._error:  # one that was lost may have lost its cache, too
            self.times.observe_context(self._context.ids)

    async def _grant(self, epoch: DraftEpoch, lead: int) -> None:
        # The lead counts from the end of the committed text, which the draft may not have reached.
        reached = epoch.reached_token_count + len(epoch.unread) / self._token_bytes
        added = round(reached) + lead - epoch.credit
        if added > 0 and not epoch.done:
            epoch.credit += added
            self._allow(added)
            await self._drafter.grant(epoch.number, added)

    async def _sync(self, pace: DraftPace) -> None:
        """Starts an epoch at the end of the tape, before an incomplete character, if the draft would have any ids."""
        before, context = self._epoch, self._context
        data, proposed = self._tape.data[context.appended_byte_count :], tuple(before.token_ids) if before else ()
        if len(data) > _MAX_ENCODED_BYTES:
            self._encoding = True  # a guest's sequence may go on meanwhile
            try:
                keep, ids = await asyncio.to_thread(context.append, data, proposed)
            finally:
                self._encoding = False
        else:
            keep, ids = context.append(data, proposed)
        if not ids:
            return
        if before is None:
            keep, ids = 0, context.ids
            self._first_lag += self._generated_lag
        count, limit = keep + len(ids), self.model.context_length
        require(count < limit, PromptTooLong, count, limit, self.model.name)
        unread = context.unspelled + self._tape.data[context.appended_byte_count :]
        least = pace.min_probability if pace.turns else 0.0
        self._epoch = DraftEpoch(before.number + 1 if before else 1, pace.lead, pace.turns, unread, least > 0.0)
        self._asked_ns = self._clock()
        self._allow(pace.lead)
        number, offset = self._epoch.number, max(context.byte_offset, 0)
        batch = pace.lead if pace.turns else 1
        await self._drafter.sync(Sync(number, keep, tuple(ids), offset, pace.lead, batch, least))

    def _catches_up(self, epoch: DraftEpoch) -> bool:
        """Returns whether a draft that lags after the target proposes the next useful token sooner without a new epoch.

        A new epoch costs a round trip and one forward, which reads everything committed.
        """
        lag = len(epoch.unread) / self._token_bytes
        waited_ns = self._clock() - self._asked_ns
        return lag == 0 or lag * self.times.token_ns - waited_ns <= self.times.round_trip.value

    def _allow(self, token_count: int) -> None:
        # The draft may send each token in its own message, and end an epoch with a message without tokens.
        self._credited_messages += token_count + 1
        self._credited_tokens += token_count
        if self._silent_since_ns is None:
            self._silent_since_ns = self._clock()

    def _on_proposal(self, proposal: Proposal) -> None:
        """Adds a proposal to its epoch. Raises `ProtocolViolation` if the draft may not send it."""
        self._check(proposal)
        self.compute_ns += proposal.forward_ns
        self.proposed_token_count += len(proposal.token_ids)
        epoch, now = self._epoch, self._clock()
        self._silent_since_ns = now
        if epoch is None or proposal.epoch < epoch.number:
            return
        if proposal.token_ids:
            answers = not epoch.token_ids
            round_trip_ns = now - self._asked_ns - proposal.forward_ns
            self.times.observe_proposal(proposal, max(round_trip_ns, 0) if answers else None, not epoch.turns)
        self._asked_ns = now
        self._vain_pass_count = 0
        confidences = proposal.confidence or (1.0,) * len(proposal.token_ids)
        others = list(zip(proposal.runner_up_ids, proposal.runner_up_confidence, strict=True))
        for place, (id_, confidence) in enumerate(zip(proposal.token_ids, confidences, strict=True)):
            self._add(epoch, id_, confidence, others[place] if others else None)
        epoch.done |= proposal.done
        if epoch.turn_over:
            self._silent_since_ns = None
            if epoch.may_end_early:
                self.times.observe_turn(len(epoch.token_ids), ended_early=epoch.ended_early)
        if epoch.turn_over or not epoch.turns:
            self.overdue = False
            self._notify()

    def _check(self, proposal: Proposal) -> None:
        count, size = len(proposal.token_ids), self.model.vocabulary_size
        self._credited_messages -= 1
        self._credited_tokens -= count
        if self._credited_messages < 0 or self._credited_tokens < 0:
            raise ProtocolViolation("the draft sent more than its credit allows")
        others, other_confidence = proposal.runner_up_ids, proposal.runner_up_confidence
        if len(proposal.confidence) not in (0, count):
            raise ProtocolViolation("the draft sent confidences for only some tokens: send them for all or none")
        if len(others) not in (0, count) or len(others) != len(other_confidence):
            raise ProtocolViolation("the draft sent runners-up for only some tokens: send them for all or none")
        values = (*proposal.confidence, *other_confidence)
        if not all(0 <= value <= _MAX_CONFIDENCE for value in values):  # also False for NaN
            raise ProtocolViolation("the draft sent a confidence that is not a probability")
        if any(not 0 <= id_ < size for id_ in (*proposal.token_ids, *others)):
            raise ProtocolViolation(f"the draft proposed an id outside its vocabulary of {size} ids")
        if not proposal.read_ns <= proposal.forward_ns <= MAX_MEASURED_NS or proposal.queue_ns > MAX_MEASURED_NS:
            raise ProtocolViolation("the draft reported impossible times: over an hour, or read_ns above forward_ns")
        epoch = self._epoch
        if epoch and proposal.epoch == epoch.number and count > epoch.credit - len(epoch.token_ids):
            raise ProtocolViolation("the draft sent more than the credit of this epoch allows")
        if proposal.epoch > (epoch.number if epoch else 0):
            raise ProtocolViolation(f"the draft proposed for epoch {proposal.epoch}, which was never started")

    def _add(self, epoch: DraftEpoch, id_: int, confidence: float, other: tuple[int, float] | None = None) -> None:
        if epoch.done:
            return
        token_bytes = self.model.vocabulary.token_bytes
        data = token_bytes(id_)
        if id_ in self.model.special_ids.eos:
            epoch.end(confidence)
            return
        if not data:  # any other control token has no meaning for the target
            epoch.done = True
            return
        runner_up = (token_bytes(other[0]), other[1]) if other and other[0] != id_ and other[1] > 0 else (b"", 0.0)
        epoch.add(id_, data, confidence, runner_up)
        self._token_count, self._byte_count = self._token_count + 1, self._byte_count + len(data)
        epoch.done = confidence < self._threshold

    @property
    def _generated_lag(self) -> int:
        """Returns how many tokens the generated text is for a draft that joins late."""
        return round(len(self._tape.data) / self._token_bytes)

    @property
    def _token_bytes(self) -> float:
        """Returns the average bytes of a draft token."""
        return self._byte_count / self._token_count if self._token_count else _TOKEN_BYTES
