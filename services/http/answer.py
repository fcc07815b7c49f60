"""Answers one request that generates: as a whole, or as a stream of server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bridge.generation import Delta, Finished
from services.http import errors
from services.http.generation import Event, noting_silence, while_connected
from services.http.requests import GenerationRequest
from services.http.responses import Choice, Format, Json, usage

_DONE = b"data: [DONE]\n\n"
# A proxy may give up after a minute without a byte. From this time on a stream has a comment instead of a text, after
# which the library sends one every 15 seconds.
_MAX_SILENT_SECONDS, _WAITING = 15.0, b": waiting for the first text\n\n"
# Of a piece of an answer that is not streamed: as large as a TLS record.
_PIECE_BYTES = 16 << 10
# ASCII: some clients split lines at characters such as U+2028 too.
_write_json = json.JSONEncoder(separators=(",", ":")).encode
write_text = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True)
class Limits:
    """What clients may use: bytes of a body, choices at once, seconds for a head, a MiB of a body, and without reading.

    `connections`: open at once; None: the number that the limit on open files allows. `logprob_bytes`: what all answers
    that are not streamed may hold of log probabilities.
    """

    body_bytes: int = 4 << 20
    sequences: int = 256
    connections: int | None = None
    head_seconds: float = 30.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    logprob_bytes: int = 256 << 20


class Budget:
    """Counts the bytes of log probabilities in memory, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes bytes until the block ends, and raises `LogprobsFull`."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self._used + count > self._limit:
                raise errors.LogprobsFull(self._limit)
            self._used += count
            taken += count

        try:
            yield take
        finally:
            self._used -= taken


@dataclass(frozen=True)
class Answer:
    """An answer in the making: its choices, the events that fill them, and the form that it is written in.

    `take`: counts bytes of log probabilities, see `Budget`.
    """

    form: Format
    choices: list[Choice]
    events: AsyncGenerator[Event]
    take: Callable[[int], None]


async def respond(answer: Answer, body: GenerationRequest, receive: Receive) -> Response | None:
    """Returns the response, or None if the client has left. Raises an error that occurs before it begins."""
    if not body.stream:
        return await while_connected(receive, _whole(answer, body))
    stream = _stream(answer, body)
    first = await while_connected(receive, _next(stream))
    return None if first is None else _EventStream(first, stream)


async def _next(stream: AsyncGenerator[bytes]) -> bytes:
    return await anext(stream)


class _Logprobs:
    """The log probabilities of a choice, which are encoded as they arrive.

    As objects they would need many times the memory, and encoding all of them at once would stop the event loop.
    """

    def __init__(self) -> None:
        self._fields: dict[str, bytearray] = {}

    def add(self, logprobs: Json) -> int:
        """Adds those of a delta, whose fields are lists or null. Returns their size."""
        size = 0
        for name, values in logprobs.items():
            field = self._fields.setdefault(name, bytearray())
            if values is not None:
                piece = b"," * bool(field) + write_text(values)[1:-1].encode()
                field += piece
                size += len(piece)
        return size

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Yields their JSON."""
        if not self._fields:
            yield b"null"
            return
        for place, (name, field) in enumerate(self._fields.items()):
            yield f'{"," if place else "{"}"{name}":{"[" if field else "null"}'.encode()
            yield field
            yield b"]" if field else b""
        yield b"}"


async def _whole(answer: Answer, body: GenerationRequest) -> Response:
    texts: list[list[str]] = [[] for _ in answer.choices]
    logprobs = [_Logprobs() for _ in answer.choices]
    async for index, event in answer.events:
        choice = answer.choices[index]
        choice.take(event)
        if isinstance(event, Delta):
            texts[index].append(event.text)
            if tokens := choice.tokens(event):
                answer.take(logprobs[index].add(answer.form.logprobs(choice, tokens)))

    def pieces() -> Iterator[bytes | bytearray]:
        before = write_text(answer.form.whole())[:-1] + ',"choices":['
        for choice in answer.choices:
            part = answer.form.complete(choice, "".join(texts[choice.index]))
            yield f'{before}{write_text(part)[:-1]},"logprobs":'.encode()
            yield from logprobs[choice.index].pieces()
            before = "},"
        yield f'}}],"usage":{write_text(usage(answer.choices, body.n or 1))}}}'.encode()

    # In a thread: it may be hundreds of megabytes.
    return WholeResponse(await asyncio.to_thread(b"".join, pieces()))


class WholeResponse(Response):
    """Ends when the client has read all but what is buffered, because its log probabilities count until then.

    It is sent in pieces: a client that reads slowly makes the next piece wait, and loses its connection if it stops.
    asyncio would take one large piece whole over TLS, and nothing would wait.
    """

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), _PIECE_BYTES):
            piece = self.body[begin : begin + _PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})  # waits until what was sent before has been read


async def _stream(answer: Answer, body: GenerationRequest) -> AsyncGenerator[bytes]:
    """Yields server-sent events: from the first text on, or from `_MAX_SILENT_SECONDS` on if that is earlier.

    It raises an error that occurs before that. A later one becomes an event with `error`, and no `[DONE]` follows.
    """
    form, held, begun = answer.form, list[bytes](), False
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
        async with aclosing(noting_silence(answer.events, _MAX_SILENT_SECONDS)) as events:
            async for event in events:
                begun = begun or event is None or isinstance(event[1], Delta | Finished)
                if event:
                    held += [_event(form.event([part], **further)) for part in parts(*event)]
                elif not held:
                    held.append(_WAITING)
                if begun:
                    for one in held:
                        yield one
                    held.clear()
    except Exception as error:
        if not begun:
            raise
        _, failed, _ = errors.report(error, names=body.names)
        yield _event(failed)
        return
    if body.include_usage:
        yield _event(form.event([], usage=usage(answer.choices, body.n or 1)))
    yield _DONE


def _event(value: Json) -> bytes:
    return f"data: {_write_json(value)}\n\n".encode()


class _EventStream(EventSourceResponse):
    """Sends `first` and what follows it, and closes the iterator when the stream ends or the client leaves."""

    def __init__(self, first: bytes, further: AsyncGenerator[bytes]) -> None:
        async def whole() -> AsyncGenerator[bytes]:
            yield first
            async for event in further:
                yield event

        self._whole, self._further = whole(), further
        super().__init__(self._whole, headers={"Cache-Control": "no-cache"})
        del self.headers["connection"]  # the library's is keep-alive, also where the connection ends with the stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            await send(message)
            has_begun = True

        async with aclosing(self._further), aclosing(self._whole):
            try:
                await super().__call__(scope, receive, noting)
            except asyncio.CancelledError:  # only a server that stops cancels a request
                if has_begun and self.active:
                    _, stopped, _ = errors.report(errors.ServerStopping())
                    await send({"type": "http.response.body", "body": _event(stopped)})
                raise

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # `Connection` limits the time. The library's limit, also if there is none, is a third of an event's cost.
        await send(message)
