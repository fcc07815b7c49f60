"""The `draftbridge` command: assembles its subcommands and reports errors."""

import os
import sys
from dataclasses import replace
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bridge.errors import DraftBridgeError
from draftbridge import CallError
from services.child import quiet_libraries
from services.cli import bench_command, client, doctor_command, health, servers, top
from services.cli.options import configured
from services.cli.terminal import fail, out, report, warn
from services.cli.variables import misspelt
from services.config import MODEL_HELP, BridgeServerConfig, HttpServerConfig, ModelServerConfig
from services.interrupts import importing
from services.logs import LogFormat, LogLevel, configure
from services.store.cache import FULL

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding across tokenizers, processes and machines.\n\n"
    "[bold]up[/] starts a target, a draft and a bridge on this machine; [bold]generate[/] generates text through a "
    "bridge. To use several machines, run [bold]serve[/] on those of the models and [bold]bridge[/] near the target.",
)


class _Zoo(TyperGroup):
    """Measure and predict which pairs of many models gain."""

    # Its modules load numpy and jinja2, for a fifth of a second that every other command would take longer.
    def list_commands(self, ctx: Any) -> list[str]:
        return self._loaded().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._loaded().get_command(ctx, cmd_name)

    @staticmethod
    def _loaded() -> TyperGroup:
        with importing():
            from services.cli.zoo.command import app as zoo

        return typer.main.get_group(zoo)


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="The prompt; by default a built-in one.")] = "",
    target: Annotated[str, typer.Option(help=f"Another target. {MODEL_HELP}")] = "",
    draft: Annotated[str, typer.Option(help="Another draft.")] = "",
    small: Annotated[
        bool, typer.Option("--small", help="Use models of 270M and 135M parameters; skips the 1.1 GB download.")
    ] = False,
    engine: Annotated[str, typer.Option(help="Another engine for the target; see `draftbridge engines`.")] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="The most tokens to generate; by default 96, or fewer with a slow target."),
    ] = None,
) -> None:
    """Generate with and without a draft, and compare text and speed."""
    with importing():
        from services.cli.demo import LARGE, SMALL, run

    wanted = SMALL if small else LARGE
    if target or engine:  # the reasons apply to the default target and engine only
        wanted = replace(wanted, target=target or wanted.target, engine=engine or "auto", reasons={})
    wanted = replace(wanted, draft=draft or wanted.draft, prompt=prompt or wanted.prompt)
    run(out, wanted, max_tokens, report)


@app.command()
def version() -> None:
    """Print the version."""
    from services.version import VERSION

    print(VERSION)


app.command("up")(servers.up)
app.command("serve", help=servers.serve.__doc__)(configured(ModelServerConfig, servers.serve))
app.command("bridge", help=servers.bridge.__doc__)(configured(BridgeServerConfig, servers.bridge))
app.command("http", help=servers.http.__doc__)(configured(HttpServerConfig, servers.http))
app.command("generate")(client.generate)
app.command("models")(client.models)
app.command("translate")(client.translate)
app.command("top")(top.top)
app.command("health")(health.health)
app.command("bench")(bench_command.run)
app.command("pull")(servers.pull)
app.command("engines")(servers.list_engines)
app.command("doctor")(doctor_command.run)
app.add_typer(typer.Typer(cls=_Zoo, no_args_is_help=True), name="zoo", help=_Zoo.__doc__)
app.add_typer(servers.config_app, name="config")


def main() -> None:
    """Runs the command. A DraftBridge error becomes a message on standard error and exit status 1."""
    if isinstance(sys.stdout, TextIOWrapper):  # not every terminal can show every character
        sys.stdout.reconfigure(errors="backslashreplace")
    configure(LogFormat.TEXT, LogLevel.WARNING)
    quiet_libraries()
    if "--until-stdin-closes" not in sys.argv:  # a process that another command starts has the same variables
        for sentence in misspelt(os.environ):
            warn(sentence)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # an error at exit would be a traceback
    except (DraftBridgeError, CallError) as error:
        fail(str(error))
    except BrokenPipeError:  # the reader of the output has closed the pipe, as `head` does
        _drop_output()
        sys.exit(1)  # as Typer and Rich do when a command notices it before its end
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        fail(f"the output cannot be written ({error.strerror}): free some space, or write it to another disk")


def _drop_output() -> None:
    """Keeps Python from writing at its exit what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
