"""The command `bench`."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Any

import typer

from draftbridge import CallError, Client
from services.cli import bench
from services.cli.connection import Connect, connecting
from services.cli.fitted import Fitted
from services.cli.processes import (
    check_cores,
    draft_threads,
    fetch,
    fleet,
    how_ended,
    private_environment,
    server_options,
)
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET, check_writable, err, fail, out, report, writing
from services.config import MODEL_HELP
from services.engines.cpu import cpu_name
from services.engines.registry import AUTO
from services.interrupts import as_interrupts
from services.store.built_in import SUFFIX

_CORES_HELP = "Cores for the {}, such as 0,1 or 0-3. Disjoint cores simulate two machines."


@connecting
def run(
    connect: Connect,
    target: Annotated[str, typer.Option(help=f"The model whose text you want. {MODEL_HELP}")] = DEFAULT_TARGET,
    draft: Annotated[str, typer.Option(help="The draft model; none measures prompt lookup only.")] = DEFAULT_DRAFT,
    server: Annotated[str, typer.Option(help="HOST:PORT of a running bridge to measure instead.")] = "",
    prompts: Annotated[
        Path,
        typer.Option(
            help="Your prompts: .txt with one on each line, JSON or JSON lines.", show_default="12 built-in prompts"
        ),
    ] = bench.OWN_PROMPTS,
    count: Annotated[int, typer.Option(min=1, help="The most prompts, evenly over their categories.")] = 12,
    tokens: Annotated[int, typer.Option(min=2, max=2**32 - 1, help="Tokens to generate for each prompt.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    engine: Annotated[
        str | None, typer.Option(help="Engine of the target; see `draftbridge engines`.", show_default=AUTO)
    ] = None,
    draft_engine: Annotated[str | None, typer.Option(help="Engine of the draft.", show_default=AUTO)] = None,
    dtype: Annotated[str | None, typer.Option(help="Type that the target computes in.", show_default="auto")] = None,
    weights: Annotated[
        str | None, typer.Option(help="How the target's weights are stored.", show_default="auto")
    ] = None,
    target_cores: Annotated[str, typer.Option(help=_CORES_HELP.format("target"))] = "",
    draft_cores: Annotated[str, typer.Option(help=_CORES_HELP.format("draft"))] = "",
    json: Annotated[Path | None, typer.Option(help="Write everything that was measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios to this file, PNG or SVG.")] = None,
) -> None:
    """Measure a pair on your prompts and your machine, and report whether speculation helps."""
    read = {"--prompts": prompts}
    for name, path in (("--json", json), ("--plot", plot)):  # not found out after minutes of measuring
        if path:
            check_writable(path, name)
            for other, taken in read.items():
                if path == taken or (path.exists() and taken.exists() and path.samefile(taken)):
                    raise typer.BadParameter(f"it is the file of {other}: name another one", param_hint=name)
            read[name] = path
    if plot:
        bench.check_plot(plot)
    given = bench.read_prompts(prompts, count)
    of_target, of_draft = _cores(target_cores), _cores(draft_cores)
    if server and (of_target or of_draft):
        raise typer.BadParameter("the processes of a running bridge cannot be pinned", param_hint="--server")
    of_servers = {"--target": (target, DEFAULT_TARGET), "--draft": (draft, DEFAULT_DRAFT), "--weights": (weights, None)}
    of_servers |= {"--engine": (engine, None), "--draft-engine": (draft_engine, None), "--dtype": (dtype, None)}
    extra = [name for name, (value, default) in of_servers.items() if value != default]
    if server and extra:
        problem = "it is for servers that this command starts; of a running bridge, the first usable pair is measured"
        raise typer.BadParameter(problem, param_hint=extra[0])
    drafted = None if draft == "none" else draft
    with ExitStack() as stack:
        stack.enter_context(as_interrupts())
        address, running = server, dict[str, Popen[str]]()
        if not server:
            environment = private_environment()
            usual = {"engine": AUTO}
            target_options = server_options(target, environment, usual, engine=engine, dtype=dtype, weights=weights)
            usual |= {"threads": str(draft_threads())}
            if draft == SUFFIX and draft_engine:
                raise typer.BadParameter("prompt lookup runs without an engine", param_hint="--draft-engine")
            threads = str(len(of_draft)) if of_draft else None
            draft_options = server_options(draft, environment, usual, engine=draft_engine, threads=threads)
            fetch([target], [drafted], report, trusted=target_options.trusted)
            report("starting the model servers and a bridge")
            started = stack.enter_context(
                fleet(
                    target,
                    drafted,
                    target_options=target_options.words,
                    draft_options=draft_options.words,
                    target_cores=of_target,
                    draft_cores=of_draft,
                )
            )
            address, running = started.bridge, started.processes
        client = stack.enter_context(connect(address) if server else Client(address))
        pairs = client.pairs()
        pair = bench.measured_pair(pairs)
        models = bench.models_of(client.services(), pair)
        if not models:
            fail(f"the bridge at {address} has no model to measure: connect it to a target, or wait until it is there")
        for one in [] if pair.draft else pairs:
            report(f"{one.draft} is not measured beside {one.target}: {one.refusal}")
        ways = [way for way in bench.WAYS if pair.draft or way != "draft model"]
        served = ", ".join(f"{one.name} ({one.engine}, {one.dtype}, {one.device})" for one in models)
        samples: list[bench.Sample] = []
        failures: list[dict[str, Any]] = []
        stopped = ""
        with err.status("measuring") as status:
            try:
                for number, found in enumerate(bench.measure(client, pair, given, ways, tokens, temperature), start=1):
                    if isinstance(found, str):
                        failures.append({"prompt": number - 1, "error": found})
                        report(f"prompt {number} is left out: {found}")
                        if stopped := _ended(running):
                            break
                    else:
                        samples += found
                    status.update(f"measured {number} of {len(given)} prompts")
            except KeyboardInterrupt:
                stopped = "it was interrupted"
            except CallError as error:
                stopped = _ended(running) or str(error)
    if stopped:
        report(f"measuring stopped: {stopped}")
    if not samples:
        fail("no prompt could be measured")
    count = len({one.prompt for one in samples})
    title = f"{served}; {cpu_name()}; {count} prompts of {tokens} tokens, temperature {temperature:g}"
    verdict = bench.verdict(samples, pair.draft if server else draft)
    if count < len(given):
        verdict += f" This is from {count} of {len(given)} prompts."
    try:  # files first: who reads the output may leave
        if json:
            asked = {"prompts": prompts.name, "tokens": tokens, "temperature": temperature, "weights": weights or AUTO}
            pinned = {"target_cores": target_cores, "draft_cores": draft_cores}
            about = {"title": title, "verdict": verdict, **asked, **pinned, "failures": failures, "stopped": stopped}
            with writing(json):
                json.write_text(bench.as_json(samples, about))
        if plot:
            with writing(plot):
                bench.plot(samples, title.replace("; ", "\n"), plot)
    finally:
        out.print(title, markup=False, highlight=False, soft_wrap=True)
        out.print(Fitted(bench.table(samples)))
        out.print(Fitted(bench.time_table(samples)))
        if differences := bench.differences(samples):
            out.print(differences, style="dim", markup=False, highlight=False, soft_wrap=True)
        out.print(verdict, style="bold", markup=False, highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(1)


def _ended(processes: Mapping[str, Popen[str]]) -> str:
    """Returns which of the servers has ended, and how; "" if all run."""
    ended = ((name, one.returncode) for name, one in processes.items() if one.poll() is not None)
    return next((f"the {name} has ended {how_ended(status)}" for name, status in ended), "")


def _cores(text: str) -> list[int] | None:
    """Reads "0,2-3" as [0, 2, 3]; None if it is empty. Raises `ProcessFailed` for cores that are not there."""
    if not text:
        return None
    try:
        ranges = [[int(number) for number in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of cores such as 0,1 or 0-3") from None
    check_cores([core for ends in ranges for core in ends], text)  # first, because a range may have billions of cores
    cores = list(dict.fromkeys(core for ends in ranges for core in range(ends[0], ends[-1] + 1)))
    check_cores(cores, text)
    return cores
