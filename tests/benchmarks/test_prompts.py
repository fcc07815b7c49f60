"""Tests the prompts that come with the benchmarks."""

import ast
import re
from collections import Counter

from benchmarks.prompts import CODE_EDITS, OWN, options, plain, read


def test_our_own_prompts() -> None:
    counts = Counter(one["category"] for one in read(OWN))
    assert set(counts.values()) == {2} and len(counts) == 6


def test_the_code_edits() -> None:
    prompts = read(CODE_EDITS)
    assert len(prompts) == 20 and {one["category"] for one in prompts} == {"code-edit"}
    assert Counter(one["edit"] for one in prompts) == {"rename": 7, "add a parameter": 7, "fix a bug": 6}
    assert len({one["messages"][0]["content"] for one in prompts}) == 20
    for one in prompts:
        (message,) = one["messages"]
        before, language, code, request = re.split(r"```(python|javascript)?\n?", message["content"])[:4]
        request = message["content"].rpartition("```")[2]
        assert 60 <= len(code.splitlines()) <= 150
        if before.startswith("This is `") and language == "python":
            ast.parse(code)
        for name in re.findall(r"`(\w+)`", request.partition(" to ")[0])[:1]:
            assert name in code, "what to change is in the code"


def test_a_model_without_a_template_continues_the_last_message() -> None:
    chat = {"category": "qa", "messages": [{"role": "user", "content": text} for text in ("one", "two")]}
    text = {"category": "qa", "prompt": "three"}
    assert plain(chat) == {"category": "qa", "prompt": "two"} and plain(text) is text
    assert options(chat) == {"messages": chat["messages"]} and options(text) == {"prompt": "three"}
