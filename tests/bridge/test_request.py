"""Tests which requests are refused, and how many tokens one may generate."""

import pytest

from bridge.errors import EmptyPrompt, InvalidField, MaxTokensTooLarge, PromptTooLong
from bridge.request import Request, token_room
from bridge.text.chat import Chat, Message
from tests.support import tiny
from tests.support.alone import answer

MODEL = tiny.model("byte_level", context_length=10)


def test_prompt_and_text_fill_the_context_exactly() -> None:
    prompt = [70] * 6
    assert token_room(Request("a"), MODEL, prompt) == 4
    assert token_room(Request("a", max_tokens=4), MODEL, prompt) == 4
    with pytest.raises(MaxTokensTooLarge):
        token_room(Request("a", max_tokens=5), MODEL, prompt)
    assert token_room(Request("a"), MODEL, [70] * 9) == 1
    with pytest.raises(PromptTooLong):
        token_room(Request("a"), MODEL, [70] * 10)


@pytest.mark.parametrize("input_", ["a\ud800", Chat((Message("user", "\udfffb"),))])
async def test_lone_surrogates_are_refused(input_: str | Chat) -> None:
    target = tiny.model("byte_level")
    with pytest.raises(InvalidField, match="lone surrogate"):
        await answer(target, tiny.HashEngine(target), None, None, Request(input_), 0.0)


async def test_a_prompt_without_tokens_is_empty() -> None:
    target = tiny.model("wordpiece")
    with pytest.raises(EmptyPrompt):
        await answer(target, tiny.HashEngine(target), None, None, Request(" "), 0.0)
