"""Bounds what connections hold before their requests are complete: their number, and the time and size of a head."""

import asyncio
import logging
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

try:
    import resource
except ImportError:  # not on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 100_000
# Files that the process needs besides: channels to services, models, logs.
_OTHER_FILES = 512
_MAX_HEAD_BYTES = 64 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def connection_limit() -> int:
    """Raises the soft limit of open files to the hard one, and returns how many connections fit below it."""
    if resource is None:
        return _MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems report a hard limit that they do not allow
            _log.debug("the limit of open files stays at %d", soft)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(max(soft - _OTHER_FILES, soft // 2), _MAX_CONNECTIONS)


class Connection(HttpToolsProtocol):
    """A connection that must send the head of a request in time. Between requests, uvicorn's own timeout holds."""

    def __init__(self, *given: Any, max_connections: int, head_seconds: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections, self._head_seconds = max_connections, head_seconds
        self._head_timer: TimerHandle | None = None
        self._head_byte_count = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes the connection at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timer."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Closes the connection if a head does not end."""
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        super().data_received(data)
        if self._head_timer is not None:
            self._head_byte_count += len(data)
            if self._head_byte_count > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        """Ends the timer."""
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._head_byte_count = 0
        self._head_timer = self.loop.call_later(self._head_seconds, self.timeout_keep_alive_handler)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
