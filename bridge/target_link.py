"""Sends offers to the target of one request, and checks the passes that it returns.

Offers are numbered, and a pass carries the number of the offer that its candidates came from. A pass that violates the
contract raises `TargetFault`.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from math import inf
from time import perf_counter_ns

from bridge.errors import TargetFault
from bridge.ports import MAX_MEASURED_NS, Candidates, FinishReason, Grant, Pass, Run, Verifier
from bridge.sources.source import Offer, Outcome
from bridge.tape import Tape
from bridge.text.models import Model

# A new patience is sent if it is longer than the present one, or shorter by more than this factor.
_PATIENCE_CHANGE = 4
# An offer with the candidates that the target holds already is sent again if the target has candidates left for fewer
# passes than this, or if the width has changed by more than this factor.
_HELD_PASSES, _WIDTH_CHANGE = 2, 2
# The tokens that a target may be ahead of the client. It gets more when half of them are committed, so that only a
# client that reads slowly makes its target wait.
CREDIT_TOKENS = 512
# Rounding may make the logarithm of a probability of 1 positive.
_MAX_LOGPROB = 1e-3


class TargetLink:
    """Sends offers and credit to the target, and turns its passes into outcomes, up to `max_tokens` tokens."""

    def __init__(
        self,
        target: Verifier,
        model: Model,
        tape: Tape,
        max_tokens: int,
        clock: Callable[[], int] = perf_counter_ns,
        logprobs: int | None = None,
    ) -> None:
        self._target, self._model, self._tape, self._max_tokens, self._clock = target, model, tape, max_tokens, clock
        # The number of alternatives that was requested for each token; None for no log probabilities.
        self._logprobs = logprobs
        # The credit that the target has got so far.
        self._granted = min(max_tokens, CREDIT_TOKENS)
        # Offers by number, each with the index in the sequence that it continues.
        self._offers: dict[int, tuple[int, Offer]] = {}
        self._last_number = self._held_width = self._patience_us = 0
        # The candidates of the last offer that the target still holds.
        self._held: tuple[int, ...] = ()

    @property
    def remaining(self) -> int:
        """Returns how many tokens the target may still produce."""
        return self._max_tokens - self._tape.generated_token_count

    @property
    def candidate_room(self) -> int:
        """Returns how many candidates are still useful: the last token of every pass is the target's own."""
        return max(self.remaining - 1, 0)

    async def start(self, patience_ns: float) -> None:
        self._patience_us = int(patience_ns // 1000)
        await self._target.run(Run(0, tuple(self._tape.ids), 0, 0, self._granted, self._patience_us))

    async def passes(self) -> AsyncIterator[tuple[Pass, int | None]]:
        """Yields the target's passes, each with its `elapsed_ns`. Raises `TargetFault` if they exceed the credit.

        `commit` would count tokens and time too late, because passes are not committed while a client reads slowly. A
        target without credit waits for the client, so the time of its next pass is not known.
        """
        count, before = 0, None
        async for result in self._target.passes():
            count, now = count + max(len(result.token_ids), 1), self._clock()
            if count > self._granted:
                raise TargetFault("it sent more tokens than its credit allows")
            yield result, None if before is None else now - before
            before = now if count < self._granted else None

    async def extend(self) -> None:
        """Grants more credit once half of it is committed."""
        wanted = min(self._max_tokens, self._tape.generated_token_count + CREDIT_TOKENS)
        if wanted - self._granted >= min(CREDIT_TOKENS // 2, self._max_tokens - self._granted) > 0:
            added, self._granted = wanted - self._granted, wanted
            await self._target.grant(Grant(credit=added))

    async def offer(self, offer: Offer, width: int, patience_ns: float, *, awaited: bool) -> None:
        """Sends a patience that is longer or much shorter, and an offer for the tape's end unless the target holds it.

        An empty offer makes the target stop waiting. It is not sent while candidates of a source are `awaited`.
        """
        # A shorter patience is sent after the offer, because a target that stops waiting earlier would miss the offer.
        patience_us = int(max(patience_ns, 0.0) // 1000)
        if patience_us > self._patience_us:
            await self._set_patience(patience_us)
        await self._send(offer, width, awaited=awaited)
        if patience_us * _PATIENCE_CHANGE < self._patience_us:
            await self._set_patience(patience_us)

    async def _set_patience(self, patience_us: int) -> None:
        self._patience_us = patience_us
        await self._target.grant(Grant(patience_us=patience_us))

    async def _send(self, offer: Offer, width: int, *, awaited: bool) -> None:
        base, held, ids = len(self._tape.ids), self._held, offer.token_ids[: self.candidate_room]
        if ids:
            same = held == ids[: len(held)] and len(held) >= min(_HELD_PASSES * width, len(ids))
            if same and self._held_width <= _WIDTH_CHANGE * width and width <= _WIDTH_CHANGE * self._held_width:
                return
        elif awaited or self._patience_us == 0:
            return
        self._held, self._held_width, number = ids, width, 0
        # A target leaves out branches that it cannot produce, and its count of them would differ from that here.
        branches = tuple(one for one in offer.branches if one.index < len(ids) and self._model.has(one.token_id))
        if ids:
            self._last_number = number = self._last_number + 1
            self._offers[number] = base, replace(offer, branches=branches)
        pairs = tuple((one.index, one.token_id) for one in branches)
        await self._target.candidates(Candidates(number, base, ids, max(width, 1), pairs))

    def commit(self, result: Pass, elapsed_ns: int | None = None) -> Outcome:
        """Checks a pass and commits it to the tape. Raises `TargetFault`."""
        tried = self._checked(result)
        count = len(result.token_ids)
        # Passes come in order, each with the newest offer that the target had. So older offers, and those that end
        # before the text does, can no longer be used.
        end = len(self._tape.ids) + count
        for number, (base, offer) in tuple(self._offers.items()):
            if number < result.offer_id or base + len(offer.token_ids) <= end:
                del self._offers[number]
        self._held = self._held[count:] if self._held[:count] == result.token_ids else ()
        timed_out = not tried.token_ids and 0 < self._patience_us <= result.waited_ns // 1000
        return Outcome(result, tried, self._tape.commit(result.token_ids), elapsed_ns, timed_out)

    def _checked(self, result: Pass) -> Offer:
        """Returns the candidates that a pass took along. Raises `TargetFault`."""
        count, accepted, ids = result.candidate_token_count, result.accepted_token_count, result.token_ids
        if result.base_token_count != len(self._tape.ids):
            raise TargetFault(f"a pass starts at token {result.base_token_count}, not at {len(self._tape.ids)}")
        if not 1 <= len(ids) <= self.remaining:
            raise TargetFault(f"a pass has {len(ids)} tokens, and the credit is {self.remaining}")
        if not self._model.has_all([*ids, *(id_ for one in result.logprobs for id_, _ in one.top)]):
            raise TargetFault(f"a pass has a token id that {self._model.name} cannot produce")
        if len(result.logprobs) != (0 if self._logprobs is None else len(ids)):
            raise TargetFault(f"a pass has {len(result.logprobs)} log probabilities for {len(ids)} tokens")
        if (most := max((len(one.top) for one in result.logprobs), default=0)) > (self._logprobs or 0):
            raise TargetFault(f"a pass has {most} alternatives to a token, and {self._logprobs} were requested")
        values = [value for one in result.logprobs for value in (one.logprob, *(value for _, value in one.top))]
        if not all(-inf < value <= _MAX_LOGPROB for value in values):  # also False for NaN
            raise TargetFault("a pass has a log probability that is none")
        if result.cached_token_count > result.base_token_count:
            raise TargetFault(f"a pass found {result.cached_token_count} tokens in a cache, more than there are")
        if result.finish_reason is FinishReason.LENGTH and len(ids) < self.remaining:
            raise TargetFault("a pass has finish reason LENGTH before the credit is used up")
        if max(result.forward_ns, result.waited_ns, result.queue_ns) > MAX_MEASURED_NS:
            raise TargetFault("a pass reports a time of more than an hour")
        if result.near_tie_count > len(ids):
            raise TargetFault(f"a pass reports {result.near_tie_count} near ties among {len(ids)} tokens")
        if result.offer_id not in self._offers and (result.offer_id or count or accepted):
            raise TargetFault(f"a pass has candidates of offer {result.offer_id}, which is unknown or outdated")
        base, offer = self._offers.get(result.offer_id, (0, Offer()))
        start = result.base_token_count - base
        tried = offer.part(start, start + count)
        if len(tried.token_ids) != count or accepted > min(count, len(ids)):
            raise TargetFault(f"a pass has {accepted} accepted of {count} candidates, more than were offered")
        if tried.token_ids[:accepted] != tuple(ids[:accepted]):
            raise TargetFault("the accepted tokens of a pass are not the candidates that were offered")
        if result.branch_count not in (0, len(tried.branches)):
            raise TargetFault(f"a pass has {result.branch_count} of {len(tried.branches)} branches")
        verified = [(one.index, one.token_id) for one in tried.branches[: result.branch_count]]
        if result.branch_accepted and (accepted == len(ids) or (accepted, ids[accepted]) not in verified):
            raise TargetFault("the accepted branch of a pass was not offered")
        return tried
