"""Configures the log of a process: text or JSON, each line with the id of the request that it belongs to.

The log holds nothing that a client wrote: no prompt, no generated text, no name or header of a request. A client may
choose the request's id, of harmless characters. Tracebacks leave out the texts of exceptions that occur in a request,
because these may quote it; `--log-level debug` shows them. Engines are exempt: they know only token ids.
"""

import json
import logging
import re
import secrets
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ENGINES = "services.engines."
# Attributes of a log record that become fields of a JSON line; `extra=` sets them.
_FIELDS = ("method", "code", "seconds")

# The id of the request that the present task works for; empty outside of requests.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important lines that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def read_request_id(metadata: Iterable[tuple[str, Any]]) -> str:
    """Returns the id that a caller sent, or a new one if it sent none or one that does not belong into a log."""
    sent = next((value for key, value in metadata if key == REQUEST_ID_KEY), "")
    return sent if isinstance(sent, str) and _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)


def configure(format_: LogFormat, level: LogLevel) -> None:
    """Sends the log of this process to standard error in a format, from a level on."""
    handler = logging.StreamHandler()
    quotes = level is LogLevel.DEBUG
    handler.setFormatter(_JsonFormatter(quotes) if format_ is LogFormat.JSON else _TextFormatter(quotes))
    # Libraries log what this process's user cannot act on.
    logging.basicConfig(
        level=max(logging.getLevelName(level.value.upper()), logging.WARNING), handlers=[handler], force=True
    )
    for name in ("bridge", "services"):
        logging.getLogger(name).setLevel(level.value.upper())


class _TextFormatter(logging.Formatter):
    """Writes `LEVEL name [request id]: message`."""

    def __init__(self, quotes: bool) -> None:
        super().__init__()
        self._quotes = quotes

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        id_ = f" [{request_id.get()}]" if request_id.get() else ""
        line = f"{record.levelname} {record.name}{id_}: {record.getMessage()}"
        text = _traceback(record, self._quotes)
        return f"{line}\n{text}" if text else line


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def __init__(self, quotes: bool) -> None:
        super().__init__()
        self._quotes = quotes

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id_ := request_id.get():
            fields["request_id"] = id_
        fields |= {name: vars(record)[name] for name in _FIELDS if name in vars(record)}
        if text := _traceback(record, self._quotes):
            fields["traceback"] = text
        return json.dumps(fields)


def _traceback(record: logging.LogRecord, quotes: bool) -> str:
    """Formats a record's traceback. In a request, only with `quotes` does it contain the texts of the exceptions."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return ""
    if quotes or not request_id.get() or record.name.startswith(_ENGINES):
        return "".join(traceback.format_exception(error)).rstrip("\n")
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines: list[str] = []
    for one in reversed(chain):
        lines += ["Traceback (most recent call last):\n", *traceback.format_tb(one.__traceback__)]
        lines.append(f"{type(one).__module__}.{type(one).__qualname__} (its text is logged at level debug)\n")
    return "".join(lines).rstrip("\n")
