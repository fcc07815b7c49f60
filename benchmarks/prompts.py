"""Reads prompts for benchmarks: a .txt file with one on each line, a JSON list, or JSON lines as in Spec-Bench.

`OWN`, the default, has 12 prompts in six categories. `CODE_EDITS` has 20 of one: code of 60 to 150 lines, of this
repository, in which to rename something (7), add a parameter (7) or fix a bug (6). The answer repeats most of the code,
so give it `--tokens 1024` or more. See `services.cli.bench.read_prompts`.
"""

from pathlib import Path
from typing import Any

from bridge.text.chat import Chat, Message
from services.cli.bench import OWN_PROMPTS as OWN
from services.cli.bench import read_prompts as read

__all__ = ["CODE_EDITS", "OWN", "as_input", "options", "plain", "read"]

CODE_EDITS = Path(__file__).with_name("code_edits.jsonl")


def plain(prompt: dict[str, Any]) -> dict[str, Any]:
    """Returns a prompt for a model without a chat template, which continues the last message of a chat."""
    if "prompt" in prompt:
        return prompt
    return {"category": prompt["category"], "prompt": prompt["messages"][-1]["content"]}


def options(prompt: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Client.generate`."""
    return {key: prompt[key] for key in ("prompt", "messages") if key in prompt}


def as_input(prompt: dict[str, Any]) -> str | Chat:
    """Returns what a `Request` takes."""
    if "prompt" in prompt:
        return str(prompt["prompt"])
    return Chat(tuple(Message(one["role"], one["content"]) for one in prompt["messages"]))
