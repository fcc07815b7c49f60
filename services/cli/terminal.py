"""Output to the terminal, and the default models of the commands."""

from typing import NoReturn

from rich.console import Console

out = Console()
err = Console(stderr=True)

DEFAULT_TARGET = "gemma-3-270m"
DEFAULT_DRAFT = "smollm2-135m-instruct"


def report(text: str) -> None:
    """Prints a step of a long operation to standard error."""
    err.print(f"[dim]{text}[/]")


def fail(message: str) -> NoReturn:
    """Prints an error, in rich markup, and ends the process with status 1."""
    err.print(f"[bold red]error:[/] {message}", highlight=False, markup=True, soft_wrap=True)
    raise SystemExit(1)
