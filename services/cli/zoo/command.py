"""Commands of a zoo: `zoo show`, `zoo predict`, `zoo measure`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from bridge.errors import InvalidField
from draftbridge import Client
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli import bench
from services.cli.connection import Connect, Server, connecting
from services.cli.fitted import Fitted
from services.cli.terminal import check_writable, err, fail, out, report, writing
from services.cli.zoo import figures
from services.cli.zoo.predict import Prediction, predict
from services.cli.zoo.report import Report, comparisons, write
from services.cli.zoo.running import DEFAULT_MODELS, Zoo, running
from services.cli.zoo.samples import TURNS, Plan, SampleFile, measure
from services.config import DEFAULT_BRIDGE, MODEL_HELP
from services.engines.cpu import cpu_name

app = typer.Typer()  # `services.cli.app` describes it, so that its help needs no import of this file

# Prompts and tokens of a prediction, a few hundred tokens for each pair with the target alone.
_PROBES, _PROBE_TOKENS = 2, 64
# How many of the built-in prompts are measured by default.
_COUNT = 4
_MAX_TEMPERATURE = 100.0
# The largest relative error with which a prediction is accurate enough to choose a draft.
_CLOSE = 0.15
_Models = Annotated[
    str | None,
    typer.Option(
        help=f"Models, separated by commas. {MODEL_HELP}", show_default=f"{DEFAULT_MODELS}; with --server: all of them"
    ),
]
_Drafts = Annotated[
    str | None,
    typer.Option(
        help="Models, as for --targets; suffix is prompt lookup.",
        show_default="the targets; with --server: all of them",
    ),
]
_Server = Annotated[str, typer.Option(help="HOST:PORT of a running bridge, whose models are measured instead.")]
_Prompts = Annotated[
    Path | None, typer.Option(help="Prompts, as for `bench --prompts`.", show_default="built-in prompts of six kinds")
]
_Count = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of prompts, evenly over their categories.",
        show_default=f"all of --prompts, {_COUNT} of the built-in ones",
    ),
]
_Tokens = Annotated[int, typer.Option(min=8, max=2**31, help="Tokens to generate for each prompt.")]
_Engine = Annotated[
    str | None, typer.Option(help="Engine of all models; see `draftbridge engines`.", show_default="auto")
]
_Output = Annotated[Path, typer.Option(help="Directory for samples, figures and report; a stopped run resumes there.")]
_Temperatures = Annotated[str, typer.Option(help="Temperatures, separated by commas; 0 is greedy.")]


@connecting
def show(
    connect: Connect,
    server: Server = DEFAULT_BRIDGE,
    workload: Annotated[str, typer.Option(help="Kind of text that the expected speeds are for.")] = "",
) -> None:
    """Show all services of a bridge with their states, and all pairs with what the bridge expects of them."""
    with connect(server) as client:
        services, pairs = client.services(), client.pairs(workload)
    table = Table(
        Column("service", no_wrap=True),
        "role",
        Column("model", no_wrap=True),
        "state",
        "engine",
        "context",
        "1 / 8 tokens",
        "problem",
        title=Text(server, "table.title"),
    )
    for one in services:
        state = bridge_pb2.ServiceState.State.Name(one.state).removeprefix("STATE_").lower()
        costs = {cost.token_count: cost.forward_ns / 1e6 for cost in one.measured_costs or one.model.forward_costs}
        times = " / ".join(f"{costs[count]:.1f}" for count in (1, 8) if count in costs)
        role = model_pb2.Role.Name(one.role).removeprefix("ROLE_").lower()
        table.add_row(
            escape(one.address), role, escape(one.model.name), state, escape(one.model.engine),
            str(one.model.context_length or ""), f"{times} ms" if times else "", escape(one.problem),
        )  # fmt: skip
    out.print(Fitted(table))
    table = Table(
        Column("target", no_wrap=True),
        Column("draft", no_wrap=True),
        "expected",
        "bytes/s",
        "accepted",
        "bytes/pass",
        "requests",
        "note",
    )
    for pair in pairs:
        table.add_row(
            escape(pair.target), escape(pair.draft), f"{pair.expected_gain:.2f}x",
            f"{pair.expected_bytes_per_second:.0f}", f"{pair.acceptance_rate:.0%}" if pair.request_count else "",
            f"{pair.accepted_bytes_per_pass:.1f}" if pair.request_count else "", f"{pair.request_count:.0f}",
            escape(pair.refusal) or ("best" if pair.is_best else ""),
        )  # fmt: skip
    out.print(Fitted(table))


@connecting
def predict_pairs(
    connect: Connect,
    targets: _Models = None,
    drafts: _Drafts = None,
    server: _Server = "",
    prompts: _Prompts = None,
    count: _Count = None,
    temperatures: _Temperatures = "0,1",
    engine: _Engine = None,
    output: _Output = Path("zoo"),
) -> None:
    """Predict the gain of every pair from the models' times and a few hundred tokens each."""
    _, probes, _ = _split(prompts, count)
    values = _numbers(temperatures)
    _make(output)
    with running(connect, server, targets, drafts, engine) as zoo:
        predictions = _predictions(zoo, probes, values, output)
    if not predictions:
        fail("no pair could be predicted")
    _print_predictions(predictions)


@connecting
def measure_pairs(
    connect: Connect,
    targets: _Models = None,
    drafts: _Drafts = None,
    server: _Server = "",
    prompts: _Prompts = None,
    count: _Count = None,
    tokens: _Tokens = 32,
    temperatures: _Temperatures = "0,1",
    engine: _Engine = None,
    output: _Output = Path("zoo"),
) -> None:
    """Measure all ordered pairs, predict them before, and write an HTML report. A stopped run resumes."""
    measured, probes, setting = _split(prompts, count)
    values = _numbers(temperatures)
    _make(output)
    with running(connect, server, targets, drafts, engine) as zoo:
        predictions = _predictions(zoo, probes, values, output)
        plan = Plan(zoo.targets, zoo.drafts, measured, values, tokens, refused=frozenset(zoo.refused))
        file = SampleFile(output / "samples.jsonl", zoo.models, cpu_name())
        _run(zoo.client, plan, file, "measuring")
    setting = (
        f"{cpu_name()}; {setting}, {tokens} tokens each, temperatures {temperatures}; "
        f"{datetime.now(UTC):%Y-%m-%d}; draftbridge zoo measure"
    )
    result = _result(zoo, plan, file, predictions, setting)
    _print(result)
    page, found = output / "report.html", output / "zoo.json"
    with writing(page):
        write(result, page)
    with writing(found):
        found.write_text(json.dumps(as_json(result), indent=1))
    report(f"report: {page}    figures: {found}")
    if not figures.ranking(result.figures):
        fail("no pair could be measured")


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{output} cannot be made a folder ({error.strerror}): name another one"
        raise typer.BadParameter(problem, param_hint="--output") from error
    check_writable(output / "zoo.json", "--output")


def _result(zoo: Zoo, plan: Plan, file: SampleFile, predictions: Sequence[Prediction], setting: str) -> Report:
    # Earlier samples of a pair that cannot run now are shown, too.
    wanted = {key for key, _ in replace(plan, refused=frozenset()).keys()}
    samples = [one for key, one in file.samples.items() if key in wanted]
    pairs = dict.fromkeys([*plan.pairs(), *((one.target, one.draft) for one in samples if one.draft)])
    return Report(
        "Which draft beside which target",
        setting,
        zoo.models,
        zoo.targets,
        zoo.drafts,
        samples,
        [figures.pair_figures(samples, *pair) for pair in pairs],
        predictions,
        zoo.overlaps,
        zoo.refused,
        {key: error for key, error in file.failures.items() if key in wanted},
    )


def as_json(result: Report) -> dict[str, Any]:
    """Returns all figures of a report, without the samples."""
    return {
        "setting": result.setting,
        "models": result.by_label,
        "advice": result.advice,
        "plain_tokens_per_second": {one: figures.plain_speed(result.samples, one) for one in result.targets},
        "pairs": [
            asdict(one) | {"vocabulary_overlap": result.overlaps.get((one.target, one.draft))} for one in result.figures
        ],
        "refused": [{"target": a, "draft": b, "refusal": reason} for (a, b), reason in result.refused.items()],
        "failures": [key._asdict() | {"error": error} for key, error in result.failures.items()],
        "predictions": [
            asdict(one.prediction) | {"measured_gain": one.measured, "error": one.error} for one in comparisons(result)
        ],
    }


app.command("show")(show)
app.command("predict")(predict_pairs)
app.command("measure")(measure_pairs)


def _split(path: Path | None, count: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Returns the prompts to measure, others for the prediction, and a description of both.

    Without others, the last ones are predicted from and measured.
    """
    found = bench.read_prompts(path or bench.OWN_PROMPTS)
    measured = found[: count or (len(found) if path else _COUNT)]
    others = found[len(measured) : len(measured) + _PROBES]
    text = f"{len(measured)} of {len(found)} prompts" + ("" if others else ", predicted from the last of them")
    return measured, others or found[-_PROBES:], text


def _predictions(
    zoo: Zoo, probes: Sequence[Mapping[str, Any]], temperatures: Sequence[float], output: Path
) -> list[Prediction]:
    plan = Plan(zoo.targets, zoo.drafts, probes, temperatures, _PROBE_TOKENS, (TURNS,), frozenset(zoo.refused))
    file = SampleFile(output / "probes.jsonl", zoo.models, cpu_name())
    _run(zoo.client, plan, file, "predicting")
    keys = [key for key, _ in plan.keys()]
    for key in keys:
        if key in file.failures:
            report(f"{key.target} ← {key.draft or 'alone'}, temperature {key.temperature:g}: {file.failures[key]}")
    samples, times = [file.samples[key] for key in keys if key in file.samples], zoo.times
    found = (
        predict(target, draft, temperature, samples, times["target", target], times["draft", draft])
        for target, draft in plan.pairs()
        for temperature in temperatures
    )
    return [one for one in found if one]


def _run(client: Client, plan: Plan, file: SampleFile, text: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(text, total=len(plan.keys()))
        for key in measure(client, plan, file):
            progress.update(
                task, advance=1, description=f"{text} {escape(key.target)} ← {escape(key.draft or 'alone')}"
            )


def _print_predictions(predictions: Sequence[Prediction]) -> None:
    table = Table("target", "draft", "temperature", "predicted", "tokens/s", "by", "from tokens")
    for one in sorted(predictions, key=lambda one: (one.target, one.temperature, -one.gain)):
        table.add_row(
            escape(one.target), escape(one.draft), f"{one.temperature:g}", f"{one.gain:.2f}x",
            f"{one.tokens_per_second:.1f}", one.plan, str(one.token_count),
        )  # fmt: skip
    out.print(Fitted(table))


def _print(result: Report) -> None:
    compared = comparisons(result)
    columns = ("target", "draft", "gain", "95% interval", "in turns", "accepted", "tokens/s", "texts", "predicted")
    table = Table(*columns)
    for one in figures.ranking(result.figures):
        own = [
            found for found in compared if (found.prediction.target, found.prediction.draft) == (one.target, one.draft)
        ]
        table.add_row(
            escape(one.target), escape(one.draft), f"{one.gain.mean:.2f}x",
            one.gain.interval, f"{one.turns.mean:.2f}x", f"{one.acceptance:.0%}",
            f"{one.tokens_per_second:.1f}", str(one.texts), "\n".join(map(str, own)),
        )  # fmt: skip
    out.print(Fitted(table))
    for sentence in result.advice:
        out.print(sentence, style="bold", markup=False, highlight=False, soft_wrap=True)
    if errors := [abs(one.error) for one in compared if one.error is not None]:
        close = sum(one <= _CLOSE for one in errors)
        report(f"{close} of {len(errors)} predictions are within {_CLOSE:.0%}; the largest error is {max(errors):.0%}")
    for (target, draft), problem in result.problems.items():
        report(f"{target} ← {draft or 'alone'}: {problem}")
    if result.failures:
        report("the same command repeats what failed")


def _numbers(text: str) -> list[float]:
    """Returns the temperatures of an option, each once. Raises `InvalidField`."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= one <= _MAX_TEMPERATURE for one in found):
        raise InvalidField("--temperatures", f"numbers from 0 to {_MAX_TEMPERATURE:g}, separated by commas", text)
    return list(dict.fromkeys(found))
