"""Tests the HTTP door under clients that leave, stall, flood it or send nonsense, and under failing models."""

import asyncio
import json
import resource
import socket
import threading
import time
import zlib
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import psutil
import pytest

from bridge import generation
from bridge.request import Request
from bridge.text.models import Model
from draftbridge import Client
from services.cli.processes import Fleet, fleet, launched
from services.config import BridgeServerConfig
from services.http.answer import Limits
from services.http.requests import ChatCompletionRequest
from services.http.server import http_door
from services.rpc.server import PortTaken
from tests.support.doors import CHAT, LONG, door, raw, refused
from tests.support.waiting import eventually, held

JSON = {"content-type": "application/json"}


def test_a_client_that_leaves_its_stream_frees_its_sequences(tiny_fleet: Fleet, client: Client) -> None:
    before = client.status().cancelled_count
    # More text than its small connection holds, so that the requests go on until it leaves.
    connection = raw(tiny_fleet.http, json.dumps(LONG | {"n": 2, "stream": True}).encode(), receive_bytes=4096)
    assert connection.recv(64).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(lambda: client.status().cancelled_count == before + 2)
    assert client.status().active_count == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_its_answer_frees_its_sequences(tiny_fleet: Fleet, stream: bool) -> None:
    async with door(tiny_fleet) as (url, gateway):
        with held(tiny_fleet.processes["target"].pid):
            connection = raw(url, json.dumps(LONG | {"n": 2, "stream": stream}).encode())
            await asyncio.to_thread(eventually, lambda: gateway.counts.active == 2)
            connection.close()
            await asyncio.to_thread(eventually, lambda: gateway.counts.cancelled == 2)
        assert gateway.counts.active == 0


async def test_a_client_that_leaves_counts_until_its_prompt_is_encoded(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, begun, free = generation._prepared, threading.Event(), threading.Event()

    def hold(request: Request, model: Model) -> object:
        begun.set()
        assert free.wait(60)
        return prepared(request, model)

    async with AsyncExitStack() as stack:
        url, gateway = await stack.enter_async_context(door(tiny_fleet, Limits(sequences=1)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        connection = stack.enter_context(raw(url, json.dumps(LONG | {"prompt": "a " * 50_000}).encode()))
        stack.callback(free.set)
        monkeypatch.setattr(generation, "_prepared", hold)
        await asyncio.to_thread(begun.wait, 60)
        connection.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(eventually, lambda: not open_connections(url, connection))
        assert (await http.post("/v1/completions", json=LONG)).status_code == 429
        assert gateway.counts.active == 1
        free.set()
        await asyncio.to_thread(eventually, lambda: gateway.counts.cancelled == 1)
        assert (await http.post("/v1/completions", json=LONG | {"max_tokens": 1})).status_code == 200


def test_a_full_queue_is_429_with_retry_after(tiny_fleet: Fleet, client: Client) -> None:
    with raw(tiny_fleet.http, json.dumps(LONG | {"n": 5, "stream": True}).encode()) as others:
        assert others.recv(64).startswith(b"HTTP/1.1 200")
        for stream in (True, False):
            answer = httpx.post(f"{tiny_fleet.http}/v1/completions", json=LONG | {"stream": stream}, timeout=60)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
    eventually(lambda: client.status().active_count == 0)


async def test_the_door_s_own_limit_is_429_too(tiny_fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        url, gateway = await stack.enter_async_context(door(tiny_fleet, Limits(sequences=1)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        for body in ({"n": 2}, {"prompt": ["a", "b"]}):  # never possible
            refused(await http.post("/v1/completions", json=LONG | body), 400, next(iter(body)))
        running = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await asyncio.to_thread(eventually, lambda: gateway.counts.active == 1)
        segmentation = {"text": "a", "models": ["tiny-target"]}
        with held(tiny_fleet.processes["target"].pid):
            for path, body in (("/v1/completions", LONG), ("/v1/segmentations", segmentation)):
                answer = await http.post(path, json=body)
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "too_many_sequences" and gateway.counts.failed == 0
        assert (await running).status_code == 200
        assert (await http.post("/v1/completions", json=LONG | {"max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"n": NaN}']
)
def test_a_body_that_is_not_a_request_is_400(tiny_fleet: Fleet, body: bytes) -> None:
    answer = httpx.post(f"{tiny_fleet.http}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_body"


@pytest.mark.parametrize("many", [{f"field{i}": 1 for i in range(100_000)}, {"prompt": ["a"] * 500_000, "n": 128}])
def test_a_body_with_a_million_mistakes_or_prompts_costs_little(tiny_fleet: Fleet, many: dict[str, Any]) -> None:
    answer = httpx.post(f"{tiny_fleet.http}/v1/completions", json={"prompt": "a"} | many, timeout=60)
    assert answer.status_code in (400, 429) and len(answer.text) < 500
    wrong = httpx.post(f"{tiny_fleet.http}/v1/completions", json={"prompt": [{}] * 10_000}, timeout=60)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt[0]"


async def test_a_large_chat_does_not_stop_other_requests(tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, threads = ChatCompletionRequest.requests, []

    def noted(body: ChatCompletionRequest) -> list[Request]:
        threads.append(threading.current_thread())
        return requests(body)

    monkeypatch.setattr(ChatCompletionRequest, "requests", noted)
    async with door(tiny_fleet) as (url, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": CHAT * 2000})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_body_of_another_type_is_415(tiny_fleet: Fleet) -> None:
    answer = httpx.post(f"{tiny_fleet.http}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    url = f"{tiny_fleet.http}/v1/completions"
    answer = httpx.post(url, content=zlib.compress(b"{}"), headers=JSON | {"content-encoding": "deflate"})
    assert answer.status_code == 415 and "uncompressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_of_100_mb_is_413(tiny_fleet: Fleet, chunked: bool) -> None:
    piece = b" " * 1_000_000
    content: Any = (piece for _ in range(100)) if chunked else piece * 100
    answer = httpx.post(f"{tiny_fleet.http}/v1/completions", content=content, headers=JSON, timeout=60)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


async def test_a_body_that_does_not_arrive_is_408(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet, Limits(body_seconds=0.2)) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 50\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()


async def test_a_slow_reader_disturbs_nobody_and_is_ended(tiny_fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        url, gateway = await stack.enter_async_context(door(tiny_fleet, Limits(send_seconds=1.0)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        connection = raw(url, json.dumps(LONG | {"n": 2, "stream": True}).encode(), receive_bytes=4096)
        stack.callback(connection.close)
        await asyncio.to_thread(eventually, lambda: gateway.counts.active + gateway.counts.cancelled == 2)
        answer = await http.post("/v1/completions", json=LONG | {"max_tokens": 5}, timeout=60)
        assert answer.status_code == 200
        await asyncio.to_thread(eventually, lambda: gateway.counts.active == 0)
        assert gateway.counts.cancelled == 2
        await asyncio.to_thread(eventually, lambda: not open_connections(url, connection))


async def test_a_reader_that_never_takes_a_whole_answer_loses_its_connection(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet, Limits(send_seconds=0.5)) as (url, gateway):
        with raw(url, json.dumps(LONG).encode(), receive_bytes=4096) as connection:
            await asyncio.to_thread(eventually, lambda: gateway.counts.finished == 1)
            await asyncio.to_thread(eventually, lambda: not open_connections(url, connection))


def open_connections(url: str, client: socket.socket) -> list[int]:
    """Returns the sockets of this process that are still connected to the client."""
    port = client.getsockname()[1]
    return [one.fd for one in psutil.Process().net_connections() if one.raddr and one.raddr.port == port]


def test_ten_thousand_idle_connections_disturb_nobody(tiny_fleet: Fleet) -> None:
    parts = urlsplit(tiny_fleet.http)
    assert parts.hostname and parts.port
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The number that the limits on open files allow in this process and in the bridge.
    count = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, hard - 600)
    bridge = psutil.Process(tiny_fleet.processes["bridge"].pid)
    before = bridge.memory_info().rss
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        http = stack.enter_context(httpx.Client(base_url=tiny_fleet.http, timeout=60))
        for number in range(count):
            connection = stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        started = time.monotonic()
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert http.get("/health").status_code == 200
        assert time.monotonic() - started < 30
        assert (bridge.memory_info().rss - before) / count < 32_000, "bytes of a connection"
    eventually(lambda: len(bridge.net_connections()) < 100)


async def test_connections_are_bounded_in_number_time_and_head(tiny_fleet: Fleet) -> None:
    limits = Limits(connections=20, head_seconds=0.5)
    async with AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(door(tiny_fleet, limits))

        async def connect(head: bytes = b"") -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            stack.callback(writer.close)
            writer.write(head)
            return reader

        # One that uses its connection, with pauses, is not ended.
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=1)))
        assert (await http.get("/v1/models")).status_code == 200
        idle = [await connect(b"GET / HTTP/1.1\r\nHo" if number % 2 else b"") for number in range(19)]
        beyond = await connect()
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(beyond.read(), 60) == b"", "closed at once"
        assert (await http.get("/v1/models")).status_code == 200
        for reader in idle:
            assert await asyncio.wait_for(reader.read(), 60) == b"", "closed after half a second"
        assert (await http.get("/v1/models")).status_code == 200
        endless = await connect(b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"y" * 200_000)
        assert (await asyncio.wait_for(endless.readline(), 60)).startswith(b"HTTP/1.1 431")
        assert (await http.post("/v1/completions", json=LONG | {"max_tokens": 60})).status_code == 200


@pytest.mark.parametrize("rest", [b"\r\nGET / HTTP/1.1\r\nX-Long: ", b"X-Long: "], ids=["pipelined head", "trailers"])
async def test_a_head_or_trailers_during_a_request_are_bounded(tiny_fleet: Fleet, rest: bytes) -> None:
    """Sends more after the last chunk of a body, whose request still runs or waits for the end of the trailers."""
    async with door(tiny_fleet) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        body = json.dumps(LONG).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body) + rest)
        await writer.drain()
        with suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"y" * 16_384)
                await writer.drain()
                await asyncio.sleep(0)
            # A request that is complete runs, and no error may be taken for its answer.
            found = await asyncio.wait_for(reader.read(), 60)
            assert found.startswith(b"HTTP/1.1 431") if rest.startswith(b"X") else found == b""
        writer.close()


@pytest.mark.parametrize("head", [b"Content-Type: text/plain\r\n", b"Content-Type: application/json\r\n"])
async def test_the_rest_of_a_refused_body_is_read_and_ignored(tiny_fleet: Fleet, head: bytes) -> None:
    async with door(tiny_fleet, Limits(body_bytes=1000)) as (url, _):
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n" + head + b"\r\n"
        )
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert answer.split()[1] in (b"413", b"415")
        length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
        await reader.readexactly(length)
        writer.write(b" " * 3_000_000 + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"200"
        writer.close()


async def test_bodies_in_arrival_are_bounded_together(tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.http.app._MAX_ARRIVING_BYTES", 12_000)
    monkeypatch.setattr("services.http.app._FREE_BYTES", 1000)
    async with AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(door(tiny_fleet, Limits(body_bytes=9000)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        writers = []
        for _ in range(3):
            _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            stack.callback(writer.close)
            writers.append(writer)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 8500\r\n\r\n" + b" " * 6600)
            await writer.drain()

        async def status(prompt: str) -> httpx.Response:
            return await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})

        # Until the server has read what was sent.
        answers = [await status("a" * 7000) for _ in range(5)]
        answer = next(one for one in answers if one.status_code == 503)
        assert answer.headers["retry-after"] == "1"
        assert (await status("a" * 500)).status_code == 200, "a short one arrives all the same"
        for writer in writers:
            writer.close()
        assert 400 in [(await status("a" * 7000)).status_code for _ in range(5)], "only too long for the model"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/segmentations"])
async def test_a_client_that_leaves_in_its_body_is_no_error(
    tiny_fleet: Fleet, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO", "services.http.insight")
    async with door(tiny_fleet) as (url, _):
        _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode())
        writer.write(b"Content-Length: 50\r\n\r\n{")
        await writer.drain()
        writer.close()
        await asyncio.to_thread(eventually, lambda: f"POST {path} ended with 499" in caplog.text)
    wrong = [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]
    # gRPC's own, about the event loop of an earlier test.
    assert not [one for one in wrong if "PollerCompletionQueue" not in one.getMessage()]


async def test_bugs_and_unknown_hosts_have_openai_s_form(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*given: object) -> None:
        raise ValueError("a bug")

    async with door(tiny_fleet) as (url, gateway), httpx.AsyncClient(base_url=url) as http:
        monkeypatch.setattr(gateway, "served", fail)
        caplog.set_level("INFO", "services.http.insight")
        broken = await http.get("/v1/models")
        assert "internal error" in refused(broken, 500, None) and broken.headers["x-request-id"]
        assert "GET /v1/models ended with 500" in caplog.text
        assert "--http-host" in refused(await http.get("/health", headers={"host": "evil.example"}), 400, None)


async def test_other_origins_and_hosts_are_refused_unless_configured(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"origin": "https://app.example"}
    plain = httpx.get(f"{tiny_fleet.http}/v1/models", headers=origin)
    assert "access-control-allow-origin" not in plain.headers
    assert httpx.get(f"{tiny_fleet.http}/health", headers={"host": "evil.example"}).status_code == 400
    options = {"http_origin": ("https://app.example",), "http_host": ("models.example",)}

    async def fail(*given: object) -> None:
        raise ValueError("a bug")

    async with door(tiny_fleet, **options) as (url, gateway), httpx.AsyncClient(base_url=url) as http:
        allowed = await http.get("/v1/models", headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-origin" not in (await http.get("/health", headers={"origin": "https://b"})).headers
        assert (await http.get("/health", headers={"host": "models.example"})).status_code == 200
        refusal = await http.get("/health", headers=origin | {"host": "evil.example"})
        preflight = await http.options("/v1/models", headers=origin | {"access-control-request-method": "GET"})
        monkeypatch.setattr(gateway, "served", fail)
        failure = await http.get("/v1/models", headers=origin)
        for answer, status in ((refusal, 400), (preflight, 200), (failure, 500)):
            assert answer.status_code == status and answer.headers["x-request-id"]
            assert answer.headers["access-control-allow-origin"] == "https://app.example", "the page may read it"


async def test_an_address_that_cannot_be_listened_on(tiny_fleet: Fleet) -> None:
    async with door(tiny_fleet) as (url, gateway):
        address = urlsplit(url).netloc
        config = BridgeServerConfig(target=(tiny_fleet.target,), http=address)
        with pytest.raises(PortTaken, match=address):
            await http_door(config, gateway, asyncio.Event()).__aenter__()
        with pytest.raises(ValueError, match="HOST:PORT"):
            BridgeServerConfig(target=(tiny_fleet.target,), http="nowhere")


def test_a_target_that_dies_ends_the_stream_with_an_error(tiny_models: tuple[Path, Path]) -> None:
    options = ("--dtype", "float32", "--threads", "1")
    target = str(tiny_models[0])
    with (
        fleet(target, None, target_options=options, bridge_options=("--http", "127.0.0.1:0")) as running,
        httpx.Client(base_url=running.http, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=LONG | {"n": 4, "stream": True, "draftbridge": {}}) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        assert "choices" in next(lines)
        running.processes["target"].kill()
        last = list(lines)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and error["code"]
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["services"][0]["problem"]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        front = ("--bridge", running.bridge, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        with launched("http", "http", *front) as (url, _):
            for model in ("tiny-target", None):
                answered = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": model}, timeout=60)
                assert answered.status_code == 503, answered.text
            assert httpx.get(f"{url}/v1/models").json()["data"] == []
