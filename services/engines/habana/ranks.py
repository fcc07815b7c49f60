"""Keeps the processes of a sharded model together: the first one sends each message before it executes it."""

import logging
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.engines.habana.launch import rank_count
from services.engines.habana.shapes import MESSAGE_SIZE, Kind, Message, stopping

_log = logging.getLogger(__name__)


class Ranks:
    """The channel between the processes. Its messages go from host to host, so that no device waits for them."""

    def __init__(self) -> None:
        # Requests may be a long time apart.
        forever = timedelta(days=3650)
        self._group: Any = dist.new_group(backend="gloo", timeout=forever) if rank_count() > 1 else None

    def send(self, message: Message) -> None:
        """Sends a message from the first process to all others, if there are any."""
        if self._group is not None:
            dist.broadcast(torch.from_numpy(message), src=0, group=self._group)

    def follow(self, execute: Callable[[Message], object]) -> int:
        """Executes the first process's messages. Returns this process's exit code: 0 if the first one stopped.

        A signal to all processes, such as Ctrl-C, leaves it to the first one to let running requests end.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            received = torch.empty(MESSAGE_SIZE, dtype=torch.int64)
            try:
                dist.broadcast(received, src=0, group=self._group)
            except RuntimeError as error:
                _log.error("the first process of this model has ended (%s): start all of them again", error)
                return 1
            message: Message = received.numpy()
            if message[0] == Kind.STOP:
                return 0
            execute(message)

    def stop_with(self, owner: object) -> None:
        """Makes the other processes stop when `owner` is no longer used, or when this process ends."""
        weakref.finalize(owner, self.send, stopping())
