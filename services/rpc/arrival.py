"""Receives the message of a call that sends one: gRPC itself would receive it whole before anything checks the call."""

import asyncio
from dataclasses import dataclass
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation
from services.rpc.status import abort


@dataclass
class Arrivals:
    """Receives the messages of calls. If more than `many` are arriving, each has `hurried_seconds`, else `seconds`."""

    many: int
    hurried_seconds: float
    seconds: float
    count: int = 0

    async def receive(self, context: "aio.ServicerContext[Any, Any]") -> Any:
        """Returns the message of a call. Aborts the call if it does not arrive in time."""
        self.count += 1
        try:
            reading = _begin_reading(context)
            await asyncio.wait([reading], timeout=self.hurried_seconds)
            if self.count <= self.many:
                await asyncio.wait([reading], timeout=self.seconds - self.hurried_seconds)
        finally:
            self.count -= 1
        return await _result(reading, context)


def _begin_reading(context: "aio.ServicerContext[Any, Any]") -> "asyncio.Task[Any]":
    """Returns a task that only the end of the call ends: gRPC never frees the memory of a read that is cancelled."""
    reading: asyncio.Task[Any] = asyncio.ensure_future(context.read())
    # After the call has ended nobody awaits the task, and its error is of no interest.
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())
    return reading


async def _result(reading: "asyncio.Task[Any]", context: "aio.ServicerContext[Any, Any]") -> Any:
    try:
        if not reading.done():
            raise ProtocolViolation("the message of this call did not arrive in time: send it faster")
        if (message := reading.result()) is aio.EOF:
            raise ProtocolViolation("the call has no message: send one")
    except Exception as error:
        await abort(context, error)
    return message
