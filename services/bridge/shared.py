"""One result for all who ask at the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Calls `make` for the first who asks, and gives its result to all who ask until `seconds` after it."""

    def __init__(self, make: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._making: asyncio.Future[T] | None = None
        self._expires = 0.0

    async def get(self) -> T:
        """Returns the result. Raises what `make` raises."""
        if self._making is None or (self._making.done() and time.monotonic() >= self._expires):
            self._making = asyncio.ensure_future(self._make())
            self._making.add_done_callback(self._keep)
        # Who asked first may leave before the others.
        return await asyncio.shield(self._making)

    def _keep(self, made: "asyncio.Future[T]") -> None:
        self._expires = time.monotonic() + (0.0 if made.cancelled() or made.exception() else self._seconds)
