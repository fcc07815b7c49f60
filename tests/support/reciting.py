"""A guest without services: an engine that recites a text, step by step, and a draft that knows it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.ports import Proposal, Sync
from bridge.sources.source import Draft
from tests.support import tiny
from tests.support.alone import QueuedDrafter

MODEL = tiny.model("sentencepiece", context_length=4096)
TEXT = ("The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore! " * 8).encode()
IDS = list(MODEL.vocabulary.pieces(TEXT).ids)
MS = 1_000_000
FRESH = "Grüße aus Köln: naïve café, señor, 1234 of them, for $56.78!".encode()


class Reciting(QueuedDrafter):
    """A draft that proposes the continuation of a text, in one message for each sync."""

    def __init__(self, text: bytes, hangs: bool = False) -> None:
        super().__init__()
        self._ids, self._hangs = list(tiny.vocabulary("byte_level").pieces(text).ids), hangs
        self._held: list[int] = []
        # The text of its context after each sync, and how many tokens it may propose then.
        self.read: list[bytes] = []
        self.credits: list[int] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    async def sync(self, sync: Sync) -> None:
        del self._held[sync.keep_token_count :]
        self._held += sync.token_ids
        self.read.append(tiny.vocabulary("byte_level").spell(self._held))
        self.credits.append(sync.credit)
        if not self._hangs:
            ids = tuple(self._ids[len(self._held) : len(self._held) + sync.credit])
            self._held += ids
            self.queue.put_nowait(Proposal(sync.epoch, ids, (0.9,) * len(ids), done=len(ids) < sync.credit))


def guest_of(
    drafter: QueuedDrafter | None = None, costs: BatchCosts | None = None, late: bool = False, **options: Any
) -> Guest:
    """Returns a guest whose sequences have this draft, those of a `late` one only after their first step."""
    shared = GuestOpening(MODEL, TargetEstimates())

    async def open_(ids: Sequence[int], generated: int) -> GuestSequence:
        return GuestSequence(shared, ids, generated)

    def find_draft(held: Held, is_new: bool) -> Draft | None:
        model = tiny.model("byte_level")
        available = drafter and not (late and is_new)
        return Draft(model, drafter, shared.estimates.draft(model.name)) if available else None

    return Guest(MODEL, open_, costs or BatchCosts(), find_draft=find_draft, **options)


async def stepped(
    guest: Guest, number: int, *sequences: SequenceUpdate, deadline_ns: int = 2 * MS, engine_ns: int = 20 * MS
) -> Answer:
    answer = await guest.step(StepUpdate(number, sequences, deadline_ns=deadline_ns, engine_ns=engine_ns))
    await guest.settle()
    await asyncio.sleep(0)
    return answer


async def joined(guest: Guest, id_: int) -> None:
    """Returns when a sequence's draft, if it has one, has its prompt."""
    sequence = guest.held[id_].sequence
    if sequence and (opening := sequence._sources.seeking):
        await asyncio.wait([opening])


async def recited(
    guest: Guest, ids: list[int], start: int, deadline_ns: int, engine_ns: int = 20 * MS
) -> tuple[int, dict[str, int]]:
    """Returns the number of forwards that recite `ids` from `start` on, and the accepted candidates by source."""
    forwards, known, end, accepted = 0, 0, start, {"draft": 0, "suffix": 0}
    tried = (0, 0)
    while end < len(ids):
        forwards += 1
        update = SequenceUpdate(1, known, tuple(ids[known:end]), 0, None, *tried)
        answer = await stepped(guest, forwards, update, deadline_ns=deadline_ns, engine_ns=engine_ns)
        await joined(guest, 1)
        known, tried = end, (0, 0)
        for one in answer.proposed:
            assert one.base == end
            tried = forwards, one.width
            for id_, source in zip(one.offer.token_ids[: one.width], one.offer.sources, strict=False):
                if end < len(ids) and ids[end] == id_:
                    end += 1
                    accepted[source] += 1
                else:
                    break
        end = min(end + 1, len(ids))
    return forwards, accepted


async def opened(guest: Guest, id_: int) -> GuestSequence:
    """Returns a sequence when it is open."""
    opening = guest.held[id_].opening
    assert opening
    await opening
    sequence = guest.held[id_].sequence
    assert sequence
    return sequence
