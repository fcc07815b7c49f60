"""A bounded queue of the messages that a session has not read yet, so that a peer cannot fill the memory."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# A bridge sends a few messages for each forward.
MAX_MESSAGES = 64
# Ids in all messages together. A message may have more if it is the only one.
MAX_IDS = 1 << 16


class Inbox(Generic[T]):
    """Holds messages in order, limited by their number and by the number of ids in their `token_ids`.

    `put` waits for room. Meanwhile the stream is not read, and HTTP/2 flow control makes the peer wait.
    """

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._id_count = 0
        self._taken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[T]:
        return iter(self._messages)

    async def put(self, message: T) -> None:
        """Waits for room and appends a message."""
        while not self._has_room(_id_count(message)):
            self._taken.clear()
            await self._taken.wait()
        self._messages.append(message)
        self._id_count += _id_count(message)

    def popleft(self) -> T:
        """Removes the first message and returns it."""
        message = self._messages.popleft()
        self._id_count -= _id_count(message)
        self._taken.set()
        return message

    def _has_room(self, id_count: int) -> bool:
        if not self._messages:
            return True
        return len(self._messages) < MAX_MESSAGES and self._id_count + id_count <= MAX_IDS


def _id_count(message: object) -> int:
    return len(getattr(message, "token_ids", ()))
