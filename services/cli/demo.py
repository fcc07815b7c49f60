"""The demo: generates with the default pair, with and without the draft, and compares the two."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftbridge import Client, Generation
from draftbridge.v1 import bridge_pb2
from services.cli.processes import draft_threads, fleet
from services.store.resolve import resolve

PROMPT = "The planets of the solar system, in order from the Sun, are"
# The prompt on which the planner measures before the timed runs, and the tokens generated from it.
LEARNT_ON, LEARNT = "The seven days of the week are", 120
# Colours of the sources by name. A source that is not listed gets one of `OTHERS`, chosen by its name.
STYLES = {"": "", "draft": "green", "suffix": "cyan"}
OTHERS = ("magenta", "yellow", "blue")


def run(console: Console, prompt: str, max_tokens: int, target: str, draft: str, report: Callable[[str], None]) -> None:
    """Starts a target, a draft and a bridge, prints the text as it arrives and a table, and stops the processes."""
    prompt = prompt or PROMPT
    for model in (target, draft):
        resolve(model, report)
    report("starting a target, a draft and a bridge")
    with (
        # Without --deterministic, rounding may differ between the two runs, and so may the texts.
        fleet(
            target, draft, target_options=("--deterministic",), draft_options=("--threads", str(draft_threads()))
        ) as running,
        Client(running.bridge) as client,
    ):
        report(f"target {target} at {running.target}, draft {draft} at {running.draft}, bridge at {running.bridge}")
        for mode in ("off", "auto"):  # the first call in each mode is slower, so it is not timed
            client.generate(prompt, max_tokens=4, speculation=mode)
        report("measuring passes and acceptance on another prompt")
        client.generate(LEARNT_ON, max_tokens=LEARNT)
        console.print()
        console.print(_legend(("", "draft", "suffix")))
        console.print()
        console.print(prompt, style="dim", end="", soft_wrap=True, markup=False, highlight=False)
        together = _stream(console, client, prompt, max_tokens)
        console.print()
        alone = client.generate(prompt, max_tokens=max_tokens, speculation="off")
    console.print()
    console.print(_table(together, alone, target, draft))
    if together.text == alone.text:
        console.print(
            "The two texts are the same, byte for byte. The target runs with --deterministic, which makes it slower."
        )
        console.print(f"The planner: {together.finished.speculation.plan_summary}.", style="dim", highlight=False)
        console.print("Times vary from run to run. To try another prompt: draftbridge demo 'PROMPT'", style="dim")
    else:
        console.print("[bold red]The two texts differ. This is a bug: please report it with the prompt.[/]")


def _stream(console: Console, client: Client, prompt: str, max_tokens: int) -> Generation:
    events = []
    for event in client.stream(prompt, max_tokens=max_tokens):
        if isinstance(event, bridge_pb2.GenerateDelta):
            for part, source in _by_source(event):
                console.print(part, style=_style(source), end="", soft_wrap=True, markup=False, highlight=False)
        events.append(event)
    return Generation.of(events)


def _by_source(delta: bridge_pb2.GenerateDelta) -> Iterator[tuple[str, str]]:
    """Yields pieces of a delta's text, each with the name of the source that proposed it ("" for the target)."""
    data, begin = delta.text.encode(), 0
    for number, span in enumerate(delta.spans, start=1):
        end = len(data) if number == len(delta.spans) else begin + span.byte_count
        # A character that is split between two pieces goes to the second one.
        part = data[begin:end].decode(errors="ignore")
        yield part, span.source
        begin += len(part.encode())


def _style(source: str) -> str:
    return STYLES.get(source) or (OTHERS[sum(source.encode()) % len(OTHERS)] if source else "")


def _legend(sources: Sequence[str]) -> Text:
    pieces = [(f"proposed by {source}" if source else "target's own", _style(source)) for source in sources]
    return Text(" · ").join(Text(*piece) for piece in pieces)


def _table(together: Generation, alone: Generation, target: str, draft: str) -> Table:
    table = Table("", f"{target}\n+ {draft}", f"{target}\nalone", box=box.SIMPLE_HEAD)
    runs = [(run.finished.usage, run.finished.speculation) for run in (together, alone)]
    reference = _speed(alone)

    def row(label: str, of: Callable[[bridge_pb2.Usage, bridge_pb2.SpeculationStatistics], str]) -> None:
        table.add_row(label, *(of(usage, speculation) for usage, speculation in runs))

    row("tokens", lambda usage, _: str(usage.generated_token_count))
    row("target passes", lambda _, did: str(did.target_pass_count))
    row("accepted tokens", lambda _, did: f"{did.num_accepted_tokens} of {did.num_draft_tokens} candidates")
    for name in (source.name for source in together.finished.speculation.sources):
        row(f"  from {name}", partial(_accepted_of, name))
    row("accepted bytes", lambda _, did: f"{did.accepted_byte_count} of {did.generated_byte_count} generated")
    row("time", lambda _, did: f"{did.elapsed_ns / 1e9:.2f} s")
    table.add_row("speed", *(f"{_speed(run):.1f} tokens/s" for run in (together, alone)))
    table.add_row("ratio", *(f"{_speed(run) / reference:.2f}" for run in (together, alone)))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _accepted_of(name: str, _: bridge_pb2.Usage, did: bridge_pb2.SpeculationStatistics) -> str:
    source = next((one for one in did.sources if one.name == name), bridge_pb2.SourceStatistics())
    return f"{source.num_accepted_tokens} of {source.num_draft_tokens}"


def _speed(result: Generation) -> float:
    finished = result.finished
    return float(finished.usage.generated_token_count / (finished.speculation.elapsed_ns / 1e9))
