"""Runs a chat template in this process.

The sandbox's processes do so, and tests and benchmarks with templates that they trust: here a template can take all
the memory and all the time there is.
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

from bridge.errors import DraftBridgeError, InvalidField, TemplateLimitExceeded, UnusableModel

# About two million tokens of English.
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
    """Implements `bridge.text.models.TemplateRunner` without limits of memory and time."""
    return text_of(*attempt(template, variables, marks, shield))


def attempt(
    template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]
) -> tuple[Outcome, str]:
    """Returns how running the template ended, with its text or the reason. Raises only what `shield` raises."""
    given = _given.set((str.maketrans("", "", marks), shield))
    try:
        pieces, length = [], 0
        for piece in _compiled(template).generate(variables):
            length += len(piece)
            if length > MAX_TEXT_CHARACTERS:
                return Outcome.TOO_LONG, ""
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # a template can write lone surrogates, which are not text
        return Outcome.TEXT, text
    except DraftBridgeError:
        raise
    except _RefusedError as error:
        return Outcome.REFUSED, _clipped(str(error))
    except MemoryError:
        return Outcome.OUT_OF_MEMORY, ""
    except Exception as error:  # a template is a program, and can fail like any
        return Outcome.FAILED, _clipped(f"{type(error).__name__}: {error}")
    finally:
        _given.reset(given)


def text_of(outcome: Outcome, detail: str) -> str:
    """Returns the text of a template that ran.

    Raises `InvalidField` for one that refused the chat, `TemplateLimitExceeded` for one that went beyond a limit, and
    `UnusableModel` for one that failed.
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
                f"the model's chat template failed ({detail}): mend the template, or send a prompt instead of a chat"
            )


def _clipped(text: str) -> str:
    """Returns the beginning of an error's text, as text that can be sent."""
    return text[:_MAX_DETAIL_CHARACTERS].encode(errors="replace").decode()


# What `tojson` needs and a template must not reach: the marks, to be left out of texts, and the function that sets new.
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
    """A template refuses a chat, for instance because roles do not alternate."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


@pass_context  # otherwise Jinja would compute it once for values written in the template, with the marks of one chat
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Does what templates of the hub expect: unlike Jinja's own, it does not escape for HTML.

    The JSON is new text, in which markup may be spelled that no string in it spells. So old marks are left out of the
    value, and the whole is shielded anew.
    """
    marks, shield = _given.get()
    bare = json.loads(json.dumps(value, ensure_ascii=False).translate(marks))
    return shield(
        json.dumps(bare, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
