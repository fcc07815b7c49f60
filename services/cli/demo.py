"""Runs `draftbridge demo`: two models with different tokenizers generate together, and a table shows the gain."""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from bridge.errors import DraftBridgeError, UnusableModel
from draftbridge import Client, Event
from draftbridge.v1 import bridge_pb2
from services.child import bound_command
from services.cli import bench
from services.cli.bench import ALONE, AUTO, Sample
from services.cli.fitted import Fitted
from services.cli.pieces import pieces
from services.cli.processes import Fleet, ProcessFailed, draft_threads, fleet
from services.engines import registry
from services.engines.cpu import lacks_bfloat16, surely_on_cpu
from services.engines.spec import EngineOptions
from services.errors import ChecksumMismatch, DamagedFile, ModelNotFound
from services.store.built_in import SUFFIX
from services.store.cache import NoSpace
from services.store.resolve import resolve

# Colours of the sources, by name; any other source gets `OTHER`.
STYLES = {"": "", "draft": "green", "suffix": "cyan", "grammar": "magenta", "learned": "yellow"}
OTHER = "blue"
NAMES = {
    "": "the target's own",
    "draft": "proposed by the draft",
    "suffix": "by prompt lookup",
    "grammar": "by the grammar",
    "learned": "by n-grams of earlier outputs",
}
# The most and the fewest tokens of the text; in between, the target alone takes about this long for them.
_MAX_TOKENS, _MIN_TOKENS, _ALONE_SECONDS = 96, 48, 30
# Each sequence has as much memory as with the default of eight, which takes seconds to set up.
_SLOTS = ("--slots", "2", "--kv-memory", "0.5")
# The tokens of the first requests, which read the prompt and are slower.
_FIRST_TOKENS = 8


@dataclass(frozen=True)
class Demonstration:
    """What the demo runs. `prompt` is a chat message if the target chats.

    `engine`: the target's. `reasons`: why the target runs on the engine that it has, by its name, "" for any other.
    """

    target: str
    draft: str
    prompt: str
    engine: str = registry.AUTO
    reasons: Mapping[str, str] = field(default_factory=dict)

    def reason(self, engine: str) -> str:
        """Returns why the target runs on an engine, "" if that was the user's choice."""
        return self.reasons.get(engine, self.reasons.get("", ""))


def large_engine(without_bfloat16: bool) -> str:
    """Returns the engine for the target of the large pair: full precision gains most, where it is not too slow."""
    return registry.AUTO if without_bfloat16 else "torch"


# The draft writes most of the docstrings; the functions repeat the prompt, so that prompt lookup has its part.
_CODE_PROMPT = """Add a docstring to each function:

def area(width, height):
    return width * height

def perimeter(width, height):
    return 2 * (width + height)

def is_square(width, height):
    return width == height"""
_CHOSEN = (
    "The target runs in the engine that --engine auto chooses: of those that are installed, the one with the best "
    "expected speed with a good draft. "
)
_FASTEST_ALONE = (
    "Without a draft, 4-bit weights on a CPU (--engine llamacpp or ik_llama, depending on the processor) usually give "
    "the most tokens per second"
)
# Eleven to one in size, from two families, with two tokenizers.
LARGE = Demonstration(
    "qwen2.5-coder-1.5b-instruct",
    "smollm2-135m-instruct",
    _CODE_PROMPT,
    engine=large_engine(lacks_bfloat16() and surely_on_cpu(EngineOptions().device)),
    reasons={
        "torch": "The target runs in torch with its weights in full precision, where a pass over several tokens costs "
        f"little more than a pass over one. {_FASTEST_ALONE}; that may be as fast as this pair.",
        "": f"{_CHOSEN}{_FASTEST_ALONE}. In full precision (--engine torch) a draft gains more, but the target alone "
        "is slower, by several times on a CPU that does not compute in bfloat16.",
    },
)
SMALL = Demonstration(
    "gemma-3-270m",
    "smollm2-135m-instruct",
    "The planets of the solar system, in order from the Sun, are",
    reasons={
        "": f"{_CHOSEN}{_FASTEST_ALONE}. The large pair (make demo) shows what a draft gains that is eleven times as "
        "small as its target."
    },
)


def run(console: Console, wanted: Demonstration, max_tokens: int | None, report: Callable[[str], None]) -> None:
    """Starts three processes, prints the text as it comes and a table, and stops the processes.

    If the target of the large pair cannot be had or does not start, reports it and runs another one, see `_instead`.
    `max_tokens`: None for fewer with a slower target.
    """
    wanted = _fetched(wanted, report)
    with ExitStack() as stack:
        wanted, running = _running(wanted, stack, report)
        client = stack.enter_context(Client(running.bridge))
        served = bench.models_of(client.services(), bench.measured_pair(client.pairs()))
        described = ", ".join(f"{one.name} ({one.engine}, {one.dtype})" for one in served)
        report(f"{described}; bridge at {running.bridge}")
        target = served[0]
        chats = bool(target.chat_template)
        options: dict[str, Any] = {"prompt": wanted.prompt}
        if chats:
            options = {"messages": [{"role": "user", "content": wanted.prompt}]}
        first = bench.sample_of(client.stream(**options, max_tokens=_FIRST_TOKENS, speculation="off"), ALONE)
        client.generate(**options, max_tokens=_FIRST_TOKENS)
        if max_tokens is None:
            max_tokens = _token_count(bench.speed([first]))
        console.print()
        console.print(_legend(("", "draft", "suffix")))
        console.print()
        console.print(
            wanted.prompt, style="dim", end="\n\n" if chats else "", soft_wrap=True, markup=False, highlight=False
        )
        events = client.stream(**options, max_tokens=max_tokens)
        together = bench.sample_of(_printed(console, events), AUTO)
        console.print()
        report("the same text by the target alone, for comparison")
        alone = bench.sample_of(client.stream(**options, max_tokens=max_tokens, speculation="off"), ALONE)
    console.print(Fitted(bench.table([alone, together])))
    unwrapped = not console.is_terminal  # on a terminal no line breaks within a word
    console.print(_why(together, alone), highlight=False, soft_wrap=unwrapped)
    if reason := wanted.reason(target.engine):
        console.print(reason, style="dim", highlight=False, soft_wrap=unwrapped)
    console.print(_compared(together.text, alone.text), soft_wrap=unwrapped)


def _started(wanted: Demonstration, report: Callable[[str], None]) -> AbstractContextManager[Fleet]:
    """Returns the three processes, which start when it is entered."""
    report("starting a target, a draft and a bridge: the models are loaded, checked and measured")
    return fleet(
        wanted.target,
        None if wanted.draft == "none" else wanted.draft,
        target_options=("--engine", wanted.engine, "--deterministic", *_SLOTS),
        draft_options=("--engine", "auto", "--threads", str(draft_threads()), *_SLOTS),
    )


def _running(wanted: Demonstration, stack: ExitStack, report: Callable[[str], None]) -> tuple[Demonstration, Fleet]:
    """Starts the three processes, and those of another pair if the large target does not start. Returns the pair."""
    try:
        return wanted, stack.enter_context(_started(wanted, report))
    except ProcessFailed as error:
        if error.metadata.get("process") != "target":
            raise
        return _running(_fetched(_instead(wanted, error, report), report), stack, report)


def _token_count(alone: float) -> int:
    """Returns how many tokens to generate, given how many the target alone generates per second."""
    return min(max(int(_ALONE_SECONDS * alone), _MIN_TOKENS), _MAX_TOKENS)


def _instead(wanted: Demonstration, error: DraftBridgeError, report: Callable[[str], None]) -> Demonstration:
    """Returns what runs in place of the large pair, whose target failed, and reports why.

    First the same pair with another engine, which may need less disk and memory, unless the model's file itself is
    missing or wrong; then the small pair. Raises the error for any other pair.
    """
    if (wanted.target, wanted.draft) != (LARGE.target, LARGE.draft):
        raise error
    may_change = wanted.reasons and wanted.engine != registry.AUTO  # the engine is not the user's choice
    if may_change and not isinstance(error, ModelNotFound | ChecksumMismatch | DamagedFile):
        report(f"{error}; going on with --engine auto, which converts nothing if it finds an engine for GGUF files")
        return replace(wanted, engine=registry.AUTO)
    report(f"{error}; going on with the small pair")
    return replace(SMALL, prompt=SMALL.prompt if wanted.prompt == LARGE.prompt else wanted.prompt)


def _compared(together: str, alone: str) -> str:
    """Returns in plain words whether the two texts are the same."""
    if together == alone:
        return "Both texts are the same, byte for byte (the target is served with --deterministic)."
    return "[bold red]The two texts differ. That is a bug: please report it with the prompt.[/]"


def _fetched(wanted: Demonstration, report: Callable[[str], None]) -> Demonstration:
    """Downloads the models, those of another pair if the large target cannot be had. Returns the pair.

    Raises a `DraftBridgeError`, as for a draft that cannot be had.
    """
    try:
        _fetch_target(wanted, report)
    except (ModelNotFound, UnusableModel, NoSpace) as error:
        return _fetched(_instead(wanted, error, report), report)
    if _has_files(wanted.draft):
        resolve(wanted.draft, report, weights="")  # here it shows what went wrong
    return wanted


def _has_files(draft: str) -> bool:
    return draft not in ("none", SUFFIX)


def _fetch_target(wanted: Demonstration, report: Callable[[str], None]) -> None:
    """Downloads the target, and converts it for its engine. Raises a `DraftBridgeError`.

    Another process downloads the draft and reads its tokenizer meanwhile.
    """
    words = bound_command("services.store.resolve", wanted.draft)
    devnull = subprocess.DEVNULL
    beside = subprocess.Popen(words, stdout=devnull, stderr=devnull) if _has_files(wanted.draft) else None
    try:
        if wanted.engine == registry.AUTO:
            resolve(wanted.target, report, weights="")
        else:
            registry.prepare(wanted.engine, wanted.target, EngineOptions(), report)
        if beside:
            beside.wait()
    finally:
        if beside:
            beside.terminate()
            beside.wait()


def _why(together: Sample, alone: Sample) -> str:
    """Returns in plain words where the gain comes from."""
    did, plain = together.speculation, alone.speculation
    if not did.num_draft_tokens:
        return "The planner expected no gain from any source here, and left the target alone."
    if not did.num_accepted_tokens:
        return f"None of the {did.num_draft_tokens} candidates was right here, so nothing was gained."
    pass_cost = (did.verify_ns / did.target_pass_count) / (plain.verify_ns / plain.target_pass_count)
    shares = " and ".join(
        f"{one.accepted_byte_count / did.generated_byte_count:.0%} "
        + NAMES.get(one.name, f"by {one.name}").removeprefix("proposed ")
        for one in did.sources
        if one.accepted_byte_count
    )
    return (
        f"Why: of the text, {shares.replace(' by ', ' was proposed by ', 1)}. So a pass of the target gave "
        f"{(together.token_count + 1) / did.target_pass_count:.1f} tokens instead of 1 and took {pass_cost:.2f} times "
        f"as long; {did.waited_ns / did.elapsed_ns:.0%} of the time the target waited for the draft. "
        f"Predicted: {did.predicted_tokens_per_second:.1f} tokens/s, measured: {did.measured_tokens_per_second:.1f}."
    )


def _printed(console: Console, events: Iterator[Event]) -> Iterator[Event]:
    """Passes events on, and prints their text in the colours of its sources."""
    for event in events:
        if isinstance(event, bridge_pb2.GenerateDelta):
            for part, source in pieces(event.text, ((span.byte_count, span.source) for span in event.spans)):
                console.print(part, style=_style(source), end="", soft_wrap=True, markup=False, highlight=False)
        yield event


def _style(source: str) -> str:
    return STYLES.get(source) or (OTHER if source else "")


def _legend(sources: Sequence[str]) -> Text:
    return Text(" · ").join(Text(NAMES[source], _style(source)) for source in sources)
