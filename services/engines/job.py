"""A job of the scheduler: what a sequence waits for, and the results that it gets."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from bridge.sampling.sampler import Logits

T = TypeVar("T")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A result of a job, its time in the queue and in forwards.

    `token_count`: ids that its forwards ran, candidates among them. `cached_token_count`: ids that a sequence found in
    a cache when it got its slot. `extra_count`, `branch_count`: candidates and branches that were run.
    """

    value: T
    queue_ns: int
    forward_ns: int
    token_count: int
    cached_token_count: int
    extra_count: int
    branch_count: int = 0


@dataclass(eq=False)
class Job:
    """The ids of a sequence, followed by `extra_count` candidates.

    `branches`: pairs of the index of a candidate and an id in its place, which run if the engine can, the job is alone
    in the forward, and all candidates are in it.
    `agreed`: number of leading ids whose cache its slot holds. `finish` receives the logits of the sequence's last id,
    of the candidates and then of the branches that were run, which are valid only during the call. `next_id` receives
    what `finish` returned, and returns the id that the job runs next, or None if it is done. The model's thread calls
    both.
    """

    holder: object
    ids: tuple[int, ...]
    extra_count: int
    agreed: int
    finish: Callable[[Logits], Any]
    next_id: Callable[[Any], int | None]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[list[Timed[Any]]]"
    submitted_ns: int
    branches: tuple[tuple[int, int], ...] = ()
    forward_ns: int = 0
    token_count: int = 0
    cached_token_count: int = 0
    results: list[Timed[Any]] = field(default_factory=list)
    # The context of the request, which its log lines belong to.
    context: Context = field(default_factory=copy_context)

    @property
    def lacks(self) -> int:
        """The number of the sequence's ids that must still run: at least 1, the last id, for its logits."""
        return len(self.ids) - self.extra_count - self.agreed

    def go_on(self, id_: int) -> None:
        """Appends an id that runs next."""
        assert not self.extra_count
        self.ids += (id_,)
        self.submitted_ns, self.forward_ns, self.token_count = perf_counter_ns(), 0, 0

    def settle(self, result: "list[Timed[Any]] | Exception") -> None:
        """Gives the results to the sequence, unless it has some or has left. May be called in any thread."""

        def settle() -> None:
            if self.future.done():
                return
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)
