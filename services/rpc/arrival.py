"""Receives the message of a call that sends one: gRPC itself would receive it whole before anything checks the call."""

import asyncio
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation
from services.rpc.status import abort

# A client on a slow link needs this time for the largest message.
_MESSAGE_SECONDS = 60.0
# Calls that need no key have small messages, which arrive with their headers. If more than the first number of messages
# are arriving, those that take longer than the first time are given up, and the others after the second one.
_MAX_ARRIVING, _BURST_SECONDS, _OPEN_SECONDS = 16, 1.0, 5.0


async def receive(context: "aio.ServicerContext[Any, Any]") -> Any:
    """Returns the message of an admitted call. Aborts the call if it does not arrive in time."""
    reading = _begin_reading(context)
    await asyncio.wait([reading], timeout=_MESSAGE_SECONDS)
    return await _result(reading, context)


class OpenArrivals:
    """Receives the messages of calls that need no key and have no other limit."""

    def __init__(self) -> None:
        self._count = 0

    async def receive(self, context: "aio.ServicerContext[Any, Any]") -> Any:
        """Returns the message of a call. Aborts the call if it does not arrive in time."""
        self._count += 1
        try:
            reading = _begin_reading(context)
            await asyncio.wait([reading], timeout=_BURST_SECONDS)
            if self._count <= _MAX_ARRIVING:
                await asyncio.wait([reading], timeout=_OPEN_SECONDS - _BURST_SECONDS)
        finally:
            self._count -= 1
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
