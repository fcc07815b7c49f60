"""What a user asked for, in the tokens of one model: a text, or a chat in the model's own template."""

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bridge.errors import DraftBridgeError, InvalidField, UnusableModel
from bridge.models import Model
from bridge.vocabulary import Marks, Rendering, Vocabulary

# For models without a template, instruction tuned or not: a transcript that any language model continues.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Far more than any chat has messages.
_MOST_TURNS = 100_000
# What the bridge itself says to a template.
_RESERVED = ("messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class Message:
    """One turn of a chat. `fields`: what a template may want beside, such as `tool_calls` or `name`."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """Messages, and what else the models' templates are given, such as `tools`. Values are those of JSON."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)


def render_text(vocabulary: Vocabulary, text: str) -> Rendering:
    """A prompt as the model's tokenizer takes it: control tokens understood, beginning of text added."""
    return vocabulary.prompt(text, framed=True)


def render_chat(model: Model, chat: Chat) -> Rendering:
    """A chat in the model's own template (plain transcript if it has none), ready for the assistant's turn.

    A control token spelled in a message, or in anything else that the user gives, is plain text: it is broken
    with a mark that nobody wrote before rendering, and encoded in two parts. A template that passes on what it is
    given, whole, trimmed, cut or joined, keeps it so; one that makes new text of it, letter by letter, need not.
    Raises `InvalidField` for a chat that the template refuses, `UnusableModel` for a template that fails.
    """
    for name in chat.variables:
        if name in _RESERVED or name in DEFAULT_NAMESPACE:
            raise InvalidField("chat.template_variables", f"without {name!r}, which the bridge sets itself", "it")
    text, marks = _rendered(model, chat, add_generation_prompt=True)
    # A template writes its own beginning of text; the plain transcript gets the tokenizer's.
    return model.vocabulary.prompt(text, marks, framed=not model.chat_template)


def render_text_for(model: Model, text: str, source: Model) -> Rendering:
    """A prompt that was written for `source`: its control tokens become those of the same role in `model`."""
    if model.vocabulary is source.vocabulary:
        return render_text(model.vocabulary, text)
    parts: list[str | int] = []
    done = 0
    for start, end in sorted(
        source.vocabulary.spans(text, source.vocabulary.controls), key=lambda span: (span[0], -span[1])
    ):
        id_ = source.vocabulary.control_id(text[start:end])
        if start >= done and id_ is not None:
            parts += [text[done:start], id_]
            done = end
    return _render_parts(model, [*parts, text[done:]], source)


def render_ids_for(model: Model, ids: Sequence[int], source: Model) -> Rendering:
    """A prompt that was given in ids of `source`, in the tokens of `model`."""
    if model.vocabulary is source.vocabulary:
        return Rendering(list(ids), len(ids), b"")
    parts: list[str | int] = []
    said = bytearray()
    try:
        for id_ in ids:
            if id_ in source.vocabulary.control:
                parts += [said.decode(), id_]
                said.clear()
            else:
                said += source.vocabulary.token_bytes(id_)
        parts.append(said.decode())
        if source.vocabulary.dummy_prefix:
            # The space in front is of no text's own.
            first = next((i for i, part in enumerate(parts) if isinstance(part, str) and part), len(parts) - 1)
            parts[first] = str(parts[first]).removeprefix(" ")
        return _render_parts(model, parts, source)
    except UnicodeDecodeError:  # not a text, so nothing but bytes
        data, frame = source.vocabulary.spell(ids), model.vocabulary.frame
        return Rendering([*frame, *model.vocabulary.pieces(data, whole=True).ids], len(frame), data)


@lru_cache(maxsize=256)
def end_of_turn(model: Model) -> int | None:
    """The id that ends the assistant's turn in the model's template; None if that cannot be seen."""
    if not model.chat_template:
        return None
    try:
        text, marks = _rendered(
            model, Chat((Message("user", "a"), Message("assistant", "b"))), add_generation_prompt=False
        )
        ids = model.vocabulary.prompt(text, marks, framed=False).ids
    except DraftBridgeError:
        return None
    return next((id_ for id_ in reversed(ids) if id_ in model.special_ids.eos), None)


def _render_parts(model: Model, parts: Sequence[str | int], source: Model) -> Rendering:
    """Texts, and control tokens of `source` between them."""
    texts = [part for part in parts if isinstance(part, str)]
    marks = _unused_marks(texts)
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += _shield(part, model, marks)
        elif text or part != source.special_ids.bos:  # at the very beginning, the model's own frame stands
            counterpart = model.counterpart(part, source)
            written = source.vocabulary.name(part)
            # What the model has no token for stays as it is written, as text.
            text += _shield(written, model, marks) if counterpart is None else model.vocabulary.name(counterpart)
    return model.vocabulary.prompt(text, marks, framed=True)


def _rendered(model: Model, chat: Chat, *, add_generation_prompt: bool) -> tuple[str, Marks]:
    """What the template writes, and the marks that keep what the user gave from being markup."""
    given = [{**one.fields, "role": one.role, "content": one.content} for one in chat.messages]
    marks = _unused_marks([json.dumps([given, dict(chat.variables)], ensure_ascii=False)])

    def shield(value: Any) -> Any:
        return _each_text(value, lambda text: _shield(text, model, marks))

    variables = {
        "range": _Range(),
        **shield(chat.variables),
        **model.control,
        "messages": shield(given),
        "add_generation_prompt": add_generation_prompt,
        "_marks": marks,
        "_shield": shield,
    }
    try:
        return _compiled(model.chat_template or PLAIN_TEMPLATE).render(variables), marks
    except _RefusedError as error:
        raise InvalidField("chat.messages", f"as the model's chat template wants them ({error})", "others") from error
    except Exception as error:  # a template is a program, and can fail like any
        raise UnusableModel(
            f"the model's chat template failed ({type(error).__name__}: {error}): mend the template, or send a prompt "
            "instead of a chat"
        ) from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


class _Range:
    """`range` as templates have it, for so many turns in all: a template of loops in loops would not come to an end."""

    def __init__(self) -> None:
        self._left = _MOST_TURNS

    def __call__(self, *arguments: int) -> range:
        turns = range(*arguments)
        self._left -= len(turns)
        if self._left < 0:
            raise OverflowError(f"more than {_MOST_TURNS} turns of loops")
        return turns


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's own, and no text or number that grows beyond measure."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses what would fill the memory."""
        if operator == "**" or len(left if isinstance(left, Sized) else right if isinstance(right, Sized) else ()):
            count = max((one for one in (left, right) if isinstance(one, int)), default=0)
            if count > _MOST_TURNS:
                raise OverflowError(f"{operator} with {count}")
        return super().call_binop(context, operator, left, right)


class _RefusedError(Exception):
    """A template refuses a chat, for instance because roles do not alternate."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates of the hub expect it: not escaped for HTML, as Jinja's own is. Marks are no part of the value."""
    marks: Marks = context["_marks"]
    shield: Callable[[str], str] = context["_shield"]

    bare = _each_text(value, lambda text: marks.out_of(text.encode()).decode())
    return shield(
        json.dumps(bare, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): _each_text(one, change) for key, one in value.items()}
        case list() | tuple():
            return [_each_text(one, change) for one in value]
    return value


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _shield(text: str, model: Model, marks: Marks) -> str:
    """`text` with the model's markup broken behind its first character, or where that is all of it, made literal.

    An end that would become markup together with other markup beside it is broken off, too.
    """
    shielded = _broken(text, model, marks)
    while model.vocabulary.normalizes_added:
        # Until nothing is left that was hidden behind what is broken now.
        again = marks.split.join(_broken(part, model, marks) for part in shielded.split(marks.split))
        if again == shielded:
            break
        shielded = again
    begins, ends = model.markup.may_join(text)
    return marks.split * begins + shielded + marks.split * ends


def _broken(text: str, model: Model, marks: Marks) -> str:
    places = {(start + (end - start > 1), end - start > 1) for start, end in model.vocabulary.spans(text, model.markup)}
    broken, done = "", 0
    for place, split in sorted(places):
        if text[place - 1 : place] != marks.literal:
            broken += text[done:place] + (marks.split if split else marks.literal)
            done = place
    return broken + text[done:]


def _unused_marks(texts: Sequence[str]) -> Marks:
    # Noncharacters: Unicode reserves them for use inside a program.
    unused = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if not any(mark in text for text in texts)]
    if len(unused) < 2:
        raise InvalidField("the prompt", "free of at least two of the noncharacters U+FDD0 to U+FDEF", "nearly all")
    return Marks(*unused[:2])
