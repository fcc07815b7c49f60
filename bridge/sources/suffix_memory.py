"""Keeps outputs within a memory budget, so that later requests of the same tenant can be drafted from them."""

from cachetools import LRUCache

from bridge.sources.suffix_index import MIN_MATCH_BYTES, Match, SuffixMatcher, max_memory_bytes

_MAX_TENANT_BITS = 20  # at most 2**20 bytes of output are kept for each tenant


class SuffixMemory:
    """Keeps outputs by tenant, in at most `byte_limit` bytes of memory altogether.

    The least recently used tenant is forgotten first. Not thread-safe: all requests must use it from one thread.
    """

    def __init__(self, byte_limit: int) -> None:
        self.byte_limit = byte_limit
        self._tenants: LRUCache[str, SuffixMatcher] = LRUCache(byte_limit, lambda held: max_memory_bytes(held.length))
        sizes = (1 << bits for bits in range(_MAX_TENANT_BITS, 0, -1))
        self._max_text_bytes = next((size for size in sizes if max_memory_bytes(size) <= byte_limit), 0)

    @property
    def byte_count(self) -> int:
        """Returns an upper bound of the memory held."""
        return int(self._tenants.currsize)

    @property
    def tenant_count(self) -> int:
        """Returns the number of tenants with outputs."""
        return len(self._tenants)

    def match(self, tenant: str, end: bytes) -> Match | None:
        """Returns the longest match of a text's end in the tenant's outputs."""
        held = self._tenants.get(tenant)
        found = held.match_of(end) if held else None
        return found if found and found.data else None

    def remember(self, tenant: str, output: bytes | bytearray) -> None:
        """Keeps an output, or the end of a long one, unless it is too short for a match."""
        output = output[-self._max_text_bytes :]
        if not MIN_MATCH_BYTES < len(output) <= self._max_text_bytes:
            return
        held = self._tenants.pop(tenant, None) or SuffixMatcher(limit=self._max_text_bytes)
        # Other tenants are forgotten first, so that the budget is never exceeded.
        needed = max_memory_bytes(min(held.length + len(output), self._max_text_bytes))
        while self._tenants.currsize + needed > self.byte_limit:
            self._tenants.popitem()
        held.start_text()
        held.append(output)
        self._tenants[tenant] = held
