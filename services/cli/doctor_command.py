"""The command `draftbridge doctor`."""

from typing import Annotated

import typer
from rich.markup import escape

from draftbridge.client import checked_address
from services.cli.connection import Connect, Server, connecting
from services.cli.doctor import Level, examine
from services.cli.terminal import err, out
from services.config import DEFAULT_BRIDGE

_STYLES = {Level.BROKEN: "bold red", Level.DEGRADED: "bold yellow", Level.SLOW: "cyan", Level.GOOD: "green"}


@connecting
def run(
    connect: Connect,
    server: Server = DEFAULT_BRIDGE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print what is in order.")] = False,
) -> None:
    """Check a running bridge and its services, and say what to change, most important first.

    The exit status is 1 if requests fail, otherwise 0.
    """
    checked_address(server)
    with err.status("examining") as status:
        found = examine(server, connect, lambda one: status.update(escape(f"{one.check}: {one.text}")))
    for one in found:
        if one.level is Level.GOOD and not verbose:
            continue
        style = _STYLES[one.level]
        head = f"[{style}]{one.level.name.lower():9}[/]"
        out.print(f"{head} {escape(f'{one.check}: {one.text}')}", highlight=False, soft_wrap=True)
        if one.remedy:
            out.print(f"          → {escape(one.remedy)}", highlight=False, soft_wrap=True)
    good = sum(one.level is Level.GOOD for one in found)
    out.print(f"{good} of {len(found)} findings are in order", style="dim", highlight=False)
    if any(one.level is Level.BROKEN for one in found):
        raise SystemExit(1)
