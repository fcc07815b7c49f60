"""One sequence: knows what its slot holds of it, and asks for what is new."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bridge.errors import TokenOutOfRange
from bridge.sampling.sampler import Logits
from bridge.text.models import Model
from services.engines.scheduler import Scheduler, Timed

T = TypeVar("T")


def check_ids(token_ids: Sequence[int], model: Model) -> None:
    """Raises `TokenOutOfRange` for an id that the model has no row for."""
    for id_ in token_ids:
        if id_ >= model.vocabulary_size:
            raise TokenOutOfRange(id_, model.vocabulary_size, model.name)


@dataclass(eq=False)
class CachedSequence:
    """Ids of a sequence, `replace`/`accept` them freely; `forward` brings the cache after them.

    >>> sequence.replace(0, prompt_ids)
    >>> result = await sequence.forward((), finish=choose)

    Takes a slot with the first forward and gives it back, cache and all, with `close`.
    """

    scheduler: Scheduler
    ids: list[int] = field(default_factory=list)
    # Ids whose keys and values the slot holds, as far as they agree with `ids`.
    _cached: int = 0
    # Extra ids that the last forward took along.
    _taken: int = 0

    @property
    def uncached_token_count(self) -> int:
        """Ids that the next forward runs; at least 1."""
        return len(self.ids) - min(self._cached, len(self.ids) - 1)

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keeps the first `keep` ids and appends others."""
        assert 0 <= keep <= len(self.ids)
        del self.ids[keep:]
        self.ids += token_ids
        self._cached = min(self._cached, keep)

    async def forward(self, extra: Sequence[int], finish: Callable[[Logits], T]) -> Timed[T]:
        """Runs what the cache lacks, and of `extra` what there is room for.

        `finish` gets logits for the last id and each extra one taken along. The ids must not change before this
        returns. `extra` is not kept among the ids.
        """
        # The last id is always run, because its logits are what is asked for.
        agreed = min(self._cached, len(self.ids) - 1)
        # Should this be cancelled, nobody knows what the slot holds behind these.
        self._cached = agreed
        result = await self.scheduler.run(self, self.ids, extra, agreed, finish)
        self._cached, self._taken = len(self.ids), result.extra_count
        return result

    def accept(self, token_ids: Sequence[int], cached: int) -> None:
        """Appends ids, the first `cached` of which the last forward took along as extra ones."""
        assert self._cached == len(self.ids)
        assert cached <= self._taken
        self.ids += token_ids
        self._cached += cached

    def close(self) -> None:
        """Gives the slot back."""
        self.scheduler.release(self)
