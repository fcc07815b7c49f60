"""What tenants were told before, as drafts of what they are told next: within a budget, and each for itself."""

from cachetools import LRUCache

from bridge.suffix import LEAST, Match, SuffixDrafter, most_bytes

# Bytes of outputs that are kept of a tenant at most: two to this.
_MOST_BITS = 20


class SuffixMemory:
    """Outputs by tenant, in at most `limit_bytes` of memory for all of them together.

    Who neither asked nor was told anything for the longest time is forgotten first. For one thread: requests that run
    at the same time take turns.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._tenants: LRUCache[str, SuffixDrafter] = LRUCache(limit_bytes, lambda held: most_bytes(held.length))
        sizes = (1 << bits for bits in range(_MOST_BITS, 0, -1))
        self._most_text = next((size for size in sizes if most_bytes(size) <= limit_bytes), 0)

    @property
    def byte_count(self) -> int:
        """Memory held, or more."""
        return int(self._tenants.currsize)

    @property
    def byte_limit(self) -> int:
        """Memory that may be held."""
        return int(self._tenants.maxsize)

    @property
    def tenant_count(self) -> int:
        """Tenants of whom something is kept."""
        return len(self._tenants)

    def drafter(self, text: bytes, tenant: str) -> SuffixDrafter:
        """One that knows a text, and the tenant's earlier outputs."""
        return _TenantDrafter(self, tenant, text)

    def match(self, tenant: str, end: bytes) -> Match | None:
        """The longest match of a text's end in the tenant's outputs."""
        held = self._tenants.get(tenant)
        found = held.match_of(end) if held else None
        return found if found and found.data else None

    def remember(self, tenant: str, output: bytes | bytearray) -> None:
        """Keeps an output, of a long one the end; one that is too short to be found is not kept."""
        output = output[-self._most_text :]
        if not LEAST < len(output) <= self._most_text:
            return
        held = self._tenants.pop(tenant, None) or SuffixDrafter(limit=self._most_text)
        # Room is made before it is taken, so that the budget holds at any time.
        needed = most_bytes(min(held.length + len(output), self._most_text))
        while self._tenants.currsize + needed > self._tenants.maxsize:
            self._tenants.popitem()
        held.part()
        held.append(output)
        self._tenants[tenant] = held


class _TenantDrafter(SuffixDrafter):
    """Knows a text; where that has no match, or a shorter one, it looks at what its tenant was told before."""

    def __init__(self, memory: SuffixMemory, tenant: str, text: bytes) -> None:
        super().__init__(text)
        self._memory, self._tenant = memory, tenant

    def match(self, ahead: bytes = b"") -> Match | None:
        """See `SuffixDrafter.match`."""
        own, earlier = super().match(ahead), self._memory.match(self._tenant, self.end + ahead)
        return earlier if earlier and (own is None or earlier.length > own.length) else own


def suffix_drafter(text: bytes, memory: SuffixMemory | None, tenant: str) -> SuffixDrafter:
    """One that knows a text and, if there is a memory and a tenant, what that was told before."""
    return memory.drafter(text, tenant) if memory and tenant else SuffixDrafter(text)
