"""Runs a chat template in this process, without limits of memory and time.

Used inside the processes of the sandbox, and for trusted templates by code that has the model's files.
"""

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bridge.errors import DraftBridgeError, InvalidField, UnusableModel
from services.errors import TemplateLimitExceeded

# About two million tokens of English text.
MAX_TEXT_CHARACTERS = 8_000_000
MEMORY_LIMIT_BYTES = 512 << 20
_MAX_DETAIL_CHARACTERS = 1000


class Outcome(StrEnum):
    """How running a template ended."""

    TEXT = "text"
    REFUSED = "refused"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    TOO_LONG = "too long"


def run_template(template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> str:
    """Implements `bridge.text.models.TemplateRunner`."""
    return text_of(*attempt(template, variables, marks, shield))


def attempt(
    template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]
) -> tuple[Outcome, str]:
    """Returns how running the template ended, and its text or the reason. Raises only what `shield` raises."""
    given = _given.set((str.maketrans("", "", marks), shield))
    try:
        pieces, length = [], 0
        for piece in _compiled(template).generate(variables):
            length += len(piece)
            if length > MAX_TEXT_CHARACTERS:
                return Outcome.TOO_LONG, ""
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # fails for lone surrogates, which a template can write
        return Outcome.TEXT, text
    except DraftBridgeError:
        raise
    except _RefusedError as error:
        return Outcome.REFUSED, _clipped(str(error))
    except MemoryError:
        return Outcome.OUT_OF_MEMORY, ""
    except Exception as error:  # a template is a program and may fail in any way
        return Outcome.FAILED, _clipped(f"{type(error).__name__}: {error}")
    finally:
        _given.reset(given)


def text_of(outcome: Outcome, detail: str) -> str:
    """Returns the text of a template that succeeded.

    Raises `InvalidField` if the template refused the chat, `TemplateLimitExceeded` if it exceeded a limit, and
    `UnusableModel` if it failed.
    """
    match outcome:
        case Outcome.TEXT:
            return detail
        case Outcome.REFUSED:
            raise InvalidField("chat.messages", f"as the model's chat template wants them ({detail})", "others")
        case Outcome.OUT_OF_MEMORY:
            raise TemplateLimitExceeded("memory", f"{MEMORY_LIMIT_BYTES >> 20} MiB of memory")
        case Outcome.TOO_LONG:
            raise TemplateLimitExceeded("text", f"{MAX_TEXT_CHARACTERS} characters of text")
        case Outcome.FAILED:
            raise UnusableModel(
                f"the model's chat template failed ({detail}): fix the template, or send a prompt instead of a chat"
            )


def _clipped(text: str) -> str:
    """Returns the beginning of an error text with lone surrogates replaced."""
    return text[:_MAX_DETAIL_CHARACTERS].encode(errors="replace").decode()


# The marks to remove and the `shield` function, which `tojson` needs and a template must not reach.
_given: ContextVar[tuple[dict[int, int | None], Callable[[str], str]]] = ContextVar("given")


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


class _RefusedError(Exception):
    """The template called `raise_exception`, for instance because roles do not alternate."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


@pass_context  # prevents Jinja from evaluating constants once for all chats, with the marks of one of them
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without HTML escapes, unlike Jinja's own filter, as published templates expect.

    The JSON may spell markup that none of its strings spells. So the old marks are removed from the value, and the JSON
    is shielded as a whole.
    """
    marks, shield = _given.get()
    bare = json.loads(json.dumps(value, ensure_ascii=False).translate(marks))
    return shield(
        json.dumps(bare, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
