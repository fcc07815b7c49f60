"""Streams of requests and responses: an error in either direction ends both, whenever it comes."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from bridge.errors import ProtocolViolation
from draftbridge.v1.draft_pb2 import DraftGrant, DraftOpen, DraftRequest
from services.rpc.streams import exchange, first_message


async def _refuse(request: int) -> None:
    raise ProtocolViolation(f"request {request} is not allowed")


@pytest.mark.parametrize("while_sending", [True, False])
async def test_a_bad_request_ends_a_stream_that_has_nothing_to_say(while_sending: bool) -> None:
    """The request comes while a response is sent, or while the next one is waited for."""
    sent = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        await sent.wait()
        yield 1

    async def responses() -> AsyncIterator[str]:
        yield "first"
        await asyncio.Event().wait()

    stream = exchange(requests(), _refuse, lambda: None, responses())
    async with aclosing(stream), asyncio.timeout(60):  # type: ignore[type-var]
        assert await anext(stream) == "first"
        if while_sending:
            sent.set()
            for _ in range(5):
                await asyncio.sleep(0)
        else:
            asyncio.get_running_loop().call_later(0.05, sent.set)
        with pytest.raises(ProtocolViolation):
            await anext(stream)
        task = asyncio.current_task()
        assert task and not task.cancelling(), "the call goes on, to report the error"


async def test_a_call_that_is_cancelled_ends_as_cancelled() -> None:
    async def requests() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    async def responses() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    async def call() -> None:
        async for _ in exchange(requests(), _refuse, lambda: None, responses()):
            pass

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_both_directions_have_ended_when_a_bad_request_is_reported() -> None:
    """Otherwise a session would be closed while a forward of it runs."""
    ended = []

    async def requests() -> AsyncIterator[int]:
        yield 1

    async def responses() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(ProtocolViolation):
        async for _ in exchange(requests(), _refuse, lambda: None, responses()):
            pass
    assert ended


@pytest.mark.parametrize("first", [None, DraftRequest(), DraftRequest(grant=DraftGrant(epoch=1, credit=1))])
async def test_a_stream_begins_with_an_open_message(first: DraftRequest | None) -> None:
    async def requests(*messages: DraftRequest | None) -> AsyncIterator[DraftRequest]:
        for message in messages:
            if message is not None:
                yield message

    with pytest.raises(ProtocolViolation, match="begin with an open message"):
        await first_message(requests(first))
    opening = DraftRequest(open=DraftOpen(seed=5))
    assert await first_message(requests(opening, first)) == opening


async def test_responses_go_on_after_the_last_request() -> None:
    async def requests() -> AsyncIterator[int]:
        yield 1

    async def responses() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    got, ended = [], []

    async def take(request: int) -> None:
        got.append(request)

    stream = exchange(requests(), take, lambda: ended.append(True), responses())
    assert [number async for number in stream] == [0, 1, 2]
    assert (got, ended) == ([1], [True])


async def test_no_read_of_requests_is_cancelled() -> None:
    """gRPC never frees the memory of a read that is cancelled. The error of one that nobody awaits is not logged."""
    ended, outcome, logged = asyncio.Event(), [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))

    async def requests() -> AsyncIterator[int]:
        try:
            await ended.wait()
            outcome.append("ended")
            raise ConnectionError("the call was aborted")
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise
        yield 1

    async def responses() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)

    assert [one async for one in exchange(requests(), _refuse, lambda: None, responses())] == [1]
    ended.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert outcome == ["ended"] and not logged
