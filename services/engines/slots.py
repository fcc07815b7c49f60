"""Which sequence has which slot, and what each slot's cache holds.

A slot that was given back keeps its cache until somebody needs it. A new sequence begins with the longest prefix of
its ids that any slot holds: in the slot itself if it is free, as a copy if another sequence has it.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from bridge.text.common_prefix import common_prefix_length

# A copy is made for no less than this many tokens: a forward takes them along nearly for nothing.
LEAST_COPIED = 32
# So much of a cache may be lost where its beginning is used again: a forward or so reads it anew.
_LIGHT = 512


@dataclass
class Slot:
    """Holds the first `length` of `ids`. `holder`: whose it is; None if it is free."""

    index: int
    ids: Sequence[int] = ()
    length: int = 0
    holder: object = None
    used_ns: int = 0

    def common(self, ids: Sequence[int]) -> int:
        """How many of `ids` it holds from the start."""
        return min(common_prefix_length(self.ids, ids), self.length)


@dataclass(frozen=True)
class Place:
    """A free slot for a new sequence, and how many of its ids it will hold; by a copy from `source` if there is one."""

    slot: Slot
    length: int
    source: Slot | None = None


class Slots:
    """Slots 0 to `count` - 1; for one thread."""

    def __init__(self, slot_count: int) -> None:
        self._slots = [Slot(index) for index in range(slot_count)]

    def of(self, holder: object) -> Slot | None:
        """The slot that somebody has."""
        return next((slot for slot in self._slots if slot.holder is holder), None)

    def place(self, ids: Sequence[int]) -> Place | None:
        """Where a sequence would best begin; None if no slot is free."""
        free = [slot for slot in self._slots if slot.holder is None]
        if not free:
            return None
        common = {slot.index: slot.common(ids) for slot in self._slots}
        source = max(self._slots, key=lambda slot: common[slot.index])
        # Of equals the least recently used one.
        best = max(free, key=lambda slot: (common[slot.index], -slot.used_ns))
        lost = best.length - common[best.index]
        alike = common[best.index] >= min(LEAST_COPIED, len(ids) // 2)
        goes_on = best.length > 0 and (lost <= common[best.index] or (alike and lost <= _LIGHT))
        if goes_on and common[source.index] < common[best.index] + LEAST_COPIED:
            return Place(best, common[best.index])
        # A text of its own, be its beginning a common one, goes where the least is lost.
        copied = source if common[source.index] >= LEAST_COPIED else None
        target = min(free, key=lambda slot: (slot is copied, slot.length > 0, slot.used_ns))
        if common[source.index] < common[target.index] + LEAST_COPIED:
            return Place(target, common[target.index])
        return Place(target, common[source.index], source)

    def take(self, slot: Slot, holder: object, ids: Sequence[int], length: int) -> None:
        """Gives a free slot to somebody."""
        assert slot.holder is None
        slot.holder = holder
        self.hold(slot, ids, length)

    def evict(self, busy: Container[object], before_ns: int) -> object:
        """Frees the slot that was used least recently, if that was before then and its holder is not busy.

        Returns who had it, None if there is no such slot.
        """
        idle = [slot for slot in self._slots if slot.used_ns < before_ns and slot.holder not in busy]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: slot.used_ns)
        holder, slot.holder = slot.holder, None
        return holder

    def hold(self, slot: Slot, ids: Sequence[int], length: int) -> None:
        """Takes note of what a slot's cache holds."""
        slot.ids, slot.length, slot.used_ns = ids, length, perf_counter_ns()

    def release(self, holder: object) -> None:
        """Gives a slot back, cache and all."""
        if slot := self.of(holder):
            slot.holder = None
