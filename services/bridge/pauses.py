"""Remembers which drafts have failed for which targets, so that requests leave them alone for a while."""

from collections.abc import Callable
from time import perf_counter_ns

from cachetools import LRUCache

from services.bridge.endpoint import Endpoint, key_of

# The pause of a draft that failed, doubled by each further failure.
_PAUSE_NS, _MAX_PAUSE_NS = 1_000_000_000, 60_000_000_000
# Pairs whose failures are remembered.
_MAX_PAIRS = 1024


class Pauses:
    """Keeps drafts that failed at the end of the choice for a while, by target: longer after each failure in a row."""

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock = clock
        self._failures: LRUCache[tuple[str, str], tuple[int, int]] = LRUCache(_MAX_PAIRS)

    def failed(self, target: Endpoint, draft: Endpoint) -> None:
        """Begins a pause."""
        key = key_of(target), key_of(draft)
        count = self._failures.get(key, (0, 0))[0]
        pause_ns = min(_PAUSE_NS << min(count, 16), _MAX_PAUSE_NS)
        self._failures[key] = count + 1, self._clock() + pause_ns

    def worked(self, target: Endpoint, draft: Endpoint) -> None:
        """Forgets the failures of a draft."""
        self._failures.pop((key_of(target), key_of(draft)), None)

    def holds(self, target: Endpoint, draft: Endpoint) -> bool:
        """Returns whether a draft pauses now."""
        return self._failures.get((key_of(target), key_of(draft)), (0, 0))[1] > self._clock()
