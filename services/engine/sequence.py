"""One sequence in one slot: knows what the cache holds of it, and computes only what is new."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bridge.errors import TokenOutOfRange
from bridge.models import Model
from bridge.sampling import Logits
from services.engine.engine import Row
from services.engine.scheduler import Scheduler, Timed
from services.engine.slots import SlotPool

T = TypeVar("T")

# Long enough to use the device well, short enough that others get their turn in between.
_CHUNK = 512


@dataclass(frozen=True)
class Host:
    """What a process has of a model: the thread that runs it and its slots."""

    scheduler: Scheduler
    slots: SlotPool


def check_ids(token_ids: Sequence[int], model: Model) -> None:
    """Raises `TokenOutOfRange` for an id that the model has no row for."""
    for id_ in token_ids:
        if id_ >= model.vocabulary_size:
            raise TokenOutOfRange(id_, model.vocabulary_size, model.name)


@dataclass
class CachedSequence:
    """Ids of a sequence, `keep`/`append` them freely; `forward` brings the cache after them.

    >>> sequence.replace(0, prompt_ids)
    >>> result = await sequence.forward((), finish=choose)

    Takes a slot with the first ids and gives it back, cache and all, with `close`.
    """

    host: Host
    ids: list[int] = field(default_factory=list)
    # Found in the slot when it was taken; whoever reports it sets it to 0.
    cached_token_count: int = 0
    _slot: int | None = None
    # Ids whose keys and values the slot holds, as far as they agree with `ids`.
    _cached: int = 0

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keeps the first `keep` ids and appends others."""
        assert 0 <= keep <= len(self.ids)
        del self.ids[keep:]
        self.ids += token_ids
        self._cached = min(self._cached, keep)
        if self._slot is None and self.ids:
            self._slot, self._cached = self.host.slots.acquire(self.ids)
            self.cached_token_count = min(self._cached, len(self.ids) - 1)

    async def forward(self, extra: tuple[int, ...], finish: Callable[[Logits], T]) -> Timed[T]:
        """Runs what the cache lacks, then `extra`; `finish` gets logits for the last id and each extra one.

        The ids must not change before this returns. `extra` is not kept among the ids.
        """
        assert self._slot is not None, "a sequence has ids before its first forward"
        # The last id is always run, because its logits are what is asked for.
        keep = min(self._cached, len(self.ids) - 1)
        queued = spent = 0
        while len(self.ids) - keep > _CHUNK:
            chunk = tuple(self.ids[keep : keep + _CHUNK])
            part = await self.host.scheduler.forward(Row(self._slot, keep, chunk, len(chunk)), lambda _: None)
            queued, spent = queued + part.queue_ns, spent + part.forward_ns
            keep += _CHUNK
            self._cached = keep
        token_ids = (*self.ids[keep:], *extra)
        row = Row(self._slot, keep, token_ids, len(token_ids) - len(extra) - 1)
        self._cached = keep
        result = await self.host.scheduler.forward(row, finish)
        self._cached = len(self.ids)
        return Timed(result.value, queued + result.queue_ns, spent + result.forward_ns)

    def accept(self, token_ids: Sequence[int], cached: int) -> None:
        """Appends ids, the first `cached` of which the last forward took along as extra ones."""
        assert self._cached == len(self.ids)
        self.ids += token_ids
        self._cached += cached

    def close(self) -> None:
        """Gives the slot back."""
        if self._slot is not None:
            self.host.slots.release(self._slot, self.ids[: self._cached])
            self._slot = None
