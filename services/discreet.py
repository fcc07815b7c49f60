"""Logging that leaves out what clients send.

Log lines of ours never contain it. An exception of a library may, so a traceback is logged without the exceptions'
messages: their types and places are what a bug report needs.
"""

import logging
from traceback import TracebackException
from typing import Any


class DiscreetFormatter(logging.Formatter):
    """Formats exceptions as their types and places, without their messages."""

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Returns the traceback of an exception and of those that caused it."""
        error = ei[1]
        return "\n".join(_lines(TracebackException.from_exception(error))) if error else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line of a record; asyncio's further lines have the exception's message."""
        if record.name == "asyncio" and record.exc_info:
            record.message = record.message.partition("\n")[0]
        return super().formatMessage(record)


def discreet_logging(level: int) -> None:
    """Logs to standard error, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(DiscreetFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _lines(trace: TracebackException) -> list[str]:
    before = trace.__cause__ or (None if trace.__suppress_context__ else trace.__context__)
    lines = [*_lines(before), "which led to:"] if before else []
    name = trace.exc_type_str if hasattr(trace, "exc_type_str") else getattr(trace.exc_type, "__qualname__", "?")
    lines += [f"{name}, at:", *(line.rstrip("\n") for line in trace.stack.format())]
    for one in trace.exceptions or ():
        lines += _lines(one)
    return lines
