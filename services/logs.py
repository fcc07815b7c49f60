"""Configures the log of a process: text or JSON, each line with the id of the request that it belongs to.

The log holds nothing that a client wrote: no prompt, no generated text, no name or header of a request. A client may
choose the request's id, and an engine its name, of harmless characters. Tracebacks leave out exceptions' messages,
because a library's may quote a request: types and places are what a bug report needs. Engines of this repository are
exempt: they know only token ids.
"""

import json
import logging
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from traceback import TracebackException, format_exception
from typing import Any

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ENGINES = "services.engines."
_GRPC = "grpc._cython.cygrpc"
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


def loggable(name: str) -> str:
    """Returns a name that a client chose, or the request's id if the name does not belong into a log."""
    return name if _REQUEST_ID.fullmatch(name) else f"of request {request_id.get()}"


def configure(format_: LogFormat, level: LogLevel) -> None:
    """Sends the log of this process to standard error in a format, from a level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format_ is LogFormat.JSON else TextFormatter())
    # Libraries log what this process's user cannot act on.
    logging.basicConfig(
        level=max(logging.getLevelName(level.value.upper()), logging.WARNING), handlers=[handler], force=True
    )
    for name in ("bridge", "services"):
        logging.getLogger(name).setLevel(level.value.upper())
    logging.getLogger(_GRPC).addFilter(_is_of_no_departure)


def _is_of_no_departure(record: logging.LogRecord) -> bool:
    """Returns False for the traceback that gRPC logs if a client leaves just as a part of its answer is being sent."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


class TextFormatter(logging.Formatter):
    """Writes `LEVEL name [request id]: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        id_ = f" [{request_id.get()}]" if request_id.get() else ""
        line = f"{record.levelname} {record.name}{id_}: {_message(record)}"
        text = _traceback(record)
        return f"{line}\n{text}" if text else line


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if id_ := request_id.get():
            fields["request_id"] = id_
        fields |= {name: vars(record)[name] for name in _FIELDS if name in vars(record)}
        if text := _traceback(record):
            fields["traceback"] = text
        return json.dumps(fields)


def _message(record: logging.LogRecord) -> str:
    """Returns the message; asyncio's further lines have the exception's own."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name == "asyncio" and record.exc_info else message


def _traceback(record: logging.LogRecord) -> str:
    """Formats a record's traceback; only that of an engine has the messages of its exceptions."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return ""
    if record.name.startswith(_ENGINES):
        return "".join(format_exception(error)).rstrip("\n")
    return "\n".join(_without_messages(TracebackException.from_exception(error)))


def _without_messages(trace: TracebackException) -> list[str]:
    before = trace.__cause__ or (None if trace.__suppress_context__ else trace.__context__)
    lines = [*_without_messages(before), "which led to:"] if before else []
    # As of Python 3.13 the type is to be had only as a text, which begins with its module.
    name = getattr(trace, "exc_type_str", "").rpartition(".")[2] or getattr(trace.exc_type, "__name__", "?")
    lines += [f"{name}, at:", *(line.rstrip("\n") for line in trace.stack.format())]
    for one in trace.exceptions or ():
        lines += _without_messages(one)
    return lines
