"""The loop: two runners, reconciled at byte offsets.

Draft and target each run under a credit. The bridge stands between them: what the draft says becomes
candidates of the target; where the target's bytes part from the draft's, the draft is sent back to the
last agreeing byte. Losing the draft costs speed, never text: the target's tokens are its own in any case.

After Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and
Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025); with shared noise in place of rejection sampling, so that verifying is comparing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

from bridge.errors import DraftBridgeError, Unreachable
from bridge.lead import Lead
from bridge.models import Model
from bridge.policy import Policy
from bridge.ports import Candidates, Drafter, Grant, Pass, Proposal, Run, Verifier
from bridge.suffix import MOST_DATA, Match, SuffixDrafter
from bridge.tape import Tape
from bridge.translation import candidates, common_prefix_length

_log = logging.getLogger(__name__)

# Candidates from the text that are sent behind the draft's, from a match of so many bytes or more: shorter ones are too
# often wrong about how the draft's last word goes on. A token is taken to have so many bytes at most.
_BEHIND, _SURE, _TOKEN_BYTES = 16, 8, 8
# Offers that are remembered until it is known which of them a pass took.
_OFFERS = 8


@dataclass
class Statistics:
    """What a generation did. Counts in the target's tokens unless said otherwise; times in nanoseconds."""

    target_pass_count: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_suffix_draft_tokens: int = 0
    num_suffix_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    near_ties: int = 0
    accepted_byte_count: int = 0
    proposed_token_count: int = 0
    verify_ns: int = 0
    draft_ns: int = 0
    translate_ns: int = 0
    waited_ns: int = 0
    network_ns: int = 0
    cached_token_count: int = 0
    note: str = ""
    choice: str = ""


@dataclass(frozen=True)
class Guess:
    """Candidates, of which a forward is to take `width`: first the draft's, with its probability of each in
    `confidences`; behind them, from a match of so many bytes, the text's.
    """

    ids: list[int] = field(default_factory=list)
    width: int = 0
    match_length: int = 0
    confidences: list[float] = field(default_factory=list)

    def from_text(self, count: int) -> int:
        """How many of the first `count` are the text's."""
        return max(count - len(self.confidences), 0) if self.match_length else 0


@dataclass(frozen=True)
class Lost:
    """The draft is gone."""

    error: Exception


class Speculation:
    """One generation's run of the loop over its tape."""

    def __init__(
        self,
        model: Model,
        tape: Tape,
        target: Verifier,
        draft: Drafter | None,
        lead: Lead | None,
        policy: Policy,
        end: int | None = None,
        suffix: SuffixDrafter | None = None,
    ) -> None:
        """`end`: what the target says where the draft ends the text; its end of text if None.

        `from_text`: how many of the candidates that the last pass accepted, the last ones, were the text's.
        """
        self._model, self._tape, self._policy = model, tape, policy
        self._end = next(iter(model.special_ids.eos), None) if end is None else end
        self._target, self._draft, self._lead = target, draft, lead
        self._suffix = suffix
        self._width = policy.width
        self._offered: list[int] = []
        self._offers: list[tuple[int, Guess]] = []
        self.from_text = 0
        self._granted = (0, 0)
        self._passed_ns = self._heard_ns = self._synced_ns = self._between_ns = 0
        self.statistics = Statistics()

    @property
    def alone(self) -> bool:
        """Whether the target goes on, or went on, without a draft."""
        return self._draft is None

    async def run(self, max_tokens: int) -> AsyncGenerator[Pass, None]:
        """Yields the target's passes, each already committed to the tape, until it ends or has `max_tokens`."""
        tape = self._tape
        patience_us, width = self._granted = self._limits()
        await self._target.run(Run(0, tuple(tape.ids), 0, 0, max_tokens, patience_us, width))
        await self._try(self._go_on(max_tokens))
        async with _merged(self._target, self._draft) as events:
            async for event in events:
                if isinstance(event, Proposal):
                    await self._try(self._offer(event))
                elif isinstance(event, Lost):
                    await self._go_on_alone(event.error)
                else:
                    tape.commit(event.token_ids)
                    if self._suffix:
                        self._suffix.append(self._model.vocabulary.spell(event.token_ids))
                    self._count(event)
                    remaining = max_tokens - tape.generated_token_count
                    ended = event.finish_reason is not None or remaining == 0
                    if not ended:  # both go on while the text is sent
                        await self._try(self._go_on(remaining))
                    yield event
                    if ended:
                        return

    async def _try(self, step: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong on the draft's side costs the draft, never the request."""
        try:
            await step
        except Exception as error:  # told and, if it is not one of ours, logged
            await self._go_on_alone(error)

    async def _go_on(self, remaining: int) -> None:
        """Sends the draft on, and to the target what there is."""
        policy = self._policy
        if self._draft is None and self._suffix is None:
            return
        # The target adds a token of its own to every pass: with one to go there is nothing to guess.
        credit = min(policy.num_assistant_tokens, remaining - 1)
        if credit == 0:
            await self._grant(0, self._width)
            return
        begun = await self._send_draft_on(credit) if policy.drafting else False
        if not (begun and policy.lockstep):
            await self._send_candidates()

    async def _send_draft_on(self, credit: int) -> bool:
        """Lets the draft run on from where it is, or sends it back to the last agreeing byte: a new epoch, True."""
        if self._draft is None or self._lead is None:
            return False
        lead = self._lead
        policy, started = self._policy, perf_counter_ns()
        # What is said before it answers a new epoch is on its way already.
        silent_ns = started - self._heard_ns - (policy.round_trip_ns if self._synced_ns else 0)
        if policy.lockstep or not lead.runs_on(self._tape, lambda count: policy.catches_up(count, silent_ns)):
            sync = lead.sync(self._tape, credit)
            self.statistics.translate_ns += perf_counter_ns() - started
            if sync is not None:
                self._synced_ns = self._heard_ns = perf_counter_ns()
                await self._draft.sync(sync)
            return sync is not None
        if added := lead.grant(self._tape, credit):
            await self._draft.grant(lead.epoch, added)
        return False

    def _limits(self) -> tuple[int, int]:
        """The target's patience and width; it waits for nobody if there is nobody."""
        return self._policy.patience_us if self._draft or self._suffix else 0, self._width

    async def _grant(self, patience_us: int, width: int) -> None:
        if self._granted != (patience_us, width):
            self._granted = patience_us, width
            await self._target.grant(Grant(patience_us=patience_us, width=width))

    async def _offer(self, proposal: Proposal) -> None:
        """Hands a proposal to the target: in lockstep when the draft's turn is over, else at once."""
        self.statistics.draft_ns += proposal.forward_ns
        self.statistics.proposed_token_count += len(proposal.token_ids)
        lead = self._lead
        if lead is None or not lead.hear(proposal):
            return
        self._heard_ns = perf_counter_ns()
        busy_ns = proposal.queue_ns + proposal.forward_ns
        round_trip_ns = self._heard_ns - self._synced_ns - busy_ns if self._synced_ns else None
        self._synced_ns = 0
        self._policy.learn_draft(proposal, round_trip_ns)
        if lead.turn_over or not self._policy.lockstep:
            await self._send_candidates()

    async def _send_candidates(self) -> None:
        started = perf_counter_ns()
        guess = self._guess()
        self.statistics.translate_ns += perf_counter_ns() - started
        policy, ids = self._policy, guess.ids
        if ids:  # as long as there are none, no message is worth a new width
            self._width = guess.width
        await self._grant(*self._limits())
        # All of them, also those that it has already: they show the target what the rest continues.
        agree = ids[: len(self._offered)] == self._offered
        # Of the text's it is told more only when it is about to run out of them.
        few = bool(guess.confidences) or len(self._offered) < 2 * guess.width
        news = not agree or (few and len(ids) > len(self._offered))
        # None at all lets a target that waits go on, unless a draft is about to say something.
        lead = self._lead if policy.drafting else None
        awaited = lead is not None and not (lead.turn_over or lead.ahead(self._tape))
        if news or policy.lockstep or (not ids and self._granted[0] and not awaited):
            await self._target.candidates(Candidates(len(self._tape.ids), tuple(ids)))
            self._offered = ids
            self._offers.append((len(self._tape.ids), guess))

    def _guess(self) -> Guess:
        """How the text may go on: as it went on before, or as the draft says and behind that as it went on before."""
        policy, drafted = self._policy, self._drafted()
        if not policy.automatic:
            return replace(drafted, ids=drafted.ids[: policy.width], width=policy.width)
        match = self._suffix.match() if self._suffix else None
        worth = policy.suffix_worth(match.length if match else 0)
        worth_of_draft = policy.draft_worth(
            drafted.confidences, drafted.match_length, drafted.from_text(len(drafted.ids))
        )
        if match and worth.count and worth.speed > worth_of_draft.speed:
            # For more than one forward: while they agree, the target need not wait for any.
            count = worth.forwards * worth.count
            return Guess(self._spelled(b"", match, count)[:count], worth.count, match.length)
        count = worth_of_draft.count
        # All of the draft's, which is asked to be ahead; of the text's, those that are worth it now.
        ids = drafted.ids[: max(count, len(drafted.confidences))]
        return replace(drafted, ids=ids, width=count) if count else Guess()

    def _drafted(self) -> Guess:
        lead, vocabulary = self._lead, self._model.vocabulary
        if lead is None or not self._policy.drafting:
            return Guess()
        ahead = lead.ahead(self._tape)
        match = self._suffix.match(ahead) if self._suffix and ahead and not lead.ended else None
        if match and match.length < _SURE:
            match = None
        # In one, so that a word that the draft has only begun is gone on with.
        ids = self._spelled(ahead, match, _BEHIND) if match else candidates(vocabulary, ahead)
        confidences = lead.confidences(len(vocabulary.token_bytes(id_)) for id_ in ids)
        if lead.ended and self._end is not None:
            ids, confidences = [*ids, self._end], [*confidences, 1.0]
        return Guess(ids, match_length=match.length if match else 0, confidences=confidences)

    def _spelled(self, ahead: bytes, match: Match, count: int) -> list[int]:
        """Bytes and, behind them, about so many tokens of what followed a match."""
        limit = _TOKEN_BYTES * (count + 1)
        ids = candidates(self._model.vocabulary, ahead + match.data[:limit])
        # The last one is left out where the data was cut, perhaps in the middle of it.
        return ids[:-1] if len(match.data) >= min(limit, MOST_DATA) else ids

    def _verified(self, event: Pass) -> Guess:
        """The offer that a pass took its candidates from: one that is under way may still have those of before."""
        found = Guess()
        ids, count, accepted = event.token_ids, event.candidate_token_count, event.accepted_token_count
        held = []
        for base, guess in self._offers:
            start = event.base_token_count - base
            tried = guess.ids[start : start + count]
            if (
                start >= 0
                and count
                and not found.ids
                and len(tried) == count
                and common_prefix_length(tried, ids) == accepted
            ):
                confidences = guess.confidences[start : start + count]
                length = guess.match_length if len(confidences) < count else 0
                found = Guess(tried, guess.width, length, confidences)
            if tuple(guess.ids[start : start + len(ids)]) == tuple(ids) and len(guess.ids) > start + len(ids):
                held.append((base, guess))
        # Those that agree with the text may still be what the target has.
        self._offers = held[-_OFFERS:]
        return found

    async def _go_on_alone(self, error: Exception) -> None:
        if self._draft is None:
            self._suffix = None
            return  # it was dropped before; its first fault is the one to tell
        if not isinstance(error, DraftBridgeError):
            _log.error("the draft failed; going on without it", exc_info=error)
        reason = error.reason if isinstance(error, DraftBridgeError) else "INTERNAL"
        self.statistics.note = f"the draft was lost ({reason}); the target went on alone"
        self._draft = self._lead = None
        self._policy.alone()
        await self._grant(*self._limits())

    def _count(self, event: Pass) -> None:
        statistics = self.statistics
        accepted = event.token_ids[: event.accepted_token_count]
        agrees = common_prefix_length(self._offered, event.token_ids) == len(event.token_ids)
        self._offered = self._offered[len(event.token_ids) :] if agrees else []
        now, lockstep = perf_counter_ns(), self._policy.lockstep
        elapsed_ns = now - self._passed_ns if self._passed_ns else 0
        guess = self._verified(event)
        self._policy.learn(event, guess.match_length, elapsed_ns, guess.confidences)
        self._passed_ns = now
        if lockstep and not self._policy.lockstep:
            statistics.note = "the draft did not answer in time; the target no longer waits for it"
        if statistics.target_pass_count == 0:
            statistics.cached_token_count = event.cached_token_count
        statistics.target_pass_count += 1
        statistics.num_drafts += event.candidate_token_count > 0
        statistics.num_draft_tokens += event.candidate_token_count
        statistics.num_accepted_tokens += len(accepted)
        self.from_text = guess.from_text(len(accepted))
        statistics.num_suffix_draft_tokens += guess.from_text(event.candidate_token_count)
        statistics.num_suffix_accepted_tokens += self.from_text
        per_position = statistics.num_accepted_tokens_per_position
        per_position += [0] * (len(accepted) - len(per_position))
        for position in range(len(accepted)):
            per_position[position] += 1
        statistics.accepted_byte_count += len(self._model.vocabulary.spell(accepted))
        statistics.near_ties += event.near_tie_count
        statistics.verify_ns += event.forward_ns
        statistics.waited_ns += event.waited_ns
        # Passes may come in bunches, so that only the sum says something.
        self._between_ns += elapsed_ns - event.forward_ns - event.waited_ns if elapsed_ns else 0
        statistics.network_ns = max(self._between_ns, 0)


@asynccontextmanager
async def _merged(target: Verifier, draft: Drafter | None) -> AsyncIterator[AsyncIterator[Pass | Proposal | Lost]]:
    """What both say, as it comes. A failure of the target is raised, one of the draft is an event."""
    queue: asyncio.Queue[Pass | Proposal | Lost | Exception] = asyncio.Queue()

    async def listen_to_target() -> None:
        try:
            async for event in target.passes():
                queue.put_nowait(event)
            queue.put_nowait(Unreachable("the target", "its stream ended in the middle of a generation"))
        except Exception as error:  # raised again by whoever takes it from the queue
            queue.put_nowait(error)

    async def listen_to_draft(draft: Drafter) -> None:
        try:
            async for event in draft.proposals():
                queue.put_nowait(event)
            queue.put_nowait(Lost(Unreachable("the draft", "its stream ended in the middle of a generation")))
        except Exception as error:  # told to the loop, which logs what it does not know
            queue.put_nowait(Lost(error))

    async def events() -> AsyncIterator[Pass | Proposal | Lost]:
        while True:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            yield event

    tasks = [asyncio.create_task(listen_to_target())]
    if draft is not None:
        tasks.append(asyncio.create_task(listen_to_draft(draft)))
    try:
        yield events()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
