"""A door for HTTP in this process, requests to doors, and what their answers must be."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from services.bridge.gateway import Gateway
from services.bridge.zoo import Zoo
from services.cli.processes import Fleet
from services.config import BridgeServerConfig
from services.http.answer import Limits
from services.http.server import http_door
from tests.support.zoo import trusted

PROMPT = "The quick brown"
CHAT = [{"role": "user", "content": "Say something."}]
# A stream that outlasts what a test does to it.
LONG: dict[str, Any] = {
    "prompt": "The quick brown",
    "max_tokens": 230,
    "temperature": 1.0,
    "ignore_eos": True,
    "logprobs": 100,
    "draftbridge": {"mode": "lockstep"},
}


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    defaults = {"model": "tiny-target", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    return http.post("/v1/completions", json=defaults | body)


def chat(http: httpx.Client, **body: object) -> httpx.Response:
    defaults = {"model": "tiny-target", "messages": CHAT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    return http.post("/v1/chat/completions", json=defaults | body)


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    """Asserts that the request was refused in OpenAI's form, and returns the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    return str(error["message"])


def events(response: httpx.Response) -> list[dict]:
    """Returns the events of a complete stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def tool(name: str, **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


@asynccontextmanager
async def door(
    tiny_fleet: Fleet, limits: Limits | None = None, stop: asyncio.Event | None = None, **options: Any
) -> AsyncIterator[tuple[str, Gateway]]:
    """Opens a door in this process on the models of the fleet. It closes when `stop` is set, and at the end."""
    async with AsyncExitStack() as stack:
        with trusted():  # the fleet's own bridge has tested them
            zoo = await Zoo([tiny_fleet.target], [tiny_fleet.draft]).connect()
        stack.push_async_callback(zoo.close)
        config = BridgeServerConfig(**{"target": (tiny_fleet.target,), "http": "127.0.0.1:0"} | options)
        gateway = Gateway(zoo)
        opening = http_door(config, gateway, stop or asyncio.Event(), limits=limits)
        yield await stack.enter_async_context(opening), gateway


def raw(
    url: str, body: bytes, receive_bytes: int | None = None, context: ssl.SSLContext | None = None
) -> socket.socket:
    """Sends a completion request over a socket, and leaves the answer to be read."""
    parts = urlsplit(url)
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((parts.hostname, parts.port))
    connection = context.wrap_socket(connection, server_hostname=parts.hostname) if context else connection
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection
