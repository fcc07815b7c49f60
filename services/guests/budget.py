"""Limits what the sequences of engines may hold in memory."""

from collections import OrderedDict
from dataclasses import dataclass

from bridge.guest import Guest

# Upper bounds of the memory of a sequence: for itself, and for each token.
_SEQUENCE_BYTES, _TOKEN_BYTES = 32 << 10, 256


@dataclass(frozen=True)
class GuestLimits:
    """What all guests together may hold. `idle_seconds`: a sequence that is not named for this time ends."""

    sequence_count: int = 4096
    memory_bytes: int = 1 << 30
    draft_count: int = 8
    idle_seconds: float = 600.0


class Budget:
    """The sequences of all guests, the least recently named first. Those that exceed a limit are ended."""

    def __init__(self, limits: GuestLimits) -> None:
        self._limits = limits
        self._held: OrderedDict[tuple[Guest, int], int] = OrderedDict()
        self._bytes = 0

    def hold(self, guest: Guest, id_: int, token_count: int) -> None:
        """Counts a sequence with its present tokens, and ends others if there are too many."""
        self.drop(guest, id_)
        size = _SEQUENCE_BYTES + _TOKEN_BYTES * token_count
        self._held[guest, id_] = size
        self._bytes += size
        while len(self._held) > self._limits.sequence_count or self._bytes > self._limits.memory_bytes:
            other, other_id = next(iter(self._held))
            other.end(other_id)

    def drop(self, guest: Guest, id_: int) -> None:
        """Stops counting a sequence."""
        self._bytes -= self._held.pop((guest, id_), 0)

    @property
    def count(self) -> int:
        """Returns the number of sequences."""
        return len(self._held)
