"""Tests connections of the HTTP door: what Java clients send, requests before an answer, slow readers, TLS."""

import asyncio
import json
import ssl
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from uvicorn.server import ServerState

from bridge.request import Request
from services.bridge.pairing import Wish
from services.bridge.shared import Shared
from services.cli.processes import Fleet
from services.http.answer import Limits
from services.http.app import _Door
from services.http.connections import _HEAD_END, Connection
from services.http.requests import CompletionRequest
from tests.services.test_http_limits import open_connections
from tests.support.certificates import authority, issue
from tests.support.doors import LONG, door, raw
from tests.support.waiting import eventually, held

SHORT = {"prompt": "a", "max_tokens": 1}


def request(body: dict[str, Any], further: str = "") -> bytes:
    """Returns a POST of a completion."""
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}{further}Content-Length: {len(text)}\r\n\r\n{text}".encode()


async def answered(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Reads an answer, and returns its status and its object."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_all_addresses_are_those_of_both_kinds(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet, http="[::]:0", insecure=True) as (url, _):
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, urlsplit(url).port)
            writer.write(request(SHORT))
            assert (await answered(reader))[0] == 200
            writer.close()


@pytest.mark.parametrize("cut", [0, 30, -30, None], ids=["whole", "in the head", "in the body", "byte by byte"])
async def test_an_offer_of_http_2_is_ignored(tiny_fleet: Fleet, cut: int | None) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    sent = request(SHORT, offer)
    pieces = [sent[:cut], sent[cut:]] if cut is not None else [sent[place : place + 1] for place in range(len(sent))]
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        for _ in range(2):  # the connection stays usable
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            status, answer = await answered(reader)
            assert status == 200 and answer["usage"]["completion_tokens"] == 1
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # the beginning of a TLS handshake
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (11 << 10), 431),
    ],
    ids=["TLS", "header", "HTTP/2", "chunk", "large"],
)
async def test_what_is_not_a_request_has_an_error_of_openai_s_form(tiny_fleet: Fleet, sent: bytes, status: int) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(request(SHORT))
        assert (await answered(reader))[0] == 200
        writer.write(sent)
        found, answer = await asyncio.wait_for(answered(reader), 60)
        assert found == status and answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b"", "the connection ends"
        writer.close()


class Searched:
    """Counts the bytes that are searched for the end of a head."""

    def __init__(self) -> None:
        self.byte_count = 0

    def search(self, data: bytearray, begin: int = 0) -> Any:
        self.byte_count += len(data) - begin
        return _HEAD_END.search(data, begin)


def bare_connection() -> Connection:
    """Returns a connection without a transport."""
    return Connection(
        config=uvicorn.Config(lambda: None), server_state=ServerState(), app_state={}, max_connections=1,
        head_seconds=1.0, send_seconds=1.0, shaking=set(),
    )  # fmt: skip


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\r\n"])
async def test_a_head_may_be_split_anywhere(end: bytes) -> None:
    head = b"\r\n\nGET / HTTP/1.1\r\nA: b\nHost: localhost" + end
    expected, sent = head.lstrip(), head + b"rest"
    for first in range(len(sent) + 1):
        for second in range(first, len(sent) + 1):
            connection, given = bare_connection(), b""
            for piece in (sent[:first], sent[first:second], sent[second:]):
                passed = connection._with_whole_head(piece)
                connection._is_parsing = connection._is_parsing or bool(passed)
                assert given or not passed or passed.startswith(expected), (first, second)
                given += passed
            assert given == expected + b"rest", (first, second)


@pytest.mark.parametrize("line", [b"A: " + b"b" * 5000, b"A: b\r\n" * 1000, b"\r\n" * 2500])
async def test_the_bytes_of_a_head_are_searched_a_few_times_however_they_arrive(
    monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    searched, connection = Searched(), bare_connection()
    monkeypatch.setattr("services.http.connections._HEAD_END", searched)
    sent = (b"GET / HTTP/1.1\r\n" if line.startswith(b"A") else b"") + line
    for place in range(len(sent)):
        assert connection._with_whole_head(sent[place : place + 1]) == b""
    assert searched.byte_count <= 5 * len(sent)
    assert len(connection._head) == (len(sent) if line.startswith(b"A") else 0)


async def test_no_error_is_written_into_an_answer(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(request(LONG | {"stream": True}))
        await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_requests_sent_before_an_answer_are_answered_in_their_order(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(b"".join(request({"prompt": "a", "max_tokens": count}) for count in (3, 1, 2)))
        counts = [(await answered(reader))[1]["usage"]["completion_tokens"] for _ in range(3)]
        assert counts == [3, 1, 2]
        writer.write(request(SHORT) * 40)
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)  # too many: it ends
        writer.close()


async def test_a_client_that_leaves_after_a_second_request_frees_the_first(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, gateway):
        _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        with held(tiny_fleet.processes["target"].pid):  # so that it does not end by itself
            writer.write(request(LONG))
            await asyncio.to_thread(eventually, lambda: gateway.counts.active == 1)
            writer.write(request(SHORT))
            await writer.drain()
            writer.close()
            await asyncio.to_thread(eventually, lambda: gateway.counts.active == 0)
            assert gateway.counts.cancelled == 1


async def test_a_slow_reader_that_goes_on_gets_its_whole_answer(tiny_fleet: Fleet) -> None:
    seconds = 3.0  # in which this client reads, also if it is held up
    async with door(tiny_fleet, Limits(send_seconds=seconds)) as (url, _):
        connection = raw(url, json.dumps(LONG | {"n": 2}).encode(), receive_bytes=1 << 16)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 15)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        left = length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert length > 1 << 20, "more than buffers hold"
        started, pause = time.monotonic(), 2.5 * seconds / (length >> 15)
        while left:
            data = await asyncio.wait_for(reader.read(1 << 15), 60)
            assert data, f"ended {left} bytes early"
            left -= len(data)
            await asyncio.sleep(pause)  # slower than the server writes
        writer.close()
    assert time.monotonic() - started > 2 * seconds


class Unasked:
    """A backend that is not asked for anything."""

    check = None


@pytest.mark.parametrize(
    ("pieces", "status"), [([b'{"prompt": "' + b"a" * (1 << 20), b"b" * (1 << 20), b'"}'], 200), ([b"{"] * 2, 408)]
)
async def test_a_body_has_its_time_for_each_part(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], status: int
) -> None:
    loop, seconds = asyncio.get_running_loop(), 0.0
    time_of_loop, left = loop.time, list(pieces)
    monkeypatch.setattr(loop, "time", lambda: time_of_loop() + seconds)

    async def receive() -> Any:
        nonlocal seconds
        seconds += 20.0
        for _ in range(3):  # until the loop has noticed a limit of time
            await asyncio.sleep(0)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    given = HttpRequest({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    reading = _Door(cast(Any, Unasked()), Limits(), None).read(given, CompletionRequest, None)
    if status == 200:
        body, byte_count = await reading
        assert len(str(body.prompt)) == 2 << 20 < byte_count
    else:
        with pytest.raises(HTTPException) as caught:
            await reading
        assert caught.value.status_code == status and "within 30 s for each MiB" in caught.value.detail


class Unsent(asyncio.Transport):
    """A transport whose client has left `size` bytes unread."""

    def __init__(self, size: int) -> None:
        self.size, self.is_aborted = size, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_client_that_reads_too_little_in_the_time_limit_is_disconnected() -> None:
    connection, transport = bare_connection(), Unsent(1 << 20)
    connection.transport = transport
    transport.size -= 16 << 10
    connection._check_reading(1 << 20)
    assert not transport.is_aborted and connection._send_timer
    connection._send_timer.cancel()
    connection._check_reading(transport.size + (16 << 10) - 1)
    assert transport.is_aborted


async def test_over_tls_too_a_reader_that_never_takes_a_whole_answer_loses_its_connection(
    tiny_fleet: Fleet, tmp_path: Path
) -> None:
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "bridge")
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with door(tiny_fleet, Limits(send_seconds=0.5), **files) as (url, gateway):
        body = json.dumps(LONG | {"n": 2}).encode()
        with await asyncio.to_thread(raw, url, body, 4096, trust) as connection:
            await asyncio.to_thread(eventually, lambda: gateway.counts.finished == 2)
            await asyncio.to_thread(eventually, lambda: not open_connections(url, connection))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio drops the socket unclosed
async def test_connections_before_their_tls_handshake_count(tiny_fleet: Fleet, tmp_path: Path) -> None:
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "bridge")
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    async with AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(door(tiny_fleet, Limits(connections=5), **files))
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        readers = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            stack.callback(writer.close)
            readers.append(reader)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(readers[-1].read(), 60) == b"", "closed at once"
        async with httpx.AsyncClient(base_url=url, verify=trust) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/v1/models")
        writer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio drops the socket unclosed
async def test_connections_that_end_before_their_tls_handshake_count_no_more(tiny_fleet: Fleet, tmp_path: Path) -> None:
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "bridge")
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with door(tiny_fleet, Limits(connections=5), **files) as (url, _):
        for number in range(20):
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            if number % 2:
                writer.write(b"no TLS")  # a handshake that fails
            else:
                writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)  # until the server has ended it
            writer.close()
        async with httpx.AsyncClient(base_url=url, verify=trust) as http:
            assert (await http.get("/v1/models")).status_code == 200


async def test_an_answer_is_that_of_the_model_whose_name_it_has(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default may change between the question which model serves and the request itself."""
    async with door(tiny_fleet) as (url, gateway), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asked, generate = list[str](), gateway.generate

        def noting(one: Request, name: str = "", wish: Wish | None = None) -> Any:
            asked.append(name)
            return generate(one, name, wish)

        monkeypatch.setattr(gateway, "generate", noting)
        answer = await http.post("/v1/completions", json=SHORT | {"n": 2})
    assert answer.json()["model"] == "tiny-target" and asked == ["tiny-target"] * 2


async def test_more_choices_than_slots_take_turns(tiny_fleet: Fleet) -> None:
    """The fleet has three slots and a queue of two."""
    async with httpx.AsyncClient(base_url=tiny_fleet.http, timeout=60) as http:
        body = {"prompt": "The", "max_tokens": 5, "n": 9, "seed": 1, "temperature": 1.0, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()["choices"]
        assert [one["index"] for one in whole] == list(range(9))
        texts = [""] * 9
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for line in stream.aiter_lines():
                for part in json.loads(line[6:]).get("choices", []) if line.startswith("data: {") else []:
                    texts[part["index"]] += part["text"]
        assert texts == [one["text"] for one in whole] and len(set(texts)) > 1


async def test_all_who_ask_at_once_get_one_result() -> None:
    made = 0

    async def make() -> int:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        if made == 2:
            raise ValueError
        return made

    shared = Shared(make, seconds=0.0)
    leaving = asyncio.create_task(shared.get())
    others = [asyncio.create_task(shared.get()) for _ in range(5)]
    await asyncio.sleep(0)
    leaving.cancel()
    assert await asyncio.gather(*others) == [1] * 5
    with pytest.raises(ValueError):
        await shared.get()
    kept = Shared(make, seconds=60.0)
    assert [await kept.get() for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("name", ["https://example.com", "example.com:443", "foo*", "a.*.b", ""])
async def test_a_host_name_that_can_never_match_is_refused_at_the_start(tiny_fleet: Fleet, name: str) -> None:
    with pytest.raises(ValidationError, match="names such as"):
        async with door(tiny_fleet, http_host=(name,)):
            pass


@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nConnection: close", b"HTTP/1.0"])
async def test_a_client_that_sends_its_whole_body_first_reads_the_refusal(tiny_fleet: Fleet, head: bytes) -> None:
    """Some clients, such as urllib, use a connection for one request only."""
    async with door(tiny_fleet, Limits(body_bytes=1000)) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(b"POST /v1/completions " + head + b"\r\nHost: localhost\r\nContent-Length: 12000000\r\n")
        writer.write(b"Content-Type: application/json\r\n\r\n")
        for _ in range(12):
            writer.write(b" " * 1_000_000)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.split()[1] == b"413" and b"connection: close" in answer
        writer.close()


async def test_a_stream_on_a_connection_that_ends_with_it_says_only_that(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(request(SHORT | {"stream": True}, "Connection: close\r\n"))
        head, _, events = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        assert head.lower().count(b"connection:") == 1 and b"connection: close" in head and b"[DONE]" in events
        writer.close()
