"""A chat is read back from the ids that a template made of it, or it is not read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.text.chat import Chat, Message, render_chat
from bridge.text.chat_reading import read_chat
from bridge.text.models import Model
from services.sandbox.jinja import run_template
from tests.support import tiny

TURNS = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] | trim }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# A default system message, as in Qwen's template, and without control tokens.
PLAIN = (
    "{% if messages[0]['role'] != 'system' %}### You are helpful.\n{% endif %}{% for message in messages %}"
    "### {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}### assistant:"
)
# No system messages, as Gemma's.
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS


def of(template: str, kind: str = "byte_level") -> Model:
    return tiny.model(kind, chat_template=template)


def chat(*contents: str, system: str = "") -> Chat:
    roles = ("user", "assistant") * len(contents)
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=False)]
    return Chat((*([Message("system", system)] if system else []), *turns))


@pytest.mark.parametrize("template", [TURNS, PLAIN, REFUSING], ids=["turns", "plain", "refusing"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_what_was_rendered_is_read(template: str, kind: str) -> None:
    model = of(template, kind)
    for one in (chat("Hello"), chat("Hello", "Hi!", "Who are you?"), chat("a", "b", "c", "d", "e")):
        assert read_chat(model, render_chat(model, one).ids) == one
    if template is not REFUSING:
        one = chat("Hello", "Hi!", "Grüße aus Köln", system="Answer briefly.")
        assert read_chat(model, render_chat(model, one).ids) == one


def test_what_is_no_chat_is_not_read() -> None:
    model = of(TURNS)
    assert read_chat(model, model.vocabulary.prompt("The quick brown fox", framed=True).ids) is None
    assert read_chat(model, []) is None
    assert read_chat(of(""), render_chat(of(""), chat("Hello")).ids) is None
    assert read_chat(of("{{ nothing.at.all }}"), [5, 6]) is None
    ids = render_chat(model, chat("Hello")).ids
    assert read_chat(model, ids[:-1]) is None
    assert read_chat(model, [*ids, *model.vocabulary.pieces(b"Sure").ids]) is None


@given(st.lists(st.text(max_size=12), min_size=1, max_size=3), st.sampled_from([TURNS, PLAIN]))
def test_a_chat_that_was_read_renders_the_same_ids(contents: list[str], template: str) -> None:
    model = of(template)
    contents = [one.encode(errors="replace").decode() for one in contents]
    ids = render_chat(model, chat(*contents[: len(contents) - (len(contents) + 1) % 2])).ids
    found = read_chat(model, ids)
    assert found is None or render_chat(model, found).ids == ids


def test_a_template_that_writes_the_date_is_read_on_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [date(2026, 7, 2), date(2026, 7, 1)]

    class Calendar:
        @staticmethod
        def today() -> date:
            return days[-1]

    def run(template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> str:
        return f"Today: {days[-1]}\n" + run_template(template, variables, marks, shield)

    monkeypatch.setattr("bridge.text.chat_reading.date", Calendar)
    model = replace(of(TURNS), run_template=run)
    while days:
        assert read_chat(model, render_chat(model, chat("Hello")).ids) == chat("Hello")
        days.pop()
