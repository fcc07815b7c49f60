"""Command-line options of a process, made from its configuration."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from services.config import C, load, option

CONFIG_HELP = "TOML file with the configuration; see `draftbridge config`."


def configured(kind: type[C], run: Callable[[C, bool], None]) -> Callable[..., None]:
    """Returns a command for Typer with an option for each field of `kind`, which calls `run` with the configuration.

    `run` is also told whether to stop when standard input ends. Only options that the user gave count as flags: the
    file and the environment provide the others.
    """

    def command(config: Path | None = None, until_stdin_closes: bool = False, **given: Any) -> None:
        flags = {name: value for name, value in given.items() if value is not None and value != []}
        run(load(kind, flags, config).values, until_stdin_closes)

    parameters = {name: _annotation(kind, name, field) for name, field in kind.model_fields.items()}
    parameters["config"] = Annotated[Path | None, typer.Option(help=CONFIG_HELP)]
    # For whoever starts the process: it ends with its parent.
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


def _annotation(kind: type[C], name: str, field: FieldInfo) -> Any:
    """Returns a field's type for Typer. Values are checked by the configuration, so that there is one set of rules."""
    flag = option(kind, name)
    if not flag.startswith("--"):
        return Annotated[str | None, typer.Argument(help=field.description, metavar=flag, show_default=False)]
    default = "" if field.is_required() or field.default in (None, "", (), False) else f" [default: {field.default}]"
    help_ = f"{field.description}{default}"
    if field.annotation is bool:
        # `--no-...` takes back what the file or the environment switched on.
        names = f"{flag}/--no-{flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(names, help=help_, show_default=False)]
    type_: Any = list[str] if "tuple" in str(field.annotation) else str
    return Annotated[type_ | None, typer.Option(flag, help=help_, metavar=_metavar(field), show_default=False)]


def _metavar(field: FieldInfo) -> str:
    if isinstance(field.annotation, type) and hasattr(field.annotation, "__members__"):
        return "|".join(field.annotation)  # type: ignore[arg-type]
    text = str(field.annotation)
    return "INTEGER" if "int" in text else "NUMBER" if "float" in text else "TEXT"
