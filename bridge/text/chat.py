"""What a user asked for, in the tokens of one model: a text, or a chat in the model's own template."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from bridge.errors import InvalidField, InvalidRequest, UnusableModel
from bridge.text.models import Model
from bridge.text.vocabulary import Marks, Rendering, Vocabulary

# What the bridge itself gives to a template, and the functions that Jinja does.
_RESERVED = {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token"} | {
    "range", "dict", "lipsum", "cycler", "joiner", "namespace",
}  # fmt: skip


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
        if name in _RESERVED:
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
    except (InvalidRequest, UnusableModel):
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

    def shield(text: str) -> str:
        return _shield(text, model, marks)

    messages = _each_text(given, shield)
    if not model.chat_template:
        # Instruction tuned or not, a language model continues a transcript.
        turns = [f"{one['role'].capitalize()}: {one['content']}\n\n" for one in messages]
        return "".join(turns) + "Assistant:", marks
    variables = {
        **_each_text(chat.variables, shield),
        **model.control,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    assert model.run_template, "a model with a chat template has something that runs it"
    return model.run_template(model.chat_template, variables, marks.split + marks.literal, shield), marks


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
