"""A door that stops ends its connections, whatever their clients do meanwhile."""

import asyncio
import json
import ssl
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.cli.processes import Fleet
from services.rpc.server import Stop
from tests.services.test_http_connections import SHORT, answered, request
from tests.support.certificates import authority, issue
from tests.support.doors import LONG, door, raw
from tests.support.waiting import eventually


async def test_stopping_ends_open_streams(tiny_fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        async with door(tiny_fleet, grace=2) as (url, gateway):
            connection = raw(url, json.dumps(LONG | {"n": 2, "stream": True}).encode(), receive_bytes=4096)
            stack.callback(connection.close)
            await asyncio.to_thread(eventually, lambda: gateway.counts.active == 2)
            stopping = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - stopping < 30 and gateway.counts.active == 0


async def test_a_client_that_does_not_confirm_the_end_of_tls_does_not_hold_up_a_server_that_stops(
    tiny_fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a synchronous client with a pool of connections: nobody reads while it has nothing to ask."""
    monkeypatch.setattr("services.http.connections._CLOSING_SECONDS", 0.3)
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "bridge")
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with AsyncExitStack() as stack:
        async with door(tiny_fleet, grace=60, **files) as (url, _):
            connection = await asyncio.to_thread(raw, url, json.dumps(SHORT).encode(), None, trust)
            stack.callback(connection.close)
            assert b" 200 OK" in await asyncio.to_thread(connection.recv, 1 << 16)
            began = time.perf_counter()
        assert time.perf_counter() - began < 15


@pytest.mark.parametrize("secure", [False, True])
async def test_connections_that_end_while_the_server_stops_leave_no_error(
    tiny_fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """The client reads to the end, and so confirms it, before the timers of connections run out, and after."""
    monkeypatch.setattr("services.http.connections._CLOSING_SECONDS", 0.1)
    problems = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    files, trust = {}, None
    if secure:
        pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "bridge")
        files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    stop = Stop()
    async with door(tiny_fleet, stop=stop, grace=60, **files) as (url, _):
        where = urlsplit(url)
        for further in ("Connection: close\r\n", ""):
            for pause in (0.0, 0.3):
                reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=trust)
                writer.write(request(SHORT, further))
                await answered(reader)
                if not further:
                    stop.set()
                await asyncio.sleep(pause)  # in which a timer may run out
                assert await asyncio.wait_for(reader.read(), 60) == b""
                writer.close()
                if stop.is_set():
                    break
    await asyncio.sleep(0.3)  # until the timers of connections would have run out
    assert not problems


async def test_a_hurry_also_ends_what_a_client_does_not_read(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.http.server.HURRIED_SECONDS", 0.3)
    stop = Stop()
    async with AsyncExitStack() as stack:
        async with door(tiny_fleet, stop=stop, grace=60) as (url, gateway):
            connection = raw(url, json.dumps(LONG | {"n": 2, "stream": True}).encode(), receive_bytes=4096)
            stack.callback(connection.close)
            await asyncio.to_thread(eventually, lambda: gateway.counts.active == 2)
            began = time.perf_counter()
            stop.set()
            stop.hurried.set()
        assert time.perf_counter() - began < 15 and gateway.counts.active == 0


@pytest.mark.parametrize("hurry", [False, True])
async def test_a_stream_that_a_stop_cuts_ends_with_an_error_that_the_log_does_not_have(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hurry: bool
) -> None:
    monkeypatch.setattr("services.http.server.HURRIED_SECONDS", 0.0)
    stop = Stop()
    async with door(tiny_fleet, stop=stop, grace=60 if hurry else 0) as (url, _):
        with closing(raw(url, json.dumps(LONG | {"stream": True}).encode(), receive_bytes=4096)) as connection:
            text = await asyncio.to_thread(connection.recv, 1024)
            stop.set()
            if hurry:
                stop.hurried.set()
            while received := await asyncio.to_thread(connection.recv, 1 << 20):
                text += received
    _, _, last = text.rpartition(b"\r\ndata: ")
    event, _, end = last.partition(b"\n\n")
    assert json.loads(event)["error"]["code"] == "server_stopping"
    assert end == b"\r\n0\r\n\r\n" and b"[DONE]" not in text
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
