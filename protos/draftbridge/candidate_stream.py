"""What a `CandidateClient` knows of its sequences: what an engine reports of them, and what the bridge has answered."""

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftbridge.v1 import candidate_pb2

# Ends the requests of a stream.
CLOSED = object()
# The most tokens of one message; sequences with more are reported by later steps, or not at all.
_MAX_STEP_TOKENS = 1 << 20
# The new tokens of a sequence that take no time worth counting.
_MAX_SHORT_TOKENS = 64
# After this many missed deadlines in a row, steps do not wait until an answer arrives in time. But answers may be late
# only because the engine computes meanwhile. So the step of this number waits again, then one of twice that number, up
# to the second number.
MAX_MISSED = 3
UNWAITED_STEPS, _MAX_UNWAITED_STEPS = 16, 256


@dataclass(frozen=True)
class SequenceStep:
    """One sequence after a forward.

    `token_ids`: all its tokens, prompt first: a list, an array or a row of one; it is read before `step` returns.
    `kept_token_count`: how many of them, from the first, are the same as when a step last named the sequence; None if
    the sequence has only grown. `generated_token_count`: how many at the end are not of the prompt, when it starts.
    `max_candidates`: the most that the engine can verify now; None for the bridge's choice, 0 for none.
    `verified_count`: how many of the candidates that the last `step` returned for it the forward verified; None: all.
    `fixed_width`: the forward takes as long with fewer than `max_candidates`, so `step` returns all that it has.
    """

    sequence_id: int
    token_ids: Sequence[int]
    kept_token_count: int | None = None
    generated_token_count: int = 0
    max_candidates: int | None = None
    verified_count: int | None = None
    fixed_width: bool = False


@dataclass(frozen=True)
class Candidates:
    """Ids that continue a sequence, and the source of each, for one forward."""

    token_ids: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass
class CandidateCounts:
    """Counts since the client's start. `late_count`: answers that missed their deadline."""

    step_count: int = 0
    answer_count: int = 0
    late_count: int = 0
    candidate_count: int = 0
    connection_count: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The last candidates that the bridge sent for a sequence."""

    step: int
    base: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    width: int

    @classmethod
    def read(cls, step: int, one: candidate_pb2.SequenceCandidates, vocabulary_size: int) -> "Answer | None":
        """Returns the candidates of a message; None if the model has no such ids, or if the sources do not fit them."""
        ids = tuple(one.token_ids)
        if max(ids, default=0) >= vocabulary_size or sum(run.token_count for run in one.runs) != len(ids):
            return None
        sources = tuple(run.source for run in one.runs for _ in range(run.token_count))
        return cls(step, one.base_token_count, ids, sources, max(one.width, 1))

    def after(self, one: SequenceStep) -> Candidates | None:
        """Returns the candidates that continue the sequence, for one forward; None if there are none."""
        token_ids, limit = one.token_ids, one.max_candidates
        done = len(token_ids) - self.base
        if not 0 <= done < len(self.token_ids):
            return None
        if any(int(token_ids[self.base + place]) != self.token_ids[place] for place in range(done)):
            return None
        count = len(self.token_ids) if one.fixed_width else self.width
        count = count if limit is None else min(count, limit)
        chosen = slice(done, done + count)
        return Candidates(self.token_ids[chosen], self.sources[chosen]) if count else None


class SentStep(NamedTuple):
    """When a step was sent and when its deadline ends, in seconds of `time.monotonic`, and whether the engine waits.

    `until` is 0 for a step that only reports.
    """

    at: float
    until: float
    awaited: bool


@dataclass
class Patience:
    """Decides which steps wait for their answers, by the deadlines that were missed in a row."""

    missed_count: int = 0
    _unwaited_count: int = 0

    def waits(self) -> bool:
        """Returns whether the present step waits."""
        excess = self.missed_count - MAX_MISSED
        if excess >= 0:
            self._unwaited_count += 1
            if self._unwaited_count < min(UNWAITED_STEPS << min(excess, 8), _MAX_UNWAITED_STEPS):
                return False
        self._unwaited_count = 0
        return True

    def note(self, *, in_time: bool) -> None:
        """Records an answer that arrived in time, or a wait in vain."""
        self.missed_count = 0 if in_time else self.missed_count + 1


@dataclass
class EngineStream:
    """One connection. `kept`: by sequence, how many of the tokens that the bridge holds still stand."""

    outbox: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    opened: bool = False
    # The sequences that the bridge holds at most: it has dropped those that were named least recently.
    max_sequence_count: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    # By sequence: the step of the answer that the last candidates came from, and their number.
    returned: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    # By sequence that ended or lost tokens: the first step whose answer may be used.
    valid_from: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    # By number, the steps without an answer.
    sent: dict[int, SentStep] = field(default_factory=dict)
    answered_step: int = 0
    # Why this side has ended it.
    problem: str = ""

    def requests(self) -> Iterator[candidate_pb2.ProposeRequest]:
        while (request := self.outbox.get()) is not CLOSED:
            yield request

    def forget(self, sequence_id: int) -> None:
        self.kept.pop(sequence_id, None)
        self.distrust(sequence_id)

    def distrust(self, sequence_id: int) -> None:
        """Makes all candidates for the present tokens of a sequence useless, including those still to come."""
        self.valid_from[sequence_id] = self.last_step + 1
        self.answers.pop(sequence_id, None)
        self.returned.pop(sequence_id, None)

    def trim(self, named_count: int) -> None:
        """Forgets what the bridge has dropped: all but the sequences that were named last, of an engine that ends none.

        `named_count`: the number that the present step names.
        """
        while self.max_sequence_count and len(self.kept) > max(self.max_sequence_count, named_count):
            self.forget(next(iter(self.kept)))

    def note_kept(self, one: SequenceStep) -> None:
        """Notes which of a sequence's tokens still stand."""
        if (held := self.kept.get(one.sequence_id)) is not None:
            limit = len(one.token_ids) if one.kept_token_count is None else one.kept_token_count
            self.kept[one.sequence_id] = min(held, limit, len(one.token_ids))
            if self.kept[one.sequence_id] < held:
                self.distrust(one.sequence_id)

    def fitting(self, sequences: Sequence[SequenceStep], until: float) -> Iterator[SequenceStep]:
        """Yields the sequences whose new tokens fit into one message.

        The caller converts each before it takes the next one. After `until`, in the seconds of `time.monotonic`, only
        those with few new tokens are taken, and one other if there was none before.
        """
        room, has_long = _MAX_STEP_TOKENS, False
        for one in sequences:
            count = len(one.token_ids) - self.kept.get(one.sequence_id, 0)
            is_long = count > _MAX_SHORT_TOKENS
            if count > room or (is_long and has_long and time.monotonic() >= until):
                continue
            room, has_long = room - count, has_long or is_long
            yield one

    def gained(self, one: SequenceStep) -> candidate_pb2.ProposeSequence:
        """Returns the message for a sequence, and notes that the bridge has its tokens."""
        kept = self.kept.pop(one.sequence_id, 0)
        new = one.token_ids[kept:]
        step, count = self.returned.pop(one.sequence_id, (0, 0))
        if one.verified_count is not None:
            count = min(count, one.verified_count)
        self.kept[one.sequence_id] = len(one.token_ids)  # at the end, as the one that was named last
        return candidate_pb2.ProposeSequence(
            sequence_id=one.sequence_id,
            kept_token_count=kept,
            token_ids=new.tolist() if hasattr(new, "tolist") else new,
            generated_token_count=0 if kept else one.generated_token_count,
            max_candidate_count=one.max_candidates,
            candidate_step=step if count else 0,
            candidate_count=count,
        )
