"""Bounds what a connection may hold.

There are limits on the number of connections, the time and size of a head, and the time that an answer stays unread.
"""

import asyncio
import logging
import re
import socket
from asyncio.events import TimerHandle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services import open_files
from services.http import errors

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 100_000
# Files that the process needs besides: channels to services, models, logs.
_OTHER_FILES = 512
_MAX_HEAD_BYTES = 64 << 10
# Read and ignored, so that a client that sends its whole body first receives the refusal.
_MAX_REFUSED_BODY_BYTES = 16 << 20
# Requests that a client may send before the first is answered.
_MAX_PIPELINED = 16
# A client that reads less in the time limit has stopped reading.
_MIN_READ_BYTES = 16 << 10
# How long a client with TLS may take to confirm the end of its connection when the server stops. asyncio waits 30 s.
_CLOSING_SECONDS = 3.0
# Otherwise the system takes a megabyte and more, and the rest waits until a third of that is read: for much longer than
# the time limit, if the client is slow.
_UNSENT_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_HEAD_END = re.compile(rb"[^\r\n]\r?\n\r?\n")
# Bytes of an end that may have arrived without its last one.
_MAX_BEGUN_END_BYTES = 4
# Clients in Java offer HTTP/2 so. A server may ignore it, but the parser would take the body for another protocol.
_UPGRADE = re.compile(rb"\r?\n(?:upgrade|http2-settings):[^\r\n]*(?:\r?\n[ \t][^\r\n]*)*(?=\r?\n)", re.IGNORECASE)


def connection_limit() -> int:
    """Returns how many connections the process may open."""
    files = open_files.raise_limit()
    return _MAX_CONNECTIONS if files is None else min(max(files - _OTHER_FILES, files // 2), _MAX_CONNECTIONS)


class Connection(HttpToolsProtocol):
    """A connection that must send the head of a request in time. Between requests, uvicorn's own timeout holds.

    `shaking`: keys of the connections whose TLS handshake has not ended, which count too.
    """

    def __init__(
        self,
        *given: Any,
        max_connections: int,
        head_seconds: float,
        send_seconds: float,
        shaking: set[object],
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._max_connections, self._head_seconds, self._send_seconds = max_connections, head_seconds, send_seconds
        self._head_timer: TimerHandle | None = None
        self._send_timer: TimerHandle | None = None
        # Set once the server stops.
        self._is_stopping = False
        self._end_timer: TimerHandle | None = None
        # Since the last message or piece of a body that the application receives.
        self._byte_count = 0
        self._expects_body = False
        self._head = bytearray()
        self._is_parsing = False
        self._closes_after_body = False
        self._unanswered: list[RequestResponseCycle] = []
        self._shaking = shaking
        self._handshake = handshake = object()
        if shaking and len(self.connections) + len(shaking) >= max_connections:
            raise ConnectionAbortedError("there are too many connections")  # asyncio closes this one
        # A protocol does not learn that its handshake has failed, but asyncio's task that accepts it ends then. Event
        # loops without such a task, such as that of Windows, count no handshakes.
        if accepting := asyncio.current_task():
            shaking.add(handshake)
            accepting.add_done_callback(lambda _: shaking.discard(handshake))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes the connection at once if there are too many."""
        self._shaking.discard(self._handshake)
        super().connection_made(transport)
        # Writing pauses as long as anything waits to be sent, so that the time limit applies to short answers too.
        transport.set_write_buffer_limits(high=1, low=0)
        if _UNSENT_OPTION is not None:
            with suppress(OSError):  # the client has left already
                transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _UNSENT_OPTION, _MIN_READ_BYTES)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers, and reports to all requests that the client has left."""
        self._end_head()
        self.resume_writing()
        self._is_stopping = False
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Closes the connection if a head, trailers or the body of a refused request do not end."""
        answered = self.cycle is None or self.cycle.response_complete
        if self._head_timer is None and answered:
            self._begin_head()
        self._byte_count += len(data)
        if data := self._with_whole_head(data):
            super().data_received(data)
        else:
            self._unset_keepalive_if_required()
        refused = self._expects_body and answered
        if self._byte_count > (_MAX_REFUSED_BODY_BYTES if refused else _MAX_HEAD_BYTES):
            if refused:
                self._end()
            else:
                self._refuse_head()

    def _with_whole_head(self, data: bytes) -> bytes:
        """Returns what the parser is to read now: nothing until a head is complete, and no offer of a protocol."""
        if self._is_parsing:
            return data
        # Only what has arrived now is searched: a client may send a head byte by byte.
        begin = max(len(self._head) - _MAX_BEGUN_END_BYTES, 0)
        self._head += data if self._head else data.lstrip(b"\r\n")  # the parser ignores empty lines before a head
        end = _HEAD_END.search(self._head, begin)
        if end is None:
            # Anything else, such as TLS without a certificate, is refused before it has the form of a head.
            return b"" if not self._head or self._head[:1].isalpha() else bytes(self._head)
        head, rest = bytes(self._head[: end.end()]), bytes(self._head[end.end() :])
        self._head.clear()
        return _UPGRADE.sub(b"", head) + rest

    def on_message_begin(self) -> None:
        """Gives what follows to the parser."""
        self._is_parsing = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Ends the timer, and refuses a head that is too large although it arrived at once."""
        self._end_head()
        if self._head_byte_count() > _MAX_HEAD_BYTES:
            self._refuse_head()
            raise ValueError("the head is too large")  # ends the parser, which starts no request
        self._expects_body = True
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_without_chunks, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        self._unanswered = [one for one in (*self._unanswered, self.cycle) if not one.response_complete]
        if len(self._unanswered) > _MAX_PIPELINED:
            self.transport.abort()
        # uvicorn stops reading at the second request, and would not notice that the client leaves.
        self.flow.resume_reading()
        close = partial(self._close, self.cycle)
        self.cycle.transport = cast(
            asyncio.Transport,
            SimpleNamespace(write=self.transport.write, is_closing=self.transport.is_closing, close=close),
        )

    def _head_byte_count(self) -> int:
        lines = sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        return len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n") + lines

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of a request may have at most {_MAX_HEAD_BYTES} bytes: shorten it")

    def _close(self, cycle: RequestResponseCycle) -> None:
        """Closes the connection after a request that is its last one, but reads and ignores the rest of a refused body.

        A client that sends its whole body first would otherwise lose the connection before it reads the refusal.
        """
        if self._expects_body and cycle is self.cycle and cycle.response_complete:
            self._closes_after_body = True
        else:
            self._end()

    def on_body(self, body: bytes) -> None:
        """Leaves the size of the body to the application, unless that has already refused the request."""
        if not self.cycle.response_complete:
            self._byte_count = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begins to count the next head, unless the connection ends with this request."""
        self._byte_count, self._expects_body, self._is_parsing = 0, False, False
        super().on_message_complete()
        if self._closes_after_body:
            self._end()

    def pause_writing(self) -> None:
        """Ends the connection if the client does not read for a time."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Ends the timer."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def _await_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._send_seconds, self._check_reading, size)

    def _check_reading(self, size_before: int) -> None:
        if size_before - self.transport.get_write_buffer_size() >= _MIN_READ_BYTES:
            self._await_reading()
        else:
            _log.warning("a client has stopped reading its answer: the connection is closed")
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP. uvicorn's own answer is a text."""
        self._refuse(
            400, "this is not valid HTTP: correct the request, or use http:// if the server has no certificate"
        )

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection, with an error in OpenAI's form unless an earlier answer is being written."""
        waiting = [one for one in self._unanswered if not one.response_complete]
        arriving = self._expects_body and waiting == [self.cycle] and not self.cycle.response_started
        if not self.transport.is_closing() and (arriving or not waiting):
            answer = errors.answer_to_http_error(HTTPException(status, message, {"connection": "close"}))
            head = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + bytes(answer.body))
        self._end()

    def shutdown(self) -> None:
        """Ends the connection because the server stops, once a request in progress is answered."""
        self._is_stopping = True
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            self._end()
        else:
            super().shutdown()

    def _end(self) -> None:
        """Closes the connection once all is sent. While the server stops, a client with TLS need not confirm that."""
        if not self.transport.is_closing():
            self.transport.close()
        if self._is_stopping and self._end_timer is None:
            self._end_timer = self.loop.call_later(_CLOSING_SECONDS, self._abort_once_sent)

    def _abort_once_sent(self) -> None:
        """Ends the connection, unless a client still reads an answer. At most a buffer of asyncio's is lost."""
        if self.transport.get_write_buffer_size():
            self._end_timer = self.loop.call_later(_CLOSING_SECONDS, self._abort_once_sent)
        else:
            self.transport.abort()

    def _begin_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self.timeout_keep_alive_handler)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def _send_without_chunks(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Sends a part of an answer to a client of HTTP/1.0, which has no chunks: the connection ends with the answer."""
    cycle.chunked_encoding = False
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn would refuse a part of unknown length
    await send(message)
