"""What the commands print, and the models they take by default."""

from typing import NoReturn

from rich.console import Console

out = Console()
err = Console(stderr=True)

DEFAULT_TARGET = "gemma-3-270m"
DEFAULT_DRAFT = "smollm2-135m-instruct"


def report(text: str) -> None:
    """Prints a step of something that takes a while."""
    err.print(f"[dim]{text}[/]")


def fail(message: str) -> NoReturn:
    """Prints an error and ends the process with status 1."""
    err.print(f"[bold red]error:[/] {message}", highlight=False, markup=True, soft_wrap=True)
    raise SystemExit(1)
