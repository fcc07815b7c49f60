"""Finds commands and settings in texts, and checks them as the command itself would."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from services.cli.app import app
from services.config import SECTIONS
from services.config_reading import load

ROOT = Path(__file__).parents[2]
CLI: Any = typer.main.get_command(app)
# Typer brings its own click, from which its errors are.
UsageError: Any = typer.BadParameter.__mro__[1]
# Files that tell somebody to run something.
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
_END = re.compile(r"[|;&]+|\d?[<>].*")


def code(text: str) -> Iterator[str]:
    """Yields the lines of a Markdown text's code blocks and its inline code, continued lines joined."""
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S)):
        yield " ".join(span.split())
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
    blocks += re.findall(r"(?:^(?: {4}.*)?\n)+", text, flags=re.M)
    for block in blocks:
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def commands(text: str, name: str) -> Iterator[list[str]]:
    """Yields the arguments of each call of a program in the code of a Markdown text."""
    for line in code(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # not a command
            continue
        starts = [place for place, word in enumerate(words) if word == name or word.endswith(f"/{name}")]
        for start in starts:
            before = words[start - 1] if start else "$"
            if before.endswith("$") or "=" in before or before in ("bridge", "exec", "-m", "&&", "sudo"):
                ends = [place for place in range(start + 1, len(words)) if _END.fullmatch(words[place])]
                yield words[start + 1 : ends[0] if ends else len(words)]


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Parses the arguments of `draftbridge`, and returns those of its command by name.

    Of a process that is started, returns the whole configuration, with `environment`. Raises
    `UsageError` and `InvalidConfiguration`.
    """
    command, name, rest, context = CLI, "draftbridge", list(arguments), None
    while isinstance(command, TyperGroup):
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    parameters = command.make_context(name, rest, parent=context).params
    if name in SECTIONS:
        flags = {key: value for key, value in parameters.items() if value not in (None, [], ())}
        config = flags.pop("config", None)
        flags.pop("until_stdin_closes", None)
        return vars(load(SECTIONS[name], flags, config, environment or {}).values)
    return parameters
