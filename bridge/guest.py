"""Proposes candidates to a guest: an engine that keeps its own loop and reports each of its forwards.

    step              takes what a forward of the engine has changed (`guest_step.StepUpdate`), in three parts:
      _take           finds each sequence, or begins it
      _commit         appends its new tokens to its tape, and informs its sources
      choose          one sequence: by its planner, as in our own loop (`GuestSequence.choose`)
      _choose_for_all several: `planning.batch` shares the forward among them
    settle            after the answer was sent: estimates learn, and drafts go on from the new tokens

Nothing that a guest reports can fail a step: a sequence that the bridge cannot follow gets no candidates.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

from bridge.guest_sequence import GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts, share
from bridge.planning.prediction import expected_count
from bridge.ports import MAX_MEASURED_NS
from bridge.sources.source import Draft, Offer, Outcome
from bridge.statistics import Statistics
from bridge.text.models import Model

_log = logging.getLogger(__name__)

# Candidates of each sequence that are considered, by the number of sequences: the first item that is large enough.
_CONSIDERED = ((4, 16), (16, 8), (64, 6))
_MIN_CONSIDERED = 4
# One forward of this number is made without candidates, because what is never measured cannot be compared.
_PLAIN_FORWARDS = 100
# For the same reason, after this number of forwards for which no candidate seemed worth verifying, one has a few. Each
# such trial doubles the number, up to the second one, until candidates seem worth verifying again.
_IDLE_FORWARDS, _MAX_IDLE_FORWARDS = 25, 400
# The chance from which a candidate takes part in such a trial.
_MIN_TRIAL_CHANCE = 0.5
# Choosing for several sequences may take this long, however short the deadline is.
_MIN_DEADLINE_NS = 1_000_000
# A sequence that the deadline left no time for is expected to have this many more right candidates in each forward.
_WAITING_PRIORITY = 0.05
# A sequence that gains more tokens in a step is opened again, because appending them would take milliseconds.
MAX_GAINED_TOKENS = 1 << 12
# A step, and what follows it, let other work of the event loop run at least this often.
_WORKING_NS = 1_000_000
# A forward that ran more tokens than expected, by this factor, also read a prompt, which does not measure its width.
_PROMPT_FACTOR = 1.5


@dataclass(eq=False)
class Held:
    """A sequence that the engine has named. `sequence` is None while it is opened, and if it cannot be followed.

    `prompt_count`: how many of its tokens the engine did not generate. `priority`: how many right candidates its last
    offer for a shared forward had, as expected, and more with each forward since then.
    """

    ids: list[int]
    named_ns: int
    prompt_count: int = 0
    sequence: GuestSequence | None = None
    opening: "asyncio.Task[None] | None" = None
    refused: bool = False
    priority: float = 0.0

    @property
    def tokens(self) -> Sequence[int]:
        """Returns the ids of all its tokens so far."""
        return self.sequence.tape.ids if self.sequence else self.ids

    def close(self) -> None:
        """Ends its sequence. May be called twice."""
        if self.opening:
            self.opening.cancel()
        if self.sequence:
            self.sequence.release_draft()
        self.sequence = None

    def refuse(self) -> None:
        """Gives it no more candidates, until the engine sends it from the beginning."""
        self.close()
        self.ids, self.refused = [], True


class Guest:
    """The sequences of one engine. `open_sequence` prepares one, given its ids and the number of generated ones.

    `find_draft` returns a draft for a sequence, or None if none is free; it is asked when the sequence begins (True)
    and, until it has one, after later steps (False).
    `on_held` is called with a sequence's id and its number of tokens when it begins or grows, and may end any sequence,
    so that all guests together keep to one limit.
    `on_ended` is called when one ends; `on_outcome` receives each forward that verified candidates. The engine's
    `costs` outlive its stream.
    """

    def __init__(
        self,
        model: Model,
        open_sequence: Callable[[Sequence[int], int], Awaitable[GuestSequence]],
        costs: BatchCosts,
        *,
        find_draft: Callable[[Held, bool], Draft | None] = lambda held, is_new: None,
        on_held: Callable[[int, int], None] = lambda id_, token_count: None,
        on_ended: Callable[[int, Statistics | None], None] = lambda id_, statistics: None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._model, self._open_sequence, self._find_draft, self._costs = model, open_sequence, find_draft, costs
        self._on_held, self._on_ended, self._on_outcome, self._clock = on_held, on_ended, on_outcome, clock
        self.held: dict[int, Held] = {}
        self._answered_ns = 0
        # How long the last step took, and when the last one began that named sequences.
        self.elapsed_ns = self.stepped_ns = 0
        self._turn = 0
        # Shared forwards in a row for which no offer seemed worth verifying.
        self._idle_forward_count, self._idle_limit = 0, _IDLE_FORWARDS
        self._alone = False
        # Sequences that began in this step, and those that can use candidates.
        self._begun: list[tuple[SequenceUpdate, Held]] = []
        self._choosing: list[Held] = []
        self._failed = False
        # Updates that the last step had no time for.
        self._uncommitted: Sequence[tuple[SequenceUpdate, Held]] = []

    @property
    def opening(self) -> bool:
        """Returns whether sequences are being opened."""
        return any(one.opening and not one.opening.done() for one in self.held.values())

    async def step(self, update: StepUpdate) -> Answer:
        """Takes a step, and returns its answer within the step's deadline. `settle` must be called after it."""
        began, self._alone, self._begun = self._clock(), len(update.sequences) == 1, []
        answer = Answer(update.number)
        self.stepped_ns = began if update.sequences else self.stepped_ns
        for id_ in update.ended:
            self.end(id_, complete=True)
        engine_ns = update.engine_ns or (began - self._answered_ns if self._answered_ns else 0)
        for one in update.sequences:  # before other work runs, which may take the drafts of those not named
            if held := self.held.get(one.id):
                held.named_ns = began
        named, until = [], began + _WORKING_NS
        for one in update.sequences:
            if taken := self._take(one, answer, began):
                named.append((one, taken))
            until = await self._give_way(until)
        measured = self._measure(update, named, min(engine_ns, MAX_MEASURED_NS))
        await self._await_openings(len(named), began + update.deadline_ns // 2)  # choosing takes time, too
        if self._alone and named:
            one, held = named[0]
            with self._refusing(held):
                if sequence := self._commit(one, held, measured):
                    offer, width = await sequence.choose(began + update.deadline_ns)
                    sequence.propose(answer, one.id, offer, width)
        elif not self._alone:
            await self._choose_for_all(update, named, answer, began + max(update.deadline_ns, _MIN_DEADLINE_NS))
        self._answered_ns = self._clock()
        self.elapsed_ns = self._answered_ns - began
        return answer

    async def settle(self) -> None:
        """Learns from the step, and lets the drafts go on; called when its answer was sent."""
        until = self._clock() + _WORKING_NS
        for one, held in self._uncommitted:
            with self._refusing(held):
                self._commit(one, held, None)
            until = await self._give_way(until)
        for held in self._choosing:
            with self._refusing(held):
                if held.sequence:
                    await held.sequence.settle(alone=self._alone)
            until = await self._give_way(until)
        self._give_draft()
        self._choosing, self._uncommitted = [], []

    async def _give_way(self, until: int) -> int:
        """Lets other work run if it is time. Returns the next such time."""
        if self._clock() < until:
            return until
        await asyncio.sleep(0)
        return self._clock() + _WORKING_NS

    def end(self, id_: int, *, complete: bool = False) -> None:
        """Ends a sequence, if it is known. `complete`: its text has ended, and so has a length to learn."""
        if held := self.held.pop(id_, None):
            sequence = held.sequence
            if complete and sequence:
                sequence.observe_end()
            held.close()
            self._on_ended(id_, sequence.statistics if sequence else None)

    def end_idle(self, idle_ns: int) -> None:
        """Ends the sequences that no step has named for this time."""
        oldest = self._clock() - idle_ns
        for id_ in [id_ for id_, held in self.held.items() if held.named_ns < oldest]:
            self.end(id_, complete=True)

    def close(self) -> None:
        for id_ in tuple(self.held):
            self.end(id_)

    def _take(self, one: SequenceUpdate, answer: Answer, now: int) -> Held | None:
        """Returns the sequence of an update; None if it is unknown or refused.

        One that is not open yet keeps the new tokens in `Held.ids`.
        """
        held, kept = self.held.get(one.id), one.kept_token_count
        # The ids are looked at last, because there may be a million.
        if kept + len(one.token_ids) > self._model.context_length or not self._model.has_all(one.token_ids):
            self.end(one.id)
            self.held[one.id] = Held([], now, refused=True)
            self._on_held(one.id, 0)
            answer.note = (
                f"sequence {one.id} has ids outside the tokenizer's vocabulary, or more than the context's "
                f"{self._model.context_length} tokens: describe the engine's own model and tokenizer"
            )
            return None
        if kept == 0:
            return self._begin(one, one.token_ids, one.generated_token_count, now)
        if held and held.refused:
            return None
        if held is None or len(held.tokens) < kept:
            answer.unknown.append(one.id)
            self.end(one.id)
            return None
        # The tape cannot go back, so a sequence that does begins anew; so does one that gains much at once, because
        # a sequence is opened in a thread.
        if kept < len(held.tokens) or len(one.token_ids) > MAX_GAINED_TOKENS:
            ids = [*held.tokens[:kept], *one.token_ids]
            return self._begin(one, ids, len(ids) - held.prompt_count, now)
        if not held.sequence:
            held.ids += one.token_ids
            self._on_held(one.id, len(held.ids))
        return held

    def _begin(self, one: SequenceUpdate, ids: Sequence[int], generated_count: int, now: int) -> Held | None:
        self.end(one.id)
        if not ids:
            return None
        # A prompt has at least one token.
        generated_count = min(max(generated_count, 0), len(ids) - 1)
        held = self.held[one.id] = Held(list(ids), now, len(ids) - generated_count)
        self._begun.append((one, held))
        self._on_held(one.id, len(ids))
        if one.id not in self.held:  # it exceeds the limit alone
            return None

        async def open_() -> None:
            with self._refusing(held):
                known = len(held.ids)
                sequence = await self._open_sequence(held.ids[:known], known - held.prompt_count)
                sequence.tape.commit(held.ids[known:])  # the tokens that came while it was opened
                held.sequence, held.ids = sequence, []
                if draft := self._find_draft(held, True):
                    sequence.add_draft(draft)

        held.opening = asyncio.create_task(open_())
        return held

    async def _await_openings(self, named_count: int, deadline: int) -> None:
        """Waits for new sequences, so that they get candidates from their first step on, unless others would wait."""
        opening = [held.opening for one, held in self._begun if held.opening and one.max_candidate_count != 0]
        if len(opening) == named_count > 0 and (left := deadline - self._clock()) > 0:
            await asyncio.wait(opening, timeout=left / 1e9)

    @contextmanager
    def _refusing(self, held: Held) -> Iterator[None]:
        """Refuses a sequence that an unexpected error concerns, and logs the first such error."""
        try:
            yield
        except Exception:
            if not self._failed:
                self._failed = True
                _log.exception("a bug in the bridge; a sequence of an engine gets no candidates")
            held.refuse()

    def _measure(self, update: StepUpdate, named: Sequence[tuple[SequenceUpdate, Held]], engine_ns: int) -> int | None:
        """Records the time of a forward of several sequences, and returns that of a forward of one, for its planner.

        Returns None for several, and a time that also read a prompt, or is unknown, does not count.
        """
        count = len(update.sequences)
        candidate_count = sum(one.candidate_count for one in update.sequences)
        reads = update.forward_token_count > _PROMPT_FACTOR * (count + candidate_count)
        if not engine_ns or self._begun or reads or not named:
            return None
        if count > 1:
            self._costs.observe(count, candidate_count, float(engine_ns))
            return None
        return engine_ns

    def _commit(self, one: SequenceUpdate, held: Held, engine_ns: int | None) -> GuestSequence | None:
        """Appends an update's tokens. Returns the sequence if it is open and the engine can verify candidates."""
        sequence = held.sequence
        if sequence is None or self.held.get(one.id) is not held:  # later sequences of the step may have ended it
            return None
        # One that has been opened since it was taken has the tokens already.
        if token_ids := one.token_ids[len(sequence.tape.ids) - one.kept_token_count :]:
            outcome = sequence.commit(token_ids, one.candidate_step, one.candidate_count, engine_ns)
            if outcome.tried.token_ids:
                self._on_outcome(outcome)
            self._on_held(one.id, len(sequence.tape.ids))
            if one.id not in self.held:
                return None
        sequence.limit(one.max_candidate_count)
        self._choosing.append(held)
        return sequence if sequence.max_width else None

    async def _choose_for_all(
        self, update: StepUpdate, named: Sequence[tuple[SequenceUpdate, Held]], answer: Answer, deadline: int
    ) -> None:
        """Adds candidates for several sequences, those that the deadline leaves time for."""
        count, plain = len(update.sequences), self._turn % _PLAIN_FORWARDS == _PLAIN_FORWARDS - 1
        considered = next((most for limit, most in _CONSIDERED if count <= limit), _MIN_CONSIDERED)
        self._turn += 1
        # If the deadline is too short for all sequences, those with good offers come first, and each gets its turn.
        named = sorted(named, key=lambda pair: pair[1].priority, reverse=True)
        for _, held in named:
            held.priority += _WAITING_PRIORITY
        offered, until = [], self._clock() + _WORKING_NS
        for place, (one, held) in enumerate(named):
            if self._clock() > deadline:
                self._uncommitted = named[place:]
                break
            with self._refusing(held):
                if sequence := self._commit(one, held, None):
                    offer, chances = Offer(), list[float]()
                    if not plain:
                        offer, chances = sequence.best_offer(considered)
                        held.priority = expected_count(chances)
                    offered.append((one.id, sequence, offer, chances))
            until = await self._give_way(until)
        widths = self._shared([chances for *_, chances in offered], count)
        for (id_, sequence, offer, _), width in zip(offered, widths, strict=True):
            sequence.propose(answer, id_, offer, width)
            until = await self._give_way(until)

    def _shared(self, chances: Sequence[Sequence[float]], sequence_count: int) -> list[int]:
        """Returns how many candidates of each offer to verify; see `share`."""
        widths = share(chances, sequence_count, self._costs)
        if any(widths):
            self._idle_forward_count, self._idle_limit = 0, _IDLE_FORWARDS
        elif any(chances):
            self._idle_forward_count += 1
        if self._idle_forward_count < self._idle_limit:
            return widths
        self._idle_forward_count, self._idle_limit = 0, min(2 * self._idle_limit, _MAX_IDLE_FORWARDS)
        least = min(_MIN_TRIAL_CHANCE, max(one[0] for one in chances if one))
        return [int(bool(one) and one[0] >= least) for one in chances]

    def _give_draft(self) -> None:
        """Gives a draft that has come free to a sequence without one: at most one in a step, so that it stays short."""
        for held in self._choosing:
            if held.sequence and held.sequence.awaits_draft:
                with self._refusing(held):
                    if draft := self._find_draft(held, False):
                        held.sequence.add_draft(draft)
                return
