"""Reads prompts from a file in this repository's format or in that of Spec-Bench."""

import json
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from bridge.text.chat import Chat, Message

# The prompts of the tests, which are the default.
OWN = Path(__file__).parents[1] / "tests" / "prompts.json"


def read(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Returns dictionaries with a `category` and either `prompt` or `messages`, at most `count`, from all categories.

    `path`: a JSON list of them, or JSON lines with `turns` as in Spec-Bench, of which the first is taken.
    """
    text = path.read_text(encoding="utf-8")
    found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        if "turns" in one:
            one = {"category": one["category"], "messages": [{"role": "user", "content": one["turns"][0]}]}
        by_category[one.get("category", "")].append(one)
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return [one for one in in_turn if one][:count]


def as_input(prompt: dict[str, Any]) -> str | Chat:
    """Returns the prompt as the input of a `Request`."""
    if "prompt" in prompt:
        return str(prompt["prompt"])
    return Chat(tuple(Message(one["role"], one["content"]) for one in prompt["messages"]))
