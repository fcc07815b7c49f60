"""Tests the heads of requests to the HTTP door, and those of its answers to clients of HTTP/1.0."""

import asyncio
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.cli.processes import Fleet
from tests.services.test_http_connections import SHORT, answered, request
from tests.support.doors import door

MAX_HEAD_BYTES = 64 << 10


def sized_head(byte_count: int) -> bytes:
    """Returns the head of a request with this size."""
    begin, end = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: ", b"\r\n\r\n"
    return begin + b"y" * (byte_count - len(begin + end)) + end


@pytest.mark.parametrize(("byte_count", "status"), [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431), (90_000, 431)])
async def test_a_head_that_arrives_at_once_has_its_limit_too(tiny_fleet: Fleet, byte_count: int, status: int) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(sized_head(byte_count))
        assert (await answered(reader))[0] == status
        writer.close()


async def test_a_large_head_that_arrives_with_an_earlier_request_ends_the_connection(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(sized_head(100) + sized_head(90_000))
        with suppress(ConnectionError):  # no error may be taken for the answer to the first
            assert await asyncio.wait_for(reader.read(1), 60) == b""
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_a_client_of_http_1_0_has_no_chunks(tiny_fleet: Fleet, stream: bool) -> None:
    body: dict[str, Any] = SHORT | {"stream": stream}
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, rest = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
        if stream:
            *events, done, end = rest.split(b"\n\n")
            assert events and all(one.startswith(b"data: {") for one in events)
            assert (done, end) == (b"data: [DONE]", b"")
        else:
            assert b"content-length: %d" % len(rest) in head and json.loads(rest)["choices"]
        writer.close()
