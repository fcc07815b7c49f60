"""Options of commands that call a server: TLS and the token."""

import inspect
import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from draftbridge import Client, Credentials
from services.config import InvalidConfiguration

Connect: TypeAlias = Callable[[str], Client]
# The option of commands that need a running bridge.
Server: TypeAlias = Annotated[str, typer.Option(help="HOST:PORT of the bridge.", envvar="DRAFTBRIDGE_CLIENT_SERVER")]
_PANEL = "Connection"
_PREFIX = "DRAFTBRIDGE_CLIENT_"


def _file(help_: str, variable: str) -> Any:
    return typer.Option(help=help_, envvar=f"{_PREFIX}{variable}", rich_help_panel=_PANEL, metavar="FILE")


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "tls": (
        bool,
        typer.Option(
            "--tls", help="Connect with TLS; implied by --ca.", envvar="DRAFTBRIDGE_CLIENT_TLS", rich_help_panel=_PANEL
        ),
    ),
    "ca": (Path | None, _file("PEM file with the authorities of the server's certificate.", "CA")),
    "certificate": (Path | None, _file("PEM file with your certificate, for mutual TLS.", "CERTIFICATE")),
    "key": (Path | None, _file("PEM file with the key of your certificate.", "KEY")),
    "token_file": (Path | None, _file("File with your token.", "TOKEN_FILE")),
    "insecure": (
        bool,
        typer.Option("--insecure", help="Send the token also without TLS.", rich_help_panel=_PANEL),
    ),
}


# Not for `--insecure`, which is a decision for one call.
CLIENT_VARIABLES = [f"{_PREFIX}{name.upper()}" for name in ("server", "server_name", *_OPTIONS) if name != "insecure"]


def _refuse_unknown_variables() -> None:
    """Raises `InvalidConfiguration` for a variable of this prefix that no option has: it is probably misspelt."""
    for variable in os.environ:
        if not variable.startswith(_PREFIX) or variable in CLIENT_VARIABLES:
            continue
        name = variable.removeprefix(_PREFIX)
        known = [one.removeprefix(_PREFIX) for one in CLIENT_VARIABLES]
        similar = [_PREFIX + one for one in get_close_matches(name, known, 1)] or CLIENT_VARIABLES
        use = f"the option --{name.lower()}" if name.lower() in _OPTIONS else " or ".join(similar)
        raise InvalidConfiguration(f"{variable} is an unknown variable: use {use}, or unset it")


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command. Its parameter `connect` becomes a function from an address to a client.

    A command that calls no bridge has a parameter `credentials` instead.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        _refuse_unknown_variables()
        credentials = Credentials(**{name: given.pop(name) for name in _OPTIONS})
        if "credentials" in own:
            command(credentials=credentials, **given)
        else:
            command(connect=lambda address: Client(address, credentials), **given)

    own = inspect.signature(command, eval_str=True).parameters
    supplied = ("connect", "credentials")
    kept = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, one in own.items() if name not in supplied]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if type_ is bool else None,
            annotation=Annotated[type_, options],
        )
        for name, (type_, options) in _OPTIONS.items()
    ]
    run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*kept, *added)}
    return run
