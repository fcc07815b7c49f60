"""Which sequence has which slot. A slot that was given back keeps its cache until somebody needs it."""

from collections import OrderedDict
from collections.abc import Sequence

from bridge.errors import SlotsExhausted
from bridge.translation import common_prefix_length


class SlotPool:
    """Slots 0 to `count` - 1. A new sequence gets the free one whose cache begins most like it."""

    def __init__(self, count: int) -> None:
        self._count = count
        # Free slots and the ids in their caches, least recently used first.
        self._free: OrderedDict[int, tuple[int, ...]] = OrderedDict((slot, ()) for slot in range(count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def acquire(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """A slot, and how many of `token_ids` it holds from the start. Raises `SlotsExhausted`."""
        if not self._free:
            raise SlotsExhausted(self._count)
        prefix = {slot: common_prefix_length(cached, token_ids) for slot, cached in self._free.items()}
        # max takes the first of equals, and that is the least recently used.
        best = max(prefix, key=prefix.__getitem__)
        del self._free[best]
        return best, prefix[best]

    def release(self, slot: int, cached_ids: Sequence[int]) -> None:
        """Gives a slot back, with the ids that its cache holds."""
        assert slot not in self._free
        self._free[slot] = tuple(cached_ids)
