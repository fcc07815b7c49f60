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
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from bridge.errors import DraftBridgeError, Unreachable
from bridge.lead import Lead
from bridge.models import Model
from bridge.policy import Policy
from bridge.ports import Candidates, Drafter, Grant, Pass, Proposal, Run, Verifier
from bridge.tape import Tape
from bridge.translation import candidates, common_prefix_length

_log = logging.getLogger(__name__)


@dataclass
class Statistics:
    """What a generation did. Counts in the target's tokens unless said otherwise; times in nanoseconds."""

    target_pass_count: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    near_ties: int = 0
    accepted_byte_count: int = 0
    proposed_token_count: int = 0
    verify_ns: int = 0
    draft_ns: int = 0
    translate_ns: int = 0
    waited_ns: int = 0
    cached_token_count: int = 0
    note: str = ""


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
    ) -> None:
        """`end`: what the target says where the draft ends the text; its end of text if None."""
        self._model, self._tape, self._policy = model, tape, policy
        self._end = next(iter(model.special_ids.eos), None) if end is None else end
        self._target, self._draft, self._lead = target, draft, lead
        self._offered: list[int] = []
        self._patience_us = 0
        self.statistics = Statistics()

    @property
    def alone(self) -> bool:
        """Whether the target goes on, or went on, without a draft."""
        return self._draft is None

    async def run(self, max_tokens: int) -> AsyncGenerator[Pass, None]:
        """Yields the target's passes, each already committed to the tape, until it ends or has `max_tokens`."""
        tape, policy = self._tape, self._policy
        self._patience_us = policy.patience_us if self._draft else 0
        await self._target.run(Run(0, tuple(tape.ids), 0, 0, max_tokens, self._patience_us, policy.width))
        await self._try(self._send_draft_on(max_tokens))
        async with _merged(self._target, self._draft) as events:
            async for event in events:
                if isinstance(event, Proposal):
                    await self._try(self._offer(event))
                elif isinstance(event, Lost):
                    await self._go_on_alone(event.error)
                else:
                    tape.commit(event.token_ids)
                    self._count(event)
                    remaining = max_tokens - tape.generated_token_count
                    ended = event.finish_reason is not None or remaining == 0
                    if not ended:  # both go on while the text is sent
                        await self._try(self._send_draft_on(remaining))
                    yield event
                    if ended:
                        return

    async def _try(self, step: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong on the draft's side costs the draft, never the request."""
        try:
            await step
        except Exception as error:  # told and, if it is not one of ours, logged
            await self._go_on_alone(error)

    async def _send_draft_on(self, remaining: int) -> None:
        """Lets the draft run on from where it is, or sends it back to the last agreeing byte."""
        if self._draft is None or self._lead is None:
            return
        lead, policy = self._lead, self._policy
        # The target adds a token of its own to every pass: with one to go there is nothing to guess.
        credit = min(policy.num_assistant_tokens, remaining - 1)
        if credit == 0:
            await self._target.grant(Grant(patience_us=0))
            return
        if policy.patience_us != self._patience_us:
            self._patience_us = policy.patience_us
            self.statistics.note = "the draft did not answer in time; the target no longer waits for it"
            await self._target.grant(Grant(patience_us=self._patience_us))
        if policy.lockstep or not lead.runs_on(self._tape):
            started = perf_counter_ns()
            sync = lead.sync(self._tape, credit)
            self.statistics.translate_ns += perf_counter_ns() - started
            if sync is None:
                await self._send_candidates()
            else:
                await self._draft.sync(sync)
        else:
            if added := lead.grant(self._tape, credit):
                await self._draft.grant(lead.epoch, added)
            await self._send_candidates()

    async def _offer(self, proposal: Proposal) -> None:
        """Hands a proposal to the target: in lockstep when the draft's turn is over, else at once."""
        self.statistics.draft_ns += proposal.forward_ns
        self.statistics.proposed_token_count += len(proposal.token_ids)
        lead = self._lead
        if lead is not None and lead.hear(proposal) and (lead.turn_over or not self._policy.lockstep):
            await self._send_candidates()

    async def _send_candidates(self) -> None:
        assert self._lead is not None
        started = perf_counter_ns()
        ids = candidates(self._model.vocabulary, self._lead.ahead(self._tape))
        if self._lead.ended and self._end is not None:
            ids.append(self._end)
        ids = ids[: self._policy.width]
        self.statistics.translate_ns += perf_counter_ns() - started
        # All of them, also those that it has already: they show the target what the rest continues.
        if ids[: len(self._offered)] != self._offered or len(ids) > len(self._offered) or self._policy.lockstep:
            await self._target.candidates(Candidates(len(self._tape.ids), tuple(ids)))
            self._offered = ids

    async def _go_on_alone(self, error: Exception) -> None:
        if self._draft is None:
            return  # it was dropped before; its first fault is the one to tell
        if not isinstance(error, DraftBridgeError):
            _log.error("the draft failed; going on without it", exc_info=error)
        reason = error.reason if isinstance(error, DraftBridgeError) else "INTERNAL"
        self.statistics.note = f"the draft was lost ({reason}); the target went on alone"
        self._draft = self._lead = None
        await self._target.grant(Grant(patience_us=0))

    def _count(self, event: Pass) -> None:
        statistics = self.statistics
        accepted = event.token_ids[: event.accepted_token_count]
        agrees = common_prefix_length(self._offered, event.token_ids) == len(event.token_ids)
        self._offered = self._offered[len(event.token_ids) :] if agrees else []
        self._policy.learn(event.candidate_token_count, event.accepted_token_count, event.waited_ns // 1000)
        if statistics.target_pass_count == 0:
            statistics.cached_token_count = event.cached_token_count
        statistics.target_pass_count += 1
        statistics.num_drafts += event.candidate_token_count > 0
        statistics.num_draft_tokens += event.candidate_token_count
        statistics.num_accepted_tokens += len(accepted)
        per_position = statistics.num_accepted_tokens_per_position
        per_position += [0] * (len(accepted) - len(per_position))
        for position in range(len(accepted)):
            per_position[position] += 1
        statistics.accepted_byte_count += len(self._model.vocabulary.spell(accepted))
        statistics.near_ties += event.near_tie_count
        statistics.verify_ns += event.forward_ns
        statistics.waited_ns += event.waited_ns


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
