"""Answers one request that generates: as a whole, or as a stream of server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sse_starlette.sse import EventSourceResponse
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from bridge.generation import Delta
from services.http import errors
from services.http.generation import Event, while_connected
from services.http.requests import GenerationRequest
from services.http.responses import Choice, Format, Json, usage

_DONE = b"data: [DONE]\n\n"
# ASCII: some clients split lines at characters such as U+2028 too.
_write_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Limits:
    """What clients may use: bytes of a body, choices at once, seconds for a head, a body, and without reading.

    `connections`: open at once; None: the number that the limit on open files allows.
    """

    body_bytes: int = 4 << 20
    sequences: int = 256
    connections: int | None = None
    head_seconds: float = 30.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0


@dataclass(frozen=True)
class Answer:
    """An answer in the making: its choices, the events that fill them, and the form that it is written in."""

    form: Format
    choices: list[Choice]
    events: AsyncGenerator[Event]


async def respond(answer: Answer, body: GenerationRequest, receive: Receive) -> Response | None:
    """Returns the response, or None if the client has left. Raises an error that occurs before the first text."""
    if not body.stream:
        return await while_connected(receive, _whole(answer, body))
    # The status is sent with the first text, so that an error before it, such as a full queue, has its own status.
    begun = await while_connected(receive, _begin(answer))
    return None if begun is None else _EventStream(_stream(answer, body, begun))


async def _whole(answer: Answer, body: GenerationRequest) -> JSONResponse:
    texts: list[list[str]] = [[] for _ in answer.choices]
    tokens: list[list[Json]] = [[] for _ in answer.choices]
    async for index, event in answer.events:
        answer.choices[index].take(event)
        if isinstance(event, Delta):
            texts[index].append(event.text)
            tokens[index] += answer.choices[index].tokens(event)
    choices = [answer.form.complete(one, "".join(texts[one.index]), tokens[one.index]) for one in answer.choices]
    # In a thread: with log probabilities it may be megabytes, which take a second to write.
    return await asyncio.to_thread(JSONResponse, answer.form.whole(choices, usage(answer.choices, body.n or 1)))


async def _begin(answer: Answer) -> list[Event]:
    """Returns the events up to the first delta of any choice."""
    begun = []
    async for index, event in answer.events:
        begun.append((index, event))
        if isinstance(event, Delta):
            break
    return begun


async def _stream(answer: Answer, body: GenerationRequest, begun: list[Event]) -> AsyncGenerator[bytes]:
    """Yields server-sent events. An error becomes an event with `error`, after which no `[DONE]` follows."""
    form = answer.form
    further: Json = {"usage": None} if body.include_usage else {}

    def parts(index: int, event: Any) -> list[Json]:
        choice = answer.choices[index]
        started = choice.opened is None
        choice.take(event)
        found = [form.first(choice)] if started else []
        found += [form.chunk(choice, event)] if isinstance(event, Delta) else []
        found += [form.last(choice)] if choice.finished else []
        return [part for part in found if part is not None]

    try:
        for index, event in begun:
            for part in parts(index, event):
                yield _event(form.event([part], **further))
        async for index, event in answer.events:
            for part in parts(index, event):
                yield _event(form.event([part], **further))
    except Exception as error:
        _, failed, _ = errors.report(error, names=body.names)
        yield _event(failed)
        return
    if body.include_usage:
        yield _event(form.event([], usage=usage(answer.choices, body.n or 1)))
    yield _DONE


def _event(value: Json) -> bytes:
    return f"data: {_write_json(value)}\n\n".encode()


class _EventStream(EventSourceResponse):
    """Closes the iterator when the stream ends or the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # `Connection` limits the time. The library's limit, also if there is none, is a third of an event's cost.
        await send(message)
