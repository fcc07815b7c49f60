"""Generates the command-line options of a process from its configuration class."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from services.config import GAUDI, INSIGHT, ServerConfig, option
from services.config_reading import C, check_files, load

CONFIG_HELP = "TOML file with the configuration; `draftbridge config` shows and checks it."


def configured(kind: type[C], run: Callable[[C, bool], None]) -> Callable[..., None]:
    """Returns a Typer command with an option for each field of `kind`. It calls `run(config, until_stdin_closes)`.

    Only options that the user gave override the environment and the file.
    """

    def command(config: Path | None = None, until_stdin_closes: bool = False, **given: Any) -> None:
        flags = {name: value for name, value in given.items() if value is not None and value != []}
        loaded = load(kind, flags, config)
        check_files(loaded)
        run(loaded.values, until_stdin_closes)

    parameters = {name: _annotation(name, field) for name, field in kind.model_fields.items()}
    parameters["config"] = Annotated[Path | None, typer.Option(help=CONFIG_HELP)]
    # A parent process passes this and keeps the pipe open, so that the process ends with its parent.
    parameters["until_stdin_closes"] = Annotated[bool, typer.Option(hidden=True)]
    command.__annotations__ = parameters
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "until_stdin_closes" else None,
                annotation=annotation,
            )
            for name, annotation in parameters.items()
        ]
    )
    return command


def as_options(config: ServerConfig) -> list[str]:
    """Returns the command line that gives a process this configuration, whatever its file and environment are."""
    words: list[str] = []
    for name in type(config).model_fields:
        flag, value = option(name), getattr(config, name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif value is not None:
            for one in value if isinstance(value, tuple) else (value,):
                words += [flag, str(one)]
    return words


def _annotation(name: str, field: FieldInfo) -> Any:
    """Returns a field's annotation for Typer. Types are plain, because the configuration validates the values."""
    flag = option(name)
    if not flag.startswith("--"):
        return Annotated[str | None, typer.Argument(help=field.description, metavar=flag, show_default=False)]
    # The backslash keeps rich from reading the bracket as markup.
    default = "" if field.is_required() or field.default in (None, "", (), False) else rf" \[default: {field.default}]"
    help_ = f"{field.description}{default}"
    panel = _panel(name)
    if field.annotation in (bool, bool | None):
        # `--no-...` overrides a value of the file or the environment.
        names = f"{flag}/--no-{flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(names, help=help_, show_default=False, rich_help_panel=panel)]
    type_: Any = list[str] if "tuple" in str(field.annotation) else str
    metavar = _metavar(field)
    return Annotated[
        type_ | None, typer.Option(flag, help=help_, metavar=metavar, show_default=False, rich_help_panel=panel)
    ]


def _panel(name: str) -> str | None:
    if name in INSIGHT:
        return "Metrics, log and traces"
    if name in GAUDI:
        return "Gaudi: for --engine habana"
    return (
        "Security and limits" if name in ServerConfig.model_fields or name.startswith(("service_", "bridge_")) else None
    )


def _metavar(field: FieldInfo) -> str:
    if isinstance(field.annotation, type) and hasattr(field.annotation, "__members__"):
        return "|".join(field.annotation)  # type: ignore[arg-type]
    text = str(field.annotation)
    if "Path" in text:
        return "FILE"
    return "INTEGER" if "int" in text else "NUMBER" if "float" in text else "TEXT"
