"""Measures what a round costs with models that cost nothing: the bridge, the services and their streams.

    python -m benchmarks.rounds [--tokens 400] [--repeats 6] [--cases "lockstep, 1" auto ...] [--json FILE]
        [--tokenizers TARGET.json DRAFT.json]

A target service, a draft service and the bridge run as processes over loopback. Only the models are stand-ins that
recite a text (`benchmarks.reciting`), with four of five draft tokens right. A round is a pass of the target and all
that happens since the previous one. In lockstep it lasts from one delta at the client to the next, and the median is
over rounds. In other modes passes arrive in bursts, so a round is the mean of a generation, and the median is over
generations. The 95th percentile is always of the time between deltas. A round's own cost is the median less the mean
time of the models: the target's forward, and in lockstep also the draft's forwards, for which the round waits. It thus
includes the bridge (translation, matching, planning), both services (scheduler, sampling), the messages between the
four processes, and the client. In lockstep with one token there is one round trip to the draft and one to the target.

The text is this repository's documentation. In the "repeated" cases it repeats its beginning. Tokenizers are trained on
it unless given. Cases take turns, so that changes in the machine's speed affect all alike; the first run of each case
is not counted.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns

from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from draftbridge import Client
from draftbridge.v1 import bridge_pb2
from services.cli.processes import launched

ROOT = Path(__file__).parents[1]
# Bytes that occur twice in the text, and the further bytes that belong to the prompt.
REPEATED, PROMPT = 4096, 512
ACCEPTANCE = 0.8
# Vocabulary sizes of the two trained tokenizers, which split the text differently.
SIZES = 4000, 1000


@dataclass(frozen=True)
class Case:
    """A mode and its settings. `repeated`: the output repeats the prompt. `drafted`: the bridge has a draft model."""

    name: str
    mode: str
    assistant_tokens: int | None = None
    repeated: bool = False
    drafted: bool = True


CASES = (
    Case("off", "off"),
    Case("lockstep, 1", "lockstep", 1),
    Case("lockstep, 4", "lockstep", 4),
    Case("opportunistic", "opportunistic"),
    Case("auto", "auto"),
    Case("auto, no draft", "auto", drafted=False),
    Case("auto, no draft, repeated", "auto", repeated=True, drafted=False),
)


@dataclass(frozen=True)
class Run:
    """One generation of a case. Times are in nanoseconds; `gaps` are those between its deltas."""

    case: Case
    gaps: tuple[int, ...]
    pass_count: int
    token_count: int
    models_ns: int
    bridge_ns: int


@dataclass(frozen=True)
class Cost:
    """The cost of a case's rounds in milliseconds; see the module docstring."""

    case: str
    round_count: int
    tokens_per_round: float
    median_ms: float
    p95_ms: float
    models_ms: float
    bridge_ms: float
    own_ms: float


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=6)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    parser.add_argument("--tokenizers", nargs=2, type=Path, help="tokenizer.json of the target and of the draft")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.cases]
    text = recited()
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = arguments.tokenizers or _trained(text, Path(folder))
        with _bridges(text, tokenizers, Path(folder)) as bridges:
            runs: list[Run] = []
            for repeat in range(arguments.repeats + 1):
                measured = [_run(bridges[case.drafted], case, text, arguments.tokens) for case in cases]
                runs += measured if repeat else []
    costs = [cost([run for run in runs if run.case is case]) for case in cases]
    Console(width=120).print(_table(costs))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in costs], indent=1))


def recited() -> str:
    """Returns the documentation, with its beginning twice."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "".join(file.read_text() for file in files)
    return text[:REPEATED] + text


def _trained(text: str, folder: Path) -> list[Path]:
    paths = []
    for size in SIZES:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
        tokenizer.train_from_iterator([text], trainer)
        paths.append(folder / f"{size}.json")
        tokenizer.save(str(paths[-1]))
    return paths


@contextmanager
def _bridges(text: str, tokenizers: Sequence[Path], folder: Path) -> Iterator[dict[bool, Client]]:
    """Starts two bridges to one target, with and without a draft, and yields their clients."""
    file = folder / "text"
    file.write_text(text)
    options = ("--text", str(file), "--tokenizer")
    acceptance = ("--acceptance", str(ACCEPTANCE))
    with ExitStack() as stack:

        def start(name: str, *arguments: str, module: str) -> str:
            return stack.enter_context(launched(name, *arguments, module=module))[0]

        target = start("target", *options, str(tokenizers[0]), "--role", "target", module="benchmarks.reciting")
        draft = start(
            "draft", *options, str(tokenizers[1]), "--role", "draft", *acceptance, module="benchmarks.reciting"
        )
        clients = {}
        for drafted, drafts in ((True, ("--draft", draft)), (False, ())):
            served = ("bridge", "--target", target, *drafts, "--listen", "127.0.0.1:0", "--until-stdin-closes")
            clients[drafted] = stack.enter_context(Client(start("bridge", *served, module="services.cli")))
        yield clients


def _run(client: Client, case: Case, text: str, tokens: int) -> Run:
    prompt = text[: REPEATED if case.repeated else 2 * REPEATED + PROMPT]
    arrivals, received = [], ""
    finished: bridge_pb2.GenerateFinished | None = None
    for event in client.stream(
        prompt, max_tokens=tokens, speculation=case.mode, num_assistant_tokens=case.assistant_tokens
    ):
        if isinstance(event, bridge_pb2.GenerateDelta):
            arrivals.append(perf_counter_ns())
            received += event.text
        elif isinstance(event, bridge_pb2.GenerateFinished):
            finished = event
    assert finished is not None and text.startswith(prompt + received), "the text is not the target's own"
    did = finished.speculation
    return Run(
        case=case,
        gaps=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        pass_count=did.target_pass_count,
        token_count=finished.usage.generated_token_count,
        models_ns=did.verify_ns + (sum(source.compute_ns for source in did.sources) if case.mode == "lockstep" else 0),
        bridge_ns=did.bridge_ns,
    )


def cost(runs: Sequence[Run]) -> Cost:
    """Returns the cost of the rounds of one case, given all its runs."""
    case = runs[0].case
    gaps = [gap for run in runs for gap in run.gaps]
    rounds = gaps if case.mode == "lockstep" else [sum(run.gaps) / len(run.gaps) for run in runs]
    median_ms = median(rounds) / 1e6
    passes = sum(run.pass_count for run in runs)
    models_ms = sum(run.models_ns for run in runs) / passes / 1e6
    return Cost(
        case=case.name,
        round_count=len(gaps),
        tokens_per_round=sum(run.token_count for run in runs) / passes,
        median_ms=median_ms,
        p95_ms=quantiles(gaps, n=20)[-1] / 1e6,
        models_ms=models_ms,
        bridge_ms=sum(run.bridge_ns for run in runs) / passes / 1e6,
        own_ms=median_ms - models_ms,
    )


def _table(costs: Sequence[Cost]) -> Table:
    table = Table(
        "", "rounds", "tokens/round", "round", "p95", "models", "own cost", "of it translation and planning",
        title="milliseconds of a round, at the median", box=box.SIMPLE,
    )  # fmt: skip
    for one in costs:
        times = (one.median_ms, one.p95_ms, one.models_ms, one.own_ms, one.bridge_ms)
        table.add_row(
            one.case, str(one.round_count), f"{one.tokens_per_round:.2f}", *(f"{value:.3f}" for value in times)
        )
    for column in table.columns[1:]:
        column.justify = "right"
    return table


if __name__ == "__main__":
    main()
