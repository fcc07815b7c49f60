"""Commands that start processes or prepare for it: `serve`, `bridge`, `http`, `up`, `pull`, `engines`, `config`."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftbridge.security import is_local
from services.cli.options import CONFIG_HELP
from services.cli.processes import announce
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET, fail, report
from services.config import (
    DEFAULT_BRIDGE,
    MODEL_HELP,
    SECTIONS,
    BridgeServerConfig,
    HttpServerConfig,
    InvalidConfiguration,
    ModelServerConfig,
    ProcessConfig,
)
from services.config_reading import check, check_files, load
from services.engines.registry import AUTO, engines, follows, prepare
from services.engines.spec import Dtype, EngineOptions, Weights
from services.interrupts import end_at_sigterm, importing
from services.logs import configure

if TYPE_CHECKING:
    from services.metrics import ServerMetrics
    from services.traces import Traces


def serve(config: ModelServerConfig, until_stdin_closes: bool) -> None:
    """Serve one model, as target, draft or both, until stopped."""
    end_at_sigterm()  # a model may be downloaded for minutes
    with importing():
        from services.metrics import ModelMetrics
        from services.model.server import run

    if follows(config.engine, config.model, config.options):
        config = config.model_copy(update={"metrics": "", "otlp": ""})  # the first process has them
    with _observed(config, metrics := ModelMetrics(), f"draftbridge-{config.role.value}") as traces:
        run(config, report, announce, until_stdin_closes, metrics, traces)


def bridge(config: BridgeServerConfig, until_stdin_closes: bool) -> None:
    """Run a bridge that connects targets and drafts, until stopped."""
    if config.workers > 1:
        with importing():
            from services.cli.workers import run_workers

        configure(config.log_format, config.log_level)
        run_workers(config, until_stdin_closes, announce)
        return
    with importing():
        from services.bridge.server import Door, run
        from services.metrics import BridgeMetrics

        door: Door | None = None
        if config.http:
            from services.http.server import http_door

            door = http_door
    with _observed(config, metrics := BridgeMetrics(), "draftbridge-bridge") as traces:
        run(config, announce, until_stdin_closes, door, metrics, traces)


def http(config: HttpServerConfig, until_stdin_closes: bool) -> None:
    """Serve OpenAI's protocol and a page over HTTP, for a bridge that runs elsewhere, until stopped."""
    with importing():
        from services.bridge.remote_gateway import RemoteGateway
        from services.http.server import run
        from services.metrics import HttpMetrics
        from services.rpc.security import warn_of_open_token

    with _observed(config, metrics := HttpMetrics(), "draftbridge-http") as traces:
        config.credentials.check(config.bridge)
        warn_of_open_token(config.credentials, [config.bridge])
        run(config, RemoteGateway(config.bridge, config.credentials, metrics, traces), announce, until_stdin_closes)


@contextmanager
def _observed(config: ProcessConfig, metrics: "ServerMetrics", service: str) -> Iterator["Traces"]:
    """Sets up log, metrics and traces of a process, and prints where its metrics are."""
    with importing():
        from services.rpc.metrics_server import serving_metrics
        from services.rpc.security import certificates, warn_of_expiry
        from services.traces import Traces

    configure(config.log_format, config.log_level)
    if (path := config.tls_certificate) and (files := certificates(config)):
        warn_of_expiry(path, files.end())
        metrics.watch_certificate(str(path), files.end)
    with ExitStack() as stack:
        traces = Traces(config.otlp, service)
        stack.callback(traces.close)
        if config.metrics:
            print(f"metrics at {stack.enter_context(serving_metrics(config, metrics.registry))}", flush=True)
        yield traces


def up(
    target: Annotated[str, typer.Option(help=f"The model that generates the text. {MODEL_HELP}")] = DEFAULT_TARGET,
    draft: Annotated[
        str, typer.Option(help="The model that proposes tokens: as for --target, suffix for prompt lookup, or none.")
    ] = DEFAULT_DRAFT,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT for the bridge to listen on. For other machines: docs/guides/security.md.",
            show_default=DEFAULT_BRIDGE,
        ),
    ] = None,
    http: Annotated[str, typer.Option(help="HOST:PORT to listen on for HTTP too; see `bridge --help`.")] = "",
    engine: Annotated[
        str | None, typer.Option(help="Engine of both models; see `serve --help`.", show_default=AUTO)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of both models; see `serve --help`.", show_default="auto")
    ] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Serve the target with this option.")] = False,
) -> None:
    """Run a target, a draft and a bridge as three processes, until stopped with Ctrl-C.

    Ctrl-C leaves running requests 2 seconds, SIGTERM the bridge's grace period, which another signal ends.
    """
    with importing():
        from services.cli.processes import (
            STOP_SECONDS,
            ServerOptions,
            StopSignals,
            configured_environment,
            draft_threads,
            fetch,
            fleet,
            how_ended,
            server_options,
        )

    stop = StopSignals()
    try:
        config = _check_addresses(listen, http)
        drafted = None if draft == "none" else draft
        environment, usual = configured_environment(), {"engine": AUTO}
        of_target = server_options(target, environment, usual, engine=engine, dtype=dtype)
        usual |= {"threads": str(draft_threads())}
        of_draft = ServerOptions()
        if drafted:
            of_draft = server_options(drafted, environment, usual, engine=engine, dtype=dtype)
        fetch([target], [drafted], report, trusted=of_target.trusted)
        with fleet(
            target,
            drafted,
            listen=listen,
            target_options=(*of_target.words, "--deterministic") if deterministic else of_target.words,
            draft_options=of_draft.words,
            bridge_options=("--http", http) if http else (),
            configured=True,
        ) as running:
            stop.started = True
            print(f"target  {target} at {running.target}")
            if drafted:
                print(f"draft   {draft} at {running.draft}")
            announce(running.bridge)
            if running.http:
                report(f"page and OpenAI's protocol: {running.http}")
            report(f"try: {example_call(config, running.bridge)}    stop: Ctrl-C")
            # The bridge continues without its draft.
            needed = {name: process for name, process in running.processes.items() if name != "draft"}
            stop.wait(needed.values())
            if not stop.asked:
                ended = next(name for name, process in needed.items() if process.poll() is not None)
                fail(f"the {ended} has ended {how_ended(needed[ended].returncode)}")
            if stop.asked is signal.SIGTERM:  # the model servers go on while the bridge lets requests end
                needed["bridge"].send_signal(signal.SIGTERM)
                stop.wait(needed.values(), config.grace + STOP_SECONDS)
    except KeyboardInterrupt:
        pass


# Hosts that stand for all addresses of the machine.
_EVERYWHERE = frozenset({"", "0.0.0.0", "[::]", "::"})


def example_call(config: BridgeServerConfig, address: str) -> str:
    """Returns a command that calls a bridge. Words in capitals stand for what only the user knows."""
    host, _, port = address.rpartition(":")
    if host in _EVERYWHERE:  # a certificate may lack the name localhost
        address = f"{'HOST' if config.tls_certificate else 'localhost'}:{port}"
    options = {
        "--ca CA.PEM": config.tls_certificate,
        "--certificate CLIENT.PEM --key CLIENT.KEY": config.tls_client_ca,
        "--token-file FILE": config.keys,
        "--insecure": config.keys and not config.tls_certificate and not is_local(address),
    }
    needed = [option for option, condition in options.items() if condition]
    return " ".join(['draftbridge generate "Once upon a time" --server', address, *needed])


def _check_addresses(listen: str | None, http: str) -> BridgeServerConfig:
    """Returns the bridge's configuration. Fails for addresses that it could not use, before models are loaded."""
    from services.rpc.server import check_free, host_and_port

    try:
        given = {"listen": listen, "http": http}
        config = load(BridgeServerConfig, {name: value for name, value in given.items() if value}).values
    except InvalidConfiguration as error:
        hint = "; `up` starts a bridge, whose other settings are variables such as DRAFTBRIDGE_BRIDGE_INSECURE"
        fail(f"{error}{hint if '--insecure' in str(error) else ''}")
    addresses = {"--listen": config.listen, "--http": config.http, "the metrics": config.metrics}
    taken: list[tuple[str, str, int]] = []
    for name, address in addresses.items():
        if address:
            check_free(address, config.share_port and name != "the metrics")
            host, port = host_and_port(name, address)
            for other, other_host, other_port in taken:
                if port == other_port and (host == other_host or not _EVERYWHERE.isdisjoint((host, other_host))):
                    fail(f"{other} and {name} have the same port {port}: give each its own, or port 0 for a free one")
            if port:
                taken.append((name, host, port))
    return config


def pull(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    engine: Annotated[str, typer.Option(help="The engine to prepare the model for.")] = "torch",
    dtype: Annotated[Dtype, typer.Option(help="Data type, as for `draftbridge serve`.")] = Dtype.AUTO,
    weights: Annotated[Weights, typer.Option(help="Storage format; see `draftbridge engines`.")] = Weights.AUTO,
) -> None:
    """Download and convert a model before it is served, and print the path of its files."""
    print(prepare(engine, model, EngineOptions(dtype=dtype, weights=weights), report))


def list_engines(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the rows of a Markdown table.")] = False,
) -> None:
    """List the engines: the models and devices that each supports, its options, and whether it is installed."""
    for spec in engines().values():
        facts = {
            "runs": spec.runs,
            "on": spec.devices,
            "--dtype": ", ".join(("auto", *spec.dtypes)),
            "--weights": ", ".join(("auto", *spec.weights)),
            "install": spec.install,
        }
        if markdown:
            print(f"| `{spec.name}` | {' | '.join(facts.values())} |")
            continue
        print(spec.name if spec.installed else f"{spec.name} (not installed)")
        for name, value in facts.items():
            print(f"  {name:9} {value}")


config_app = typer.Typer(no_args_is_help=True, help="Show or check the configuration of serve, bridge and http.")


@config_app.command()
def show(
    process: Annotated[str, typer.Argument(help=f"The kind of process: {' or '.join(SECTIONS)}.")],
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
) -> None:
    """Print the effective configuration of a process as TOML, with the origin of each value."""
    if process not in SECTIONS:
        fail(f"unknown kind of process {process!r}: use {' or '.join(SECTIONS)}")
    loaded = load(SECTIONS[process], {}, config, partial=True)
    print(f"[{process}]")
    for name, origin in loaded.origins.items():
        key, value = name.replace("_", "-"), getattr(loaded.values, name, None)
        # TOML has no null, so an unset value becomes a comment.
        line = f"{key} = {_toml(value)}" if value is not None else f"# {key} ="
        print(f"{line:40}  # {origin}")


@config_app.command("check")
def check_file(
    path: Annotated[Path, typer.Argument(help="The TOML file.")],
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Check also that the files that it names can be read here.")
    ] = True,
) -> None:
    """Check a configuration file. An error names the line, the key and the allowed values."""
    needs = check(path)
    for section in needs if files else ():
        check_files(load(SECTIONS[section], {}, path, {}, partial=True))
    print(f"{path} is valid: it configures {', '.join(needs) or 'nothing'}")
    for section, problems in needs.items():
        for problem in problems:
            print(f"[{section}] alone does not start a process: {problem}")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return str(value)
    # TOML has the escapes of JSON, but for pairs of surrogates; and only TOML wants DEL escaped.
    escaped = (f"\\U{ord(one):08x}" if one > "\uffff" else json.dumps(one)[1:-1] for one in str(value))
    return f'"{"".join(escaped)}"'.replace("\x7f", "\\u007f")
