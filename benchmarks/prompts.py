"""Reads prompts for benchmarks: a .txt file with one on each line, a JSON list, or JSON lines as in Spec-Bench.

`OWN`, the default, has 12 prompts in six categories. See `services.cli.bench.read_prompts`.
"""

from typing import Any

from bridge.text.chat import Chat, Message
from services.cli.bench import OWN_PROMPTS as OWN
from services.cli.bench import read_prompts as read

__all__ = ["OWN", "as_input", "read"]


def as_input(prompt: dict[str, Any]) -> str | Chat:
    """Returns what a `Request` takes."""
    if "prompt" in prompt:
        return str(prompt["prompt"])
    return Chat(tuple(Message(one["role"], one["content"]) for one in prompt["messages"]))
