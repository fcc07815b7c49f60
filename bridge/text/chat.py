"""Renders a user's input in the tokens of one model: a text, ids, or a chat in the model's own template."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bridge.errors import DraftBridgeError, InvalidField, InvalidRequest, UnusableModel
from bridge.text.json_objects import read_object
from bridge.text.models import Model, derived
from bridge.text.vocabulary import Marks, Rendering
from bridge.threads import is_large

# The variables that the bridge sets for a template, and Jinja's own global functions.
_RESERVED = {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token"} | {
    "range", "dict", "lipsum", "cycler", "joiner", "namespace",
}  # fmt: skip


@dataclass(frozen=True)
class Message:
    """One turn of a chat. `fields` holds further fields for the template, such as `tool_calls` or `name`."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """The messages and further variables of the models' templates, such as `tools`. All values are JSON values."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def byte_count(self) -> int:
        """Returns the size of all of it. The first time, this takes as long as writing it."""
        further = [dict(self.variables), *(dict(one.fields) for one in self.messages)]
        texts = [text for one in self.messages for text in (one.role, one.content)]
        return sum(map(byte_count, texts)) + byte_count(json.dumps(further, ensure_ascii=False))


def measured(chat: Chat) -> Chat:
    """Computes the chat's size, and returns the chat. Large ones are read in a thread, where this delays nobody."""
    _ = chat.byte_count
    return chat


def byte_count(text: str) -> int:
    """Returns the size of a text in UTF-8, also of one with lone surrogates, which a request may have."""
    return len(text.encode("utf-8", "surrogatepass"))


def render_chat(model: Model, chat: Chat) -> Rendering:
    """Renders a chat in the model's own template, or as a plain transcript without one, up to the assistant's turn.

    A control token spelled in a message, or in any other value from the user, is plain text: a mark that occurs in no
    value splits it before rendering, and its two parts are encoded separately. This holds for a template that copies,
    trims, cuts or joins values, but not for one that makes new text of their single characters. Not split is what the
    template looks for in the assistant's own messages; see `Model.looked_for`.
    Raises `InvalidField` for a chat that the template refuses, `UnusableModel` for a template that fails.
    """
    for name in chat.variables:
        if name in _RESERVED:
            raise InvalidField("chat.template_variables_json", f"without the reserved name {name!r}", "it")
    adapted = replace(chat, messages=_adapted(model, chat.messages))
    text, marks = _rendered(model, adapted, add_generation_prompt=True)
    # A template writes the initial control tokens itself; for a plain transcript the tokenizer adds them.
    return model.prompt(text, marks, framed=not model.chat_template)


def chat_threads(model: Model, byte_count: int) -> Executor:
    """Returns the threads that render chats of that size for a model, see `bridge.threads`.

    Each model has its own, because its template may take seconds and renders one chat at a time. Models with the same
    template share the process that runs it.
    """
    return _chat_threads(model)[is_large(byte_count)]


@derived
def _chat_threads(model: Model) -> tuple[Executor, Executor]:
    # Two for short chats: while the template hangs for one chat, the other thread refuses those that find it busy.
    return ThreadPoolExecutor(2, "chat"), ThreadPoolExecutor(1, "large chat")


def check_tools(model: Model, chat: Chat, rendering: Rendering) -> None:
    """Raises `InvalidField` if `rendering`, that of the chat, would be the same without its tools or their calls."""
    if chat.variables.get("tools"):
        others = {name: value for name, value in chat.variables.items() if name != "tools"}
        _check_use(model, replace(chat, variables=others), rendering, "chat.template_variables_json.tools")
    calling = next((place for place, one in enumerate(chat.messages) if one.fields.get("tool_calls")), None)
    if calling is not None:
        messages = tuple(
            replace(one, fields={key: value for key, value in one.fields.items() if key != "tool_calls"})
            for one in chat.messages
        )
        _check_use(model, replace(chat, messages=messages), rendering, f"chat.messages[{calling}].tool_calls")


def _check_use(model: Model, without: Chat, rendering: Rendering, name: str) -> None:
    """Raises `InvalidField` if the chat without the field of that name has the same rendering."""
    try:
        unused = render_chat(model, without) == rendering
    except (InvalidRequest, UnusableModel):  # the template needs the field
        return
    if unused:
        allowed = f"left out, because the chat template of {model.name} has no place for them"
        raise InvalidField(name, allowed)


def render_text_for(model: Model, text: str, source: Model) -> Rendering:
    """Renders a prompt that was written for `source`: control tokens become those of the same role in `model`."""
    if model.vocabulary is source.vocabulary:
        return model.prompt(text, framed=True)
    parts: list[str | int] = []
    done = 0
    spans = source.vocabulary.spans(text, source.vocabulary.controls)
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        id_ = source.vocabulary.control_id(text[start:end])
        if start >= done and id_ is not None:
            parts += [text[done:start], id_]
            done = end
    return _render_parts(model, [*parts, text[done:]], source)


def render_ids_for(model: Model, ids: Sequence[int], source: Model) -> Rendering:
    """Renders a prompt of `source`'s ids in the tokens of `model`."""
    if model.vocabulary is source.vocabulary:
        return Rendering(list(ids), len(ids), b"")
    parts: list[str | int] = []
    data = bytearray()
    try:
        for id_ in ids:
            if id_ in source.vocabulary.control:
                parts += [data.decode(), id_]
                data.clear()
            else:
                data += source.vocabulary.token_bytes(id_)
        parts.append(data.decode())
        if source.vocabulary.dummy_prefix:
            # The tokenizer's dummy space in front is not part of the text.
            first = next((i for i, part in enumerate(parts) if isinstance(part, str) and part), len(parts) - 1)
            parts[first] = str(parts[first]).removeprefix(" ")
        return _render_parts(model, parts, source)
    except UnicodeDecodeError:  # the ids do not spell a text, so control tokens are dropped and bytes are encoded
        spelled, frame = source.vocabulary.spell(ids), model.vocabulary.frame
        return Rendering([*frame, *model.vocabulary.pieces(spelled, whole=True).ids], len(frame), spelled)


def end_of_turn(model: Model) -> int | None:
    """Returns the id that ends the assistant's turn in the model's template, or else the first that ends a text."""
    try:
        shown = _shown_end_of_turn(model)
    except DraftBridgeError:  # the process for templates is busy, so the next call tries again
        shown = None
    return next(iter(model.special_ids.eos), None) if shown is None else shown


@derived
def _shown_end_of_turn(model: Model) -> int | None:
    if not (model.chat_template and model.run_template):
        return None
    chat = Chat((Message("user", "a"), Message("assistant", "b")))
    found = tried(model, chat, add_generation_prompt=False)
    if found is None:
        return None
    ids = model.vocabulary.prompt(*found, framed=False).ids
    return next((id_ for id_ in reversed(ids) if id_ in model.special_ids.eos), None)


def _render_parts(model: Model, parts: Sequence[str | int], source: Model) -> Rendering:
    """Renders texts and the control tokens of `source` between them."""
    texts = [part for part in parts if isinstance(part, str)]
    marks = _unused_marks(texts)
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += _shield(part, model, marks)
        elif text or part != source.special_ids.bos:  # the model's own frame replaces a bos at the very beginning
            counterpart = model.counterpart(part, source)
            written = source.vocabulary.name(part)
            # A control token without a counterpart becomes text, in its written form.
            text += _shield(written, model, marks) if counterpart is None else model.vocabulary.name(counterpart)
    return model.prompt(text, marks, framed=True)


def _rendered(model: Model, chat: Chat, *, add_generation_prompt: bool) -> tuple[str, Marks]:
    """Returns the template's text, and the marks in it that keep the user's values from becoming markup.

    The chat is in the form that the template knows; see `_adapted`.
    """
    given = [{**one.fields, "role": one.role, "content": one.content} for one in chat.messages]
    marks = _unused_marks([json.dumps([given, dict(chat.variables)], ensure_ascii=False)])

    def shield(text: str) -> str:
        return _shield(text, model, marks)

    messages = _each_text(given, shield)
    for shielded, one in zip(messages, chat.messages, strict=True):
        if one.role == "assistant":
            shielded["content"] = _shield_parts(one.content, model, marks)
    if not model.chat_template:
        # Any language model, even without instruction tuning, continues a transcript.
        turns = [f"{one['role'].capitalize()}: {one['content']}\n\n" for one in messages]
        return "".join(turns) + "Assistant:", marks
    variables = {
        **_each_text(chat.variables, shield),
        **model.control,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    assert model.run_template, "a model with a chat template has a template runner"
    return model.run_template(model.chat_template, variables, marks.split + marks.literal, shield), marks


def tried(model: Model, chat: Chat, *, add_generation_prompt: bool = True) -> tuple[str, Marks] | None:
    """Returns the chat's text and marks, or None if the template refuses the chat or fails for it.

    A limit that it exceeded shows what the machine has to do at the moment, not what the template is like, so such an
    error is raised.
    """
    try:
        return _rendered(model, chat, add_generation_prompt=add_generation_prompt)
    except (InvalidRequest, UnusableModel) as error:
        if isinstance(error, UnusableModel) and error.reason != UnusableModel.reason:
            raise
        return None


def _adapted(model: Model, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages in the form that the model's template knows."""
    adapted = tuple(messages)
    if any(one.role == "developer" for one in adapted) and _drops_developer(model):
        # OpenAI's newer name of the role.
        adapted = tuple(replace(one, role="system") if one.role == "developer" else one for one in adapted)
    if any(one.fields.get("tool_calls") for one in adapted) and _needs_objects(model):
        adapted = tuple(replace(one, fields=_with_objects(one.fields)) for one in adapted)
    return adapted


@derived
def _drops_developer(model: Model) -> bool:
    """Returns whether the model's template ignores messages of the role `developer`, but not those of `system`."""
    probe, asked = "How are you?", Message("user", "Hello.")
    ignored = _contains(model, (Message("developer", probe), asked), probe) is False
    return ignored and _contains(model, (Message("system", probe), asked), probe) is True


@derived
def _needs_objects(model: Model) -> bool:
    """Returns whether the model's template writes the arguments of tool calls right only if they are an object.

    Clients send JSON text. Some templates copy it; others write its JSON, which doubles the quotes of a text.
    """

    def calling(arguments: Any) -> tuple[Message, ...]:
        function = {"name": "look", "arguments": arguments}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        return (
            Message("user", "Hello."),
            Message("assistant", "", {"tool_calls": calls}),
            Message("tool", "5", {"name": "look", "tool_call_id": "call00000"}),
        )

    as_text = calling('{"what": "a"}')
    doubled = _contains(model, as_text, '{\\"what\\"') is not False  # or the template fails
    return doubled and _contains(model, calling({"what": "a"}), "what") is True


def _contains(model: Model, messages: tuple[Message, ...], text: str) -> bool | None:
    """Returns whether the template's text of the messages contains `text`, or None if the template fails."""
    found = tried(model, Chat(messages))
    if found is None:
        return None
    written, marks = found
    return text in written.replace(marks.split, "").replace(marks.literal, "")


def _with_objects(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message's fields with the arguments of its calls as objects, where they are the text of one."""
    calls = fields.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return fields

    def changed(call: Any) -> Any:
        match call:
            case {"function": {"arguments": str(text)} as function}:
                return {**call, "function": {**function, "arguments": _object(text)}}
            case {"arguments": str(text)}:
                return {**call, "arguments": _object(text)}
        return call

    return {**fields, "tool_calls": [changed(one) for one in calls]}


def _object(text: str) -> Any:
    """Returns the JSON object that a text spells, or the text if it is not one that can be used."""
    try:
        return read_object("arguments", text)
    except InvalidField:
        return text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with `change` applied to every string in it, keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): _each_text(one, change) for key, one in value.items()}
        case list() | tuple():
            return [_each_text(one, change) for one in value]
    return value


def _shield_parts(text: str, model: Model, marks: Marks) -> str:
    """Returns `text` with the parts between those tokens shielded that the template looks for.

    A template that leaves out such a token may join the parts beside it, so these must not become markup together.
    """
    if not model.looked_for:
        return _shield(text, model, marks)
    shielded = ""
    parts = re.split(f"({'|'.join(map(re.escape, sorted(model.looked_for)))})", text)
    for place, part in enumerate(parts):
        if part in model.looked_for:
            shielded += part
        else:
            ends_one, begins_one = model.markup.may_be_cut(part)
            shielded += marks.split * (ends_one and place > 0) + _shield(part, model, marks)
            shielded += marks.split * (begins_one and place < len(parts) - 1)
    return shielded


def _shield(text: str, model: Model, marks: Marks) -> str:
    """Returns `text` with its markup split after the first character, or marked as literal if that is all of it.

    A start or end of the text that could become markup together with what stands next to it is split off, too.
    """
    shielded = _broken(text, model, marks)
    while model.vocabulary.normalizes_added:
        # A split may reveal other markup, so this repeats until nothing changes.
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
