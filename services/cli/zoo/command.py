"""Commands of a zoo: `zoo show`, `zoo predict`, `zoo measure`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bridge.errors import InvalidField
from draftbridge import Client
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli import bench
from services.cli.connection import Connect, connecting
from services.cli.processes import launched, serve
from services.cli.terminal import err, out, report
from services.cli.zoo import figures
from services.cli.zoo.predict import Prediction, Times, predict
from services.cli.zoo.report import Report, write
from services.cli.zoo.samples import TURNS, Plan, SampleFile, measure
from services.config import DEFAULT_BRIDGE, MODEL_HELP
from services.store.resolve import SUFFIX, resolve

app = typer.Typer(no_args_is_help=True, help="Measure and predict which pairs of many models pay.")

_DEFAULT_MODELS = "gemma-3-270m,smollm2-135m-instruct"
_Models = Annotated[str, typer.Option(help=f"Models, separated by commas. {MODEL_HELP}")]
_Drafts = Annotated[str, typer.Option(help="Models, as for --targets; suffix is prompt lookup. Unset: the targets.")]
_Server = Annotated[str, typer.Option(help="HOST:PORT of a running bridge, whose models are measured instead.")]
_Prompts = Annotated[
    Path, typer.Option(help="Prompts, as for `bench --prompts`.", show_default="built-in prompts of six kinds")
]
_Count = Annotated[int, typer.Option(min=1, help="Number of prompts, evenly over their categories.")]
_Tokens = Annotated[int, typer.Option(min=8, max=2**31, help="Tokens to generate for each prompt.")]
_Engine = Annotated[str, typer.Option(help="Engine of all models; see `draftbridge engines`.")]
_Output = Annotated[Path, typer.Option(help="Directory for samples, figures and report; a stopped run resumes there.")]
# Prompts and tokens of a prediction, a few hundred tokens for each pair with the target alone.
_PROBES, _PROBE_TOKENS = 2, 64


@dataclass(frozen=True)
class Zoo:
    """A running zoo: a client of its bridge, its models by name, and its pairs."""

    client: Client
    models: Mapping[str, Mapping[str, Any]]
    times: Mapping[str, Times]
    targets: Sequence[str]
    drafts: Sequence[str]
    pairs: Sequence[bridge_pb2.Pair]

    @property
    def refused(self) -> dict[tuple[str, str], str]:
        return {(pair.target, pair.draft): pair.refusal for pair in self.pairs if pair.refusal}


@connecting
def show(
    connect: Connect,
    server: Annotated[str, typer.Option(help="HOST:PORT of the bridge.")] = DEFAULT_BRIDGE,
    workload: Annotated[str, typer.Option(help="Kind of text that the expected speeds are for.")] = "",
) -> None:
    """Show all services of a bridge with their states, and all pairs with what the bridge expects of them."""
    with connect(server) as client:
        services, pairs = client.services(), client.pairs(workload)
    table = Table("service", "role", "model", "state", "engine", "context", "1 / 8 tokens", "problem", title=server)
    for one in services:
        state = bridge_pb2.ServiceState.State.Name(one.state).removeprefix("STATE_").lower()
        costs = {cost.token_count: cost.forward_ns / 1e6 for cost in one.measured_costs or one.model.forward_costs}
        times = " / ".join(f"{costs[count]:.1f}" for count in (1, 8) if count in costs)
        role = model_pb2.Role.Name(one.role).removeprefix("ROLE_").lower()
        table.add_row(
            one.address, role, escape(one.model.name), state, one.model.engine, str(one.model.context_length or ""),
            f"{times} ms" if times else "", escape(one.problem),
        )  # fmt: skip
    out.print(table)
    table = Table("target", "draft", "expected", "bytes/s", "accepted", "bytes/pass", "requests", "")
    for pair in pairs:
        table.add_row(
            escape(pair.target), escape(pair.draft), f"{pair.expected_gain:.2f}x",
            f"{pair.expected_bytes_per_second:.0f}", f"{pair.acceptance_rate:.0%}" if pair.request_count else "",
            f"{pair.accepted_bytes_per_pass:.1f}" if pair.request_count else "", f"{pair.request_count:.0f}",
            escape(pair.refusal) or ("best" if pair.is_best else ""),
        )  # fmt: skip
    out.print(table)


@connecting
def predict_pairs(
    connect: Connect,
    targets: _Models = _DEFAULT_MODELS,
    drafts: _Drafts = "",
    server: _Server = "",
    prompts: _Prompts = bench.OWN_PROMPTS,
    count: _Count = 4,
    engine: _Engine = "auto",
    output: _Output = Path("zoo"),
) -> None:
    """Predict the gain of every pair from the models' times and a few hundred tokens each."""
    _, probes = _split(prompts, count)
    with _zoo(connect, server, targets, drafts, engine) as zoo:
        _print_predictions(_predictions(zoo, probes, output))


@connecting
def measure_pairs(
    connect: Connect,
    targets: _Models = _DEFAULT_MODELS,
    drafts: _Drafts = "",
    server: _Server = "",
    prompts: _Prompts = bench.OWN_PROMPTS,
    count: _Count = 4,
    tokens: _Tokens = 32,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas; 0 is greedy.")] = "0,1",
    engine: _Engine = "auto",
    output: _Output = Path("zoo"),
) -> None:
    """Measure all ordered pairs, predict them before, and write an HTML report. A stopped run resumes."""
    measured, probes = _split(prompts, count)
    with _zoo(connect, server, targets, drafts, engine) as zoo:
        values = [_number(one) for one in temperatures.split(",")]
        predictions = _predictions(zoo, probes, output)
        plan = Plan(zoo.targets, zoo.drafts, measured, values, tokens, refused=frozenset(zoo.refused))
        file = SampleFile(output / "samples.jsonl", zoo.models)
        _run(zoo.client, plan, file, "measuring")
    wanted = {key for key, _ in plan.keys()}
    samples = [one for key, one in file.samples.items() if key in wanted]
    found = [figures.pair_figures(samples, *pair) for pair in plan.pairs()]
    setting = (
        f"{bench.processor()}; {len(measured)} prompts of {tokens} tokens, temperatures {temperatures}; "
        f"{datetime.now(UTC):%Y-%m-%d}; draftbridge zoo measure"
    )
    overlaps = {(pair.target, pair.draft): pair.vocabulary_overlap for pair in zoo.pairs}
    result = Report(
        "Which draft beside which target",
        setting,
        zoo.models,
        zoo.targets,
        zoo.drafts,
        samples,
        found,
        predictions,
        overlaps,
        zoo.refused,
    )
    write(result, output / "report.html")
    (output / "zoo.json").write_text(json.dumps(as_json(result), indent=1))
    _print(result)
    report(f"report: {output / 'report.html'}    figures: {output / 'zoo.json'}")


def as_json(result: Report) -> dict[str, Any]:
    """Returns all figures of a report, without the samples."""
    return {
        "setting": result.setting,
        "models": result.models,
        "advice": [figures.advice(target, result.figures) for target in result.targets],
        "plain_tokens_per_second": {one: figures.plain_speed(result.samples, one) for one in result.targets},
        "pairs": [
            asdict(one) | {"vocabulary_overlap": result.overlaps.get((one.target, one.draft))} for one in result.figures
        ],
        "refused": [{"target": a, "draft": b, "refusal": reason} for (a, b), reason in result.refused.items()],
        "predictions": [asdict(one) for one in result.predictions],
    }


app.command("show")(show)
app.command("predict")(predict_pairs)
app.command("measure")(measure_pairs)


def _split(path: Path, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the prompts to measure, and others for the prediction; the last ones of them if there are no others."""
    found = bench.read_prompts(path)
    return found[:count], (found[count : count + _PROBES] or found[-_PROBES:])


@contextmanager
def _zoo(connect: Connect, server: str, targets: str, drafts: str, engine: str) -> Iterator[Zoo]:
    """Starts all models and a bridge, or connects to a running one."""
    wanted, proposing = _names(targets), _names(drafts) or _names(targets)
    with ExitStack() as stack:
        if server:
            client = stack.enter_context(connect(server))
        else:
            address = stack.enter_context(_fleet(wanted, proposing, engine))
            client = stack.enter_context(Client(address))
        services = [one for one in client.services() if one.state == bridge_pb2.ServiceState.STATE_AVAILABLE]
        of_role = {
            role: list(dict.fromkeys(one.model.name for one in services if one.role == role))
            for role in (model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT)
        }
        if server and targets != _DEFAULT_MODELS:
            of_role[model_pb2.ROLE_TARGET] = _known(wanted, of_role[model_pb2.ROLE_TARGET], "--targets")
        if server and drafts:
            of_role[model_pb2.ROLE_DRAFT] = _known(proposing, of_role[model_pb2.ROLE_DRAFT], "--drafts")
        models = {one.model.name: one.model for one in services}
        yield Zoo(
            client,
            {name: _described(model) for name, model in models.items()},
            {name: _times(model) for name, model in models.items()},
            of_role[model_pb2.ROLE_TARGET],
            of_role[model_pb2.ROLE_DRAFT],
            client.pairs(),
        )


@contextmanager
def _fleet(targets: Sequence[str], drafts: Sequence[str], engine: str) -> Iterator[str]:
    """Runs a server for each model, in the roles that it needs, and a bridge. Yields the bridge's address."""
    models = list(dict.fromkeys((*targets, *drafts)))
    if SUFFIX in targets:
        raise InvalidField("--targets", f"models with a text of their own, not {SUFFIX}", ", ".join(targets))
    for model in models:
        if model != SUFFIX:
            resolve(model, report)
    with ExitStack() as stack:
        options: list[str] = []
        for number, model in enumerate(models, start=1):
            report(f"starting {model} ({number} of {len(models)})")
            role = "both" if model in targets and model in drafts else "target" if model in targets else "draft"
            engines = () if model == SUFFIX else ("--engine", engine)
            address, _ = stack.enter_context(serve(model, "--role", role, *engines))
            options += ["--target", address] if model in targets else []
            options += ["--draft", address] if model in drafts else []
        common = ("--listen", "127.0.0.1:0", "--until-stdin-closes")
        yield stack.enter_context(launched("bridge", "bridge", *options, *common))[0]


def _predictions(zoo: Zoo, probes: Sequence[Mapping[str, Any]], output: Path) -> list[Prediction]:
    plan = Plan(zoo.targets, zoo.drafts, probes, [0.0], _PROBE_TOKENS, (TURNS,), frozenset(zoo.refused))
    file = SampleFile(output / "probes.jsonl", zoo.models)
    _run(zoo.client, plan, file, "predicting")
    samples, times = list(file.samples.values()), zoo.times
    found = (predict(target, draft, samples, times[target], times[draft]) for target, draft in plan.pairs())
    return [one for one in found if one]


def _run(client: Client, plan: Plan, file: SampleFile, text: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(text, total=len(plan.keys()))
        for sample in measure(client, plan, file):
            progress.advance(task)
            if sample:
                progress.update(task, description=f"{text} {sample.target} ← {sample.draft or 'alone'}")


def _print_predictions(predictions: Sequence[Prediction]) -> None:
    table = Table("target", "draft", "predicted", "tokens/s", "by", "from tokens")
    for one in sorted(predictions, key=lambda one: (one.target, -one.gain)):
        table.add_row(
            escape(one.target), escape(one.draft), f"{one.gain:.2f}x", f"{one.tokens_per_second:.1f}", one.plan,
            str(one.token_count),
        )  # fmt: skip
    out.print(table)


def _print(result: Report) -> None:
    predicted = {(one.target, one.draft): one.gain for one in result.predictions}
    table = Table("target", "draft", "gain", "95% interval", "in turns", "accepted", "tokens/s", "predicted")
    for one in figures.ranking(result.figures):
        gain = predicted.get((one.target, one.draft))
        interval = f"{one.gain.low:.2f} to {one.gain.high:.2f}"
        table.add_row(
            escape(one.target), escape(one.draft), f"{one.gain.mean:.2f}x", interval,
            f"{one.turns.mean:.2f}x", f"{one.acceptance:.0%}", f"{one.tokens_per_second:.1f}",
            f"{gain:.2f}x ({gain / one.gain.mean - 1:+.0%})" if gain else "",
        )  # fmt: skip
    out.print(table)
    for target in result.targets:
        out.print(figures.advice(target, result.figures), style="bold", markup=False, highlight=False, soft_wrap=True)


def _described(model: model_pb2.Model) -> dict[str, Any]:
    return {
        "revision": model.revision,
        "engine": model.engine,
        "device": model.device,
        "dtype": model.dtype,
        "context_length": model.context_length,
        "vocabulary_size": model.vocabulary_size,
        "costs": [[one.token_count, one.forward_ns] for one in model.forward_costs],
    }


def _times(model: model_pb2.Model) -> Times:
    costs = tuple((one.token_count, one.forward_ns) for one in model.forward_costs)
    return Times(costs, frozenset(model.compute_units), model.compute_unit_count)


def _names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _known(wanted: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    for name in wanted:
        if name not in known:
            raise InvalidField(option, f"names that the bridge has ({', '.join(known)})", name)
    return list(wanted)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidField("--temperatures", "numbers separated by commas", text) from None
