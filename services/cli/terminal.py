"""Output to the terminal, and the default models of the commands."""

import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

# Wide where no terminal wraps its lines, so that tables are whole in a file and in a pipe.
_PIPE_WIDTH = 200
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)
err = Console(stderr=True)

# A small pair that downloads fast, for `up`, `bench` and `translate`; `demo` uses a larger one.
DEFAULT_TARGET = "gemma-3-270m"
DEFAULT_DRAFT = "smollm2-135m-instruct"


def report(text: str) -> None:
    """Prints a step of a long operation, or a summary, to standard error. Takes plain text, as everything here does."""
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """Prints an error and ends the process with status 1."""
    err.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)
    raise SystemExit(1)
