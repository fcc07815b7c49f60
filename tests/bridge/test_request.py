"""Tests how many tokens a request may generate."""

import pytest

from bridge.errors import MaxTokensTooLarge, PromptTooLong
from bridge.request import Request, token_room
from tests.support import tiny

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
