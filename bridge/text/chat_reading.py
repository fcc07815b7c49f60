"""Reads a chat back from the prompt that a model's chat template made of it.

An engine reports ids. If they are a chat in the engine's template, a draft should read the chat in its own template.
What the template writes around messages is learned from chats with known contents; a chat that was read counts only if
the template makes exactly the same ids of it again.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import product

from bridge.errors import InvalidRequest, UnusableModel
from bridge.text.chat import Chat, Message, render_chat, tried
from bridge.text.models import Model, derived

# Contents that no template writes itself, and that no template changes.
_SYSTEM, _FIRST, _ANSWER, _SECOND = "qsysq", "qfirstq", "qanswerq", "qsecondq"


@dataclass(frozen=True)
class _Frame:
    """What a template writes before the first message, between two messages, and at the end.

    `system_end`: what it writes after a system message; "" for a chat without one.
    """

    start: str
    system_end: str
    to_assistant: str
    to_user: str
    end: str


def read_chat(model: Model, ids: Sequence[int]) -> Chat | None:
    """Returns the chat of which the model's template makes `ids`, up to the assistant's turn; None if it finds none."""
    with suppress(InvalidRequest, UnusableModel, UnicodeDecodeError):
        for text, frame in product(_texts(model, ids), _frames(model, date.today())):
            chat = _parsed(text, frame)
            if chat and render_chat(model, chat).ids == list(ids):
                return chat
    return None


def _texts(model: Model, ids: Sequence[int]) -> list[str]:
    """Returns what the ids may stand for, with control tokens by their names.

    A tokenizer may put a dummy space in front of a text, and in front of the text after each control token.
    """
    words, parts = model.vocabulary, [bytearray()]
    for id_ in ids:
        if id_ in words.control:
            parts += [bytearray(words.name(id_).encode()), bytearray()]
        else:
            parts[-1] += words.token_bytes(id_)
    texts = [b"".join(parts).decode()]
    if words.dummy_prefix:
        texts.append(b"".join(part.removeprefix(b" ") for part in parts).decode())
        texts.append(b"".join([parts[0].removeprefix(b" "), *parts[1:]]).decode())
    return texts


@derived
def _frames(model: Model, day: date) -> tuple[_Frame, ...]:
    """Returns the frames with and without a system message, as they are on a `day`: many templates write the date."""
    turns = (Message("user", _FIRST), Message("assistant", _ANSWER), Message("user", _SECOND))
    found = []
    # First without a system message: a template may write a default one.
    for messages in (turns, (Message("system", _SYSTEM), *turns)) if model.chat_template else ():
        contents = [one.content for one in messages]
        written = tried(model, Chat(messages))
        any_content = "|".join(contents)
        # A template may have no system messages, and may change, move or repeat a message.
        if written is None or re.findall(any_content, written[0]) != contents:
            continue
        start, *system_end, to_assistant, to_user, end = re.split(any_content, written[0])
        if start and to_assistant and to_user and end:
            found.append(_Frame(start, "".join(system_end), to_assistant, to_user, end))
    return tuple(found)


def _parsed(text: str, frame: _Frame) -> Chat | None:
    if not (text.startswith(frame.start) and text.endswith(frame.end)):
        return None
    rest, messages = text[len(frame.start) : -len(frame.end)], []
    if frame.system_end:
        content, found, rest = rest.partition(frame.system_end)
        if not found:
            return None
        messages.append(Message("system", content))
    while True:
        content, found, rest = rest.partition(frame.to_assistant)
        messages.append(Message("user", content))
        if not found:
            return Chat(tuple(messages))
        content, found, rest = rest.partition(frame.to_user)
        if not found:
            return None
        messages.append(Message("assistant", content))
