"""A sequence of token ids with a cache: runs only the ids that its slot does not hold yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bridge.errors import TokenOutOfRange
from bridge.sampling.sampler import Logits
from bridge.text.models import Model
from services.engines.job import Timed
from services.engines.scheduler import Scheduler

T = TypeVar("T")


def check_ids(token_ids: Sequence[int], model: Model) -> None:
    """Raises `TokenOutOfRange` for an id beyond the model's vocabulary."""
    for id_ in token_ids:
        if id_ >= model.vocabulary_size:
            raise TokenOutOfRange(id_, model.vocabulary_size, model.name)


@dataclass(eq=False)
class CachedSequence:
    """A sequence of ids. `replace` and `accept` change the ids, `forward` extends the cache to them.

    >>> sequence.replace(0, prompt_ids)
    >>> result = await sequence.forward((), finish=choose)

    Takes a slot at the first forward. `close` frees the slot, whose cache remains as a prefix cache.
    """

    scheduler: Scheduler
    ids: list[int] = field(default_factory=list)
    # Number of leading ids whose keys and values the slot holds.
    _cached: int = 0
    # Number of extra ids in the last forward.
    _taken: int = 0

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keeps the first `keep` ids, drops the rest and appends `token_ids`."""
        assert 0 <= keep <= len(self.ids)
        del self.ids[keep:]
        self.ids += token_ids
        self._cached = min(self._cached, keep)

    async def forward(
        self,
        extra: Sequence[int],
        finish: Callable[[Logits], T],
        certain: Sequence[int] = (),
        branches: Sequence[tuple[int, int]] = (),
    ) -> Timed[T]:
        """Runs the ids that the cache lacks, then `certain`, and as many `extra` ids as fit into the forward.

        `finish` receives the logits of the last id or certain id, of each extra id, and of each of the `branches` of
        these that was run; see `Job`. The ids must not change before this returns. It appends neither `certain` nor
        `extra`. Raises what `Scheduler.run` raises.
        """
        # The last id always runs, because its logits are needed.
        agreed = min(self._cached, len(self.ids) - 1)
        # If this is cancelled, the slot's content after these ids is unknown.
        self._cached = agreed
        (result,) = await self.scheduler.run(self, [*self.ids, *certain], extra, agreed, finish, branches=branches)
        self._cached, self._taken = len(self.ids), len(certain) + result.extra_count
        return result

    async def run_on(self, finish: Callable[[Logits], T], next_id: Callable[[T], int | None]) -> list[Timed[T]]:
        """Runs the ids that the cache lacks, and then each id that `next_id` returns for the last result.

        The model's thread calls both functions, without a switch to the caller's in between. It does not append the
        ids: append all that were run with `accept`. Raises what `Scheduler.run` raises.
        """
        agreed = min(self._cached, len(self.ids) - 1)
        self._cached = agreed
        results = await self.scheduler.run(self, self.ids, (), agreed, finish, next_id)
        self._cached, self._taken = len(self.ids), len(results) - 1
        return results

    def accept(self, token_ids: Sequence[int], cached: int) -> None:
        """Appends ids. The first `cached` of them were extra ids of the last forward, so they are in the cache."""
        assert self._cached == len(self.ids)
        assert cached <= self._taken
        self.ids += token_ids
        self._cached += cached

    def close(self) -> None:
        """Frees the slot."""
        self.scheduler.release(self)
