"""The session of a target: decodes under credit, and verifies the candidates that arrive in time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter_ns

from bridge.errors import PromptTooLong, ProtocolViolation
from bridge.ports import Candidates, FinishReason, Grant, Logprob, Pass, Run
from bridge.sampling.sampler import Choice, History, Logits, Sampler
from bridge.text.common_prefix import common_prefix_length
from bridge.text.models import Model
from services.engines.scheduler import Scheduler
from services.engines.sequence import CachedSequence, check_ids
from services.errors import BaseMismatch
from services.grammars.token_matcher import TokenMatcher
from services.model.inbox import Inbox

# The most candidates of a forward that are not verified because the grammar allows nothing else. A scheduler takes a
# sequence that lacks many tokens for a prompt.
_MAX_CERTAIN = 12


@dataclass(frozen=True)
class _Verdict:
    choices: list[Choice]
    candidate_token_count: int
    ended: bool
    branch_accepted: bool = False


class TargetSession:
    """Implements `bridge.ports.Verifier` over a model in this process.

    Incoming messages wait in an inbox, which `passes` reads between two forwards.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Callable[[], int] = perf_counter_ns,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`matcher` is at the end of the sequence, except while `_verify` looks ahead; None without a grammar."""
        self._matcher = matcher
        # Ids that the matcher, back at the start, has yet to follow.
        self._unread: Sequence[int] | None = None
        self._model = model
        self._clock = clock
        self._sampler = sampler
        self._sequence = CachedSequence(scheduler)
        self._inbox: Inbox[Run | Candidates | Grant] = Inbox()
        self._news = asyncio.Event()
        self._pending: list[int] = []
        # Pairs of the index of a pending candidate and an id in its place.
        self._branches: list[tuple[int, int]] = []
        self._credit = 0
        self._patience_us = 0
        self._width = 0
        self._offer_id = 0
        self._offset = 0
        self._empty_tokens = 0
        self._history = History(())
        self._skips_wait = False  # an empty offer came: the next forward need not wait
        self._prefilled = False
        self._ended = False  # the text has ended, even if there is credit left
        self._last = False  # the client has closed its side
        self._running: asyncio.Task[Pass | None] | None = None

    async def run(self, run: Run) -> None:
        """See `VerifyRun`."""
        await self._tell(run)

    async def candidates(self, candidates: Candidates) -> None:
        """See `VerifyCandidates`."""
        await self._tell(candidates)

    async def grant(self, grant: Grant) -> None:
        """See `VerifyGrant`."""
        await self._tell(grant)

    def on_end_of_requests(self) -> None:
        """Announces that no message follows: `passes` ends when the credit is used up."""
        self._last = True
        self._news.set()

    async def passes(self) -> AsyncGenerator[Pass, None]:
        """Yields the result of each forward.

        Raises `BaseMismatch`, `TokenOutOfRange`, `PromptTooLong` or `ProtocolViolation` for an invalid message, and
        `SlotsExhausted`, `EngineFailure` and `InvalidGrammar`.
        """
        while True:
            if self._running is None:
                self._read()
                if self._credit == 0 or self._ended:
                    if self._last:
                        return
                    await self._news.wait()
                    continue
                waited_ns = await self._wait_for_candidates()
                if not self._credit:
                    continue
                result = await self._forward(waited_ns)
            else:
                result = await self._running
            # If there is nothing to wait for, the next forward starts before this result is sent.
            ready = self._credit and not self._ended and not self._waits and not self._inbox
            self._running = asyncio.create_task(self._forward(0)) if ready else None
            if self._running:  # its error is of no interest to a client that leaves before it asks for the result
                self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
            if result:
                yield result

    async def _tell(self, message: Run | Candidates | Grant) -> None:
        await self._inbox.put(message)
        self._news.set()

    def _read(self) -> None:
        """Applies the messages in the inbox. Only between forwards, because these read the ids."""
        while self._inbox:
            match self._inbox.popleft():
                case Run() as run:
                    self._begin(run)
                case Candidates() as candidates:
                    self._take(candidates)
                case Grant() as grant:
                    if not self._sequence.ids:
                        raise ProtocolViolation("a grant came before the first run: send the run first")
                    self._credit += grant.credit
                    self._patience_us = self._patience_us if grant.patience_us is None else grant.patience_us
        self._news.clear()

    def _begin(self, run: Run) -> None:
        held = len(self._sequence.ids)
        if run.base_token_count > held:
            raise BaseMismatch(run.base_token_count, held)
        length = run.base_token_count + len(run.token_ids)
        if length == 0:
            raise ProtocolViolation("a run needs at least one token: send the prompt's ids")
        if length >= self._model.context_length:
            raise PromptTooLong(length, self._model.context_length, self._model.name)
        check_ids(run.token_ids, self._model)
        self._sequence.replace(run.base_token_count, run.token_ids)
        self._pending.clear()
        self._skips_wait = self._ended = False
        self._prefilled &= run.base_token_count > 0
        self._credit, self._patience_us = run.credit, run.patience_us
        self._offset, self._empty_tokens = run.byte_offset, run.empty_token_count
        prompt_length = max(length - run.generated_token_count, 0)
        self._history = History(self._sequence.ids[:prompt_length], self._sequence.ids[prompt_length:])
        self._unread = self._sequence.ids[prompt_length:] if self._matcher else None

    def _take(self, candidates: Candidates) -> None:
        """Stores an offer that continues the sequence; ignores one that disagrees with it or leaves a gap."""
        produced = self._sequence.ids[candidates.base_token_count :]
        if candidates.base_token_count > len(self._sequence.ids):
            return
        if not candidates.token_ids:
            if not produced:  # an empty offer for an earlier pass is out of date
                self._pending.clear()
                self._skips_wait = True
            return
        size = self._model.vocabulary_size
        ids = list(takewhile(lambda id_: id_ < size, candidates.token_ids))
        if common_prefix_length(produced, ids) == min(len(produced), len(ids)):
            self._pending, self._offer_id, self._width = ids[len(produced) :], candidates.offer_id, candidates.width
            self._branches = [
                (index - len(produced), id_)
                for index, id_ in candidates.branches
                if len(produced) <= index < len(ids) and id_ < size
            ]

    def close(self) -> None:
        """Cancels a running forward and frees the slot."""
        if self._running:
            self._running.cancel()
        self._sequence.close()

    @property
    def _waits(self) -> bool:
        """Whether the next forward has no candidates and may wait for some."""
        if self._patience_us == 0 or self._pending or self._skips_wait or self._last or not self._credit:
            return False
        # The first forward reads the whole prompt, which leaves the draft enough time.
        return self._prefilled

    async def _wait_for_candidates(self) -> int:
        """Waits for candidates up to the patience and returns the nanoseconds waited."""
        started = self._clock()
        while self._waits:
            left_ns = started + self._patience_us * 1000 - self._clock()
            if left_ns <= 0:
                break
            try:
                async with asyncio.timeout(left_ns / 1e9):
                    await self._news.wait()
            except TimeoutError:
                break
            self._read()
        self._skips_wait = False
        return self._clock() - started

    async def _forward(self, waited_ns: int) -> Pass | None:
        sequence = self._sequence
        base = len(sequence.ids)
        room = min(self._width, self._credit - 1, self._model.context_length - base - 1)
        extra, offer_id = tuple(self._pending[: max(room, 0)]), self._offer_id
        if self._matcher and self._unread is not None:
            # After the loss of another target, this may be a long text.
            await asyncio.to_thread(self._matcher.restart, self._unread)
            self._unread = None
        if self._matcher:  # candidates that the grammar refuses cost no width
            accepted = self._matcher.accepted(extra)
            if accepted < len(extra):
                extra, self._pending = extra[:accepted], self._pending[:accepted]
        offset, empty, history = self._offset, self._empty_tokens, self._history.copy()
        branches = [one for one in self._branches if one[0] < len(extra) and not self._matcher]
        certain = 0
        if self._matcher and extra:
            certain, rest_may = self._matcher.certain(extra[:_MAX_CERTAIN])
            if not rest_may:  # another token must follow
                extra, self._pending = extra[:certain], self._pending[:certain]
            # Nothing but these may follow, so their logits are not needed, unless they are to be reported.
            certain = 0 if self._sampler.logprobs is not None else certain
        done = await sequence.forward(
            extra[certain:],
            lambda logits: self._verify(logits, extra, certain, branches, offset, empty, history),
            extra[:certain],
            branches,
        )
        if any(isinstance(message, Run) for message in self._inbox):
            return None  # the new run replaces this sequence
        verdict = done.value
        ids = tuple(choice.token_id for choice in verdict.choices)
        accepted = common_prefix_length(extra[: verdict.candidate_token_count], ids)
        sequence.accept(ids, accepted)
        self._prefilled = True
        self._history.extend(ids)
        if self._matcher:
            self._matcher.advance(ids[:-1] if verdict.ended else ids)
        agreed = common_prefix_length(self._pending, ids) == len(ids)
        self._pending = self._pending[len(ids) :] if agreed else []
        self._branches = [(index - len(ids), id_) for index, id_ in self._branches if index >= len(ids)]
        self._credit -= len(ids)
        for id_ in ids:
            data = self._model.vocabulary.token_bytes(id_)
            self._offset += len(data)
            self._empty_tokens = 0 if data else self._empty_tokens + 1
        finish_reason = None
        if verdict.ended:
            finish_reason = FinishReason.STOP
        elif len(sequence.ids) >= self._model.context_length:
            finish_reason = FinishReason.CONTEXT_FULL
        self._ended = finish_reason is not None
        return Pass(
            base_token_count=base,
            token_ids=ids,
            accepted_token_count=accepted,
            candidate_token_count=verdict.candidate_token_count,
            offer_id=offer_id if verdict.candidate_token_count else 0,
            logprobs=tuple(
                Logprob(choice.logprob, choice.top_logprobs) for choice in verdict.choices if choice.logprob is not None
            ),
            finish_reason=finish_reason,
            # A cache may also hold certain candidates, if another sequence had the same text.
            cached_token_count=min(done.cached_token_count, base),
            queue_ns=done.queue_ns,
            forward_ns=done.forward_ns,
            waited_ns=waited_ns,
            near_tie_count=sum(choice.near_tie for choice in verdict.choices),
            branch_count=done.branch_count,
            branch_accepted=verdict.branch_accepted,
        )

    def _verify(
        self,
        logits: Logits,
        extra: tuple[int, ...],
        certain: int,
        branches: Sequence[tuple[int, int]],
        offset: int,
        empty: int,
        history: History,
    ) -> _Verdict:
        """Chooses the target's own token at each position up to the first candidate that differs from it.

        If that token is a branch, it chooses one more. `logits`: shape [1 + candidates - certain + branches, ids]; the
        first `certain` candidates need none. The engine may have run only the first candidates of `extra`, and then no
        branches.
        """
        count = certain + len(logits) - 1
        if count > len(extra):
            count = len(extra)
            branched = dict(zip(branches, logits[-len(branches) :], strict=True))
        else:
            branched = {}
        choices: list[Choice] = []
        with self._matcher.excursion() if self._matcher else nullcontext():
            for position in range(count + 1):
                if position < certain:
                    choice = Choice(extra[position])
                else:
                    choice = self._choose(logits[position - certain], offset, empty, history)
                choices.append(choice)
                history.extend((choice.token_id,))
                if choice.token_id in self._sampler.ends:
                    return _Verdict(choices, count, ended=True)
                wrong = position == count or choice.token_id != extra[position]
                after = branched.get((position, choice.token_id))
                if wrong and after is None:
                    break
                if self._matcher:
                    self._matcher.advance((choice.token_id,))
                data = self._model.vocabulary.token_bytes(choice.token_id)
                offset += len(data)
                empty = 0 if data else empty + 1
                if wrong and after is not None:
                    choices.append(self._choose(after, offset, empty, history))
                    return _Verdict(choices, count, choices[-1].token_id in self._sampler.ends, branch_accepted=True)
        return _Verdict(choices, count, ended=False)

    def _choose(self, row: Logits, offset: int, empty: int, history: History) -> Choice:
        if self._matcher is None:
            return self._sampler.choose(row, offset, empty, history)
        return self._sampler.choose(row, offset, empty, history, self._matcher.allowed())
