"""Output to the terminal, and the default models of the commands."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from bridge.errors import DraftBridgeError
from services.store.cache import FULL

# Wide where no terminal wraps its lines, so that tables are whole in a file and in a pipe.
_PIPE_WIDTH = 200
_MIN_FREE_BYTES = 1 << 20
# Without emoji, texts and addresses keep what would be the code of one, such as :100:.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH, emoji=False)
err = Console(stderr=True, emoji=False)

# A small pair that downloads fast, for `up`, `bench` and `translate`; `demo` uses a larger one.
DEFAULT_TARGET = "gemma-3-270m"
DEFAULT_DRAFT = "smollm2-135m-instruct"


def report(text: str) -> None:
    """Prints a step of a long operation, or a summary, to standard error. Takes plain text, as everything here does."""
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class CannotWrite(DraftBridgeError, reason="CANNOT_WRITE"):
    """A file of results cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `CannotWrite` with the file's name if the caller cannot write it."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if error.errno in FULL else "name another file"
        raise CannotWrite(f"{path} cannot be written ({error.strerror}): {remedy}, and run it again") from error


def check_writable(path: Path, option: str) -> None:
    """Raises `BadParameter` unless a file can be written: better than to fail after minutes of measuring."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=option)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: name a file in a folder of yours", param_hint=option)
    if shutil.disk_usage(path.parent).free < _MIN_FREE_BYTES:
        raise typer.BadParameter(f"the disk of {path.parent} is full: free some space", param_hint=option)


def warn(message: str) -> None:
    """Prints a warning to standard error."""
    err.print("[bold yellow]warning:[/]", escape(message), highlight=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """Prints an error and ends the process with status 1."""
    err.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)
    raise SystemExit(1)
