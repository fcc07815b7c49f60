"""Tracks which sequence holds which slot, and which ids each slot's cache holds.

A slot that is free keeps its cache until a sequence needs the slot. A new sequence starts with the longest prefix of
its ids that any slot holds: in that slot if it is free, else with a copy of it.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from bridge.text.common_prefix import common_prefix_length

# Minimum number of tokens that a copy must gain: fewer cost almost nothing in the sequence's first forward.
MIN_COPIED_TOKENS = 32
# A reused slot may lose this many cached tokens after the common beginning: one forward or so computes them again.
_MAX_LOST_TOKENS = 512


@dataclass
class Slot:
    """A slot whose cache holds the first `length` of `ids`. `holder`: the sequence that has it, None if it is free."""

    index: int
    ids: Sequence[int] = ()
    length: int = 0
    holder: object = None
    used_ns: int = 0

    def common(self, ids: Sequence[int]) -> int:
        """Returns the number of leading `ids` that the slot's cache holds."""
        return min(common_prefix_length(self.ids, ids), self.length)


@dataclass(frozen=True)
class SlotChoice:
    """A free slot for a new sequence, which will hold its first `length` ids, copied from `source` if that is set."""

    slot: Slot
    length: int
    source: Slot | None = None


class Slots:
    """All slots of an engine. Only one thread may use it."""

    def __init__(self, slot_count: int) -> None:
        self._slots = [Slot(index) for index in range(slot_count)]
        self._of: dict[object, Slot] = {}

    @property
    def held_token_count(self) -> int:
        """The number of tokens in the caches of slots that sequences hold. Any thread may read it."""
        return sum(slot.length for slot in self._slots if slot.holder is not None)

    def of(self, holder: object) -> Slot | None:
        """Returns the slot of a sequence, or None."""
        return self._of.get(holder)

    def place(self, ids: Sequence[int]) -> SlotChoice | None:
        """Returns the best place for a new sequence, or None if no slot is free."""
        free = [slot for slot in self._slots if slot.holder is None]
        if not free:
            return None
        common = {slot.index: slot.common(ids) for slot in self._slots}
        source = max(self._slots, key=lambda slot: common[slot.index])
        # Among equals, the least recently used one.
        best = max(free, key=lambda slot: (common[slot.index], -slot.used_ns))
        lost = best.length - common[best.index]
        alike = common[best.index] >= min(MIN_COPIED_TOKENS, len(ids) // 2)
        goes_on = best.length > 0 and (lost <= common[best.index] or (alike and lost <= _MAX_LOST_TOKENS))
        if goes_on and common[source.index] < common[best.index] + MIN_COPIED_TOKENS:
            return SlotChoice(best, common[best.index])
        # Otherwise it is a new text, possibly with a common beginning: use an empty or the least recently used slot.
        copied = source if common[source.index] >= MIN_COPIED_TOKENS else None
        target = min(free, key=lambda slot: (slot is copied, slot.length > 0, slot.used_ns))
        if common[source.index] < common[target.index] + MIN_COPIED_TOKENS:
            return SlotChoice(target, common[target.index])
        return SlotChoice(target, common[source.index], source)

    def take(self, slot: Slot, holder: object, ids: Sequence[int], length: int) -> None:
        """Gives a free slot to a sequence, and records that its cache holds the first `length` of `ids`."""
        assert slot.holder is None
        slot.holder, self._of[holder] = holder, slot
        self.hold(slot, ids, length)

    def evict(self, busy: Container[object], before_ns: int) -> object:
        """Frees the least recently used slot that was last used before `before_ns` and whose holder is not in `busy`.

        Returns its former holder, or None if there is no such slot.
        """
        idle = [slot for slot in self._slots if slot.used_ns < before_ns and slot.holder not in busy]
        if not idle:
            return None
        holder = min(idle, key=lambda slot: slot.used_ns).holder
        self.release(holder)
        return holder

    def hold(self, slot: Slot, ids: Sequence[int], length: int) -> None:
        """Records that a slot's cache holds the first `length` of `ids`."""
        slot.ids, slot.length, slot.used_ns = ids, length, perf_counter_ns()

    def release(self, holder: object) -> None:
        """Frees a sequence's slot. The cache remains for later sequences."""
        if slot := self._of.pop(holder, None):
            slot.holder = None
