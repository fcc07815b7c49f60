"""What the bridge has told the target of one request, and the checks on what comes back.

Offers are numbered. A pass carries the number of the offer that it took its candidates from, so nobody has to infer
which one it was; a target that answers anything the contract rules out is an error of the target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from bridge.errors import TargetFault
from bridge.models import Model
from bridge.ports import Candidates, Grant, Pass, Run, Verifier
from bridge.sources.source import Offer, Outcome
from bridge.tape import Tape

# A new patience is worth a message if it is longer than the one before, or this many times shorter.
_PATIENCE_CHANGE = 4


@dataclass(frozen=True)
class _Sent:
    base: int
    offer: Offer


class TargetLink:
    """Sends offers to the target, and turns its passes into outcomes."""

    def __init__(
        self, target: Verifier, model: Model, tape: Tape, max_tokens: int, clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._target, self._model, self._tape, self._max_tokens, self._clock = target, model, tape, max_tokens, clock
        self._sent: dict[int, _Sent] = {}
        self._newest = 0
        self._held: tuple[int, ...] = ()
        self._held_width = 0
        self._patience_us = 0
        self._passed_ns = 0

    @property
    def remaining(self) -> int:
        """Tokens that the target may still produce."""
        return self._max_tokens - self._tape.generated_token_count

    async def start(self, patience_ns: float) -> None:
        """Lets the target begin."""
        self._patience_us = int(patience_ns // 1000)
        await self._target.run(Run(0, tuple(self._tape.ids), 0, 0, self._max_tokens, self._patience_us))

    async def offer(self, offer: Offer, width: int, *, awaited: bool) -> None:
        """Sends an offer for the end of the tape if it says anything new.

        Without candidates it says that the target need not wait, unless a source is `awaited`.
        """
        base, ids, held = len(self._tape.ids), offer.token_ids, self._held
        if ids:
            # Of more of the same the target is told only when it is about to run out.
            same = held[: len(ids)] == ids[: len(held)] and len(held) >= min(2 * width, len(ids))
            if same and self._held_width <= 2 * width <= 4 * self._held_width:
                return
        elif awaited or self._patience_us == 0:
            return
        self._newest += 1
        self._held, self._held_width = ids, width
        self._sent[self._newest] = _Sent(base, offer)
        await self._target.candidates(Candidates(self._newest, base, offer.token_ids, max(width, 1)))

    async def be_patient(self, patience_ns: float) -> None:
        """Tells the target how long it may wait, if that has changed enough."""
        patience_us = int(patience_ns // 1000)
        if patience_us > self._patience_us or patience_us * _PATIENCE_CHANGE < self._patience_us:
            self._patience_us = patience_us
            await self._target.grant(Grant(patience_us=patience_us))

    def commit(self, result: Pass) -> Outcome:
        """Checks a pass and commits it to the tape. Raises `TargetFault`."""
        tried = self._checked(result)
        now, before = self._clock(), self._passed_ns
        self._passed_ns = now
        # Passes come in order, and each was made with the newest offer that the target had: older ones are done with.
        for number in [number for number in self._sent if number < result.offer_id]:
            del self._sent[number]
        count = len(result.token_ids)
        self._held = self._held[count:] if self._held[:count] == result.token_ids else ()
        timed_out = not tried.token_ids and 0 < self._patience_us <= result.waited_ns // 1000
        return Outcome(result, tried, self._tape.commit(result.token_ids), now - before if before else 0, timed_out)

    def _checked(self, result: Pass) -> Offer:
        """The candidates that a pass took along."""
        count, accepted, ids = result.candidate_token_count, result.accepted_token_count, result.token_ids
        if result.base_token_count != len(self._tape.ids):
            raise TargetFault(f"a pass starts at token {result.base_token_count}, not at {len(self._tape.ids)}")
        if not 1 <= len(ids) <= self.remaining:
            raise TargetFault(f"a pass has {len(ids)} tokens, with a credit of {self.remaining}")
        if not all(self._model.has(id_) for id_ in ids):
            raise TargetFault(f"a pass has an id that {self._model.name} cannot choose")
        sent = self._sent.get(result.offer_id)
        if sent is None:
            if result.offer_id or count or accepted:
                raise TargetFault(f"a pass takes candidates of offer {result.offer_id}, which was not made")
            tried = Offer()
        else:
            start = result.base_token_count - sent.base
            tried = sent.offer.part(start, start + count)
            if len(tried.token_ids) != count or accepted > min(count, len(ids)):
                raise TargetFault(f"a pass takes {count} candidates of offer {result.offer_id}, which has fewer")
        if tried.token_ids[:accepted] != tuple(ids[:accepted]):
            raise TargetFault("a pass accepts other candidates than were offered")
        return tried
