"""Measures how fast a pair is on this machine, source by source, and if speculation helps, for `draftbridge bench`.

Every prompt runs in every way, one after the other, so that changes in the machine's speed affect all ways alike; the
order rotates from prompt to prompt. Before these runs both models read the prompt once. Times exclude the first pass of
the target, which mostly measures how long the prompt is.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from rich import box
from rich.table import Table

from bridge.errors import DraftBridgeError
from draftbridge import CallError, Client, Event
from draftbridge.v1 import bridge_pb2, model_pb2
from services.engines.cpu import core_count, cpu_name
from services.extras import install_extra

T = TypeVar("T")

# Prompts of six kinds that come with the package.
OWN_PROMPTS = Path(__file__).with_name("prompts.json")
ALONE, AUTO = "target alone", "auto"
# Ways to generate, by name: options of `Client.generate`.
WAYS: dict[str, dict[str, Any]] = {
    ALONE: {"speculation": "off"},
    "prompt lookup": {"sources": ["suffix"]},
    "draft model": {"sources": ["draft"]},
    AUTO: {},
}
_PICTURES = ("pdf", "png", "svg")
_SOURCES = {"draft": "draft model", "suffix": "prompt lookup", "learned": "earlier outputs"}
# Speculation that gains less is not worth a second model: it is within what two runs differ by.
WORTH_IT = 1.05
# Below this, the loss is more than what two runs differ by.
_LOST = 1 / WORTH_IT


class InvalidPrompts(DraftBridgeError, reason="INVALID_PROMPTS"):
    """A file of prompts cannot be read, or a picture cannot be drawn."""


@dataclass(frozen=True)
class Sample:
    """One prompt in one way. Times in nanoseconds; `token_count` and `elapsed_ns` leave the target's first pass out."""

    prompt: int
    category: str
    way: str
    token_count: int
    elapsed_ns: int
    first_token_ns: int
    text: str
    speculation: bridge_pb2.SpeculationStatistics


def read_prompts(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Returns dictionaries with a `category` and `prompt` or `messages`, at most `count`, evenly over the categories.

    `path`: a JSON list or JSON lines of such, of texts, or of objects with `turns` as in Spec-Bench, of which the first
    is taken; or plain text, a prompt on each line. Raises `InvalidPrompts`.
    """
    by_category: dict[str, list[dict[str, Any]]] = {}
    try:
        for place, entry in _entries(path.read_text(encoding="utf-8-sig"), lines_of_text=path.suffix == ".txt"):
            try:
                one = _prompt(entry)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            by_category.setdefault(one["category"], []).append(one)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidPrompts(
            f"{path} cannot be read ({reason}): give a .txt file with a prompt on each line, or JSON with a text, or "
            "with prompt or messages and optionally category, in each entry"
        ) from None
    in_turn = [one for one in chain.from_iterable(zip_longest(*by_category.values())) if one][:count]
    if not in_turn:
        raise InvalidPrompts(f"{path} has no prompts: put at least one into it")
    return in_turn


def _entries(text: str, *, lines_of_text: bool) -> Iterator[tuple[str, Any]]:
    """Yields the place of each prompt in a file's text, and the value there. Raises `ValueError`."""
    if text.lstrip().startswith("[") and not lines_of_text:
        for number, entry in enumerate(json.loads(text), start=1):
            yield f"prompt {number}", entry
        return
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):  # U+2028 is text
        if line.strip():
            try:
                yield f"line {number}", line if lines_of_text else json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} column {error.colno}: {error.msg}") from None


def _prompt(entry: Any) -> dict[str, Any]:
    """Returns an entry of a file as `read_prompts` does. Raises `ValueError` for what cannot be one."""
    if isinstance(entry, str):
        return {"prompt": entry, "category": ""}
    if not isinstance(entry, dict):
        raise ValueError("a prompt must be a text or an object")
    category = entry.get("category", "")
    if not isinstance(category, str):
        raise ValueError("category must be a text")
    if "turns" in entry:
        turns = entry["turns"]
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
            raise ValueError("turns must be a list that begins with a text")
        return {"messages": [{"role": "user", "content": turns[0]}], "category": category}
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("it needs either prompt or messages, or turns")
    if "prompt" in entry and not isinstance(entry["prompt"], str):
        raise ValueError("prompt must be a text")
    if "messages" in entry and not (isinstance(entry["messages"], list) and all(map(_is_message, entry["messages"]))):
        raise ValueError("messages must be a list of objects, each with a text as role and one as content")
    return entry | {"category": category}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def measured_pair(pairs: Iterable[bridge_pb2.Pair]) -> bridge_pb2.Pair:
    """Returns the first pair that can run; one without names, for the first target alone, if there is none."""
    return next((one for one in pairs if not one.refusal), bridge_pb2.Pair())


def models_of(services: Sequence[bridge_pb2.ServiceState], pair: bridge_pb2.Pair) -> list[model_pb2.Model]:
    """Returns the target of a pair, the first if it has no name, and the draft, if any. Both may have one name."""
    found = []
    for role, name in ((model_pb2.ROLE_TARGET, pair.target), (model_pb2.ROLE_DRAFT, pair.draft)):
        ones = [one.model for one in services if one.role == role and one.state == one.STATE_AVAILABLE]
        if name or role == model_pb2.ROLE_TARGET:
            found += [one for one in ones if name in ("", one.name)][:1]
    return found


def measure(
    client: Client,
    pair: bridge_pb2.Pair,
    prompts: Sequence[Mapping[str, Any]],
    ways: Sequence[str],
    max_tokens: int,
    temperature: float,
) -> Iterator[list[Sample] | str]:
    """Yields the samples of one prompt after the other, in the order of `ways`, or why there are none.

    A prompt has none, either, if the draft took no part in all of a generation. Each prompt has its own seed. Raises
    `CallError` if the bridge itself does not answer.
    """
    for index, prompt in enumerate(prompts):
        options: dict[str, Any] = {"target": pair.target, "draft": pair.draft, "messages": prompt.get("messages")}
        options |= {"temperature": temperature, "seed": index}
        text = prompt.get("prompt")
        samples = {}
        try:
            warm(client, text, drafted=bool(pair.draft), **options)
            for place in range(len(ways)):
                way = ways[(place + index) % len(ways)]
                events = client.stream(text, **options, max_tokens=max_tokens, **WAYS[way])
                samples[way] = sample_of(events, way, index, prompt["category"])
        except CallError as error:
            client.models()
            yield str(error)
        else:
            # Without a draft, a note only explains why there is none.
            notes = [one.speculation.note for one in samples.values() if pair.draft and one.speculation.note]
            yield notes[0] if notes else [samples[way] for way in ways]


def warm(client: Client, prompt: str | None = None, *, drafted: bool, **options: Any) -> None:
    """Lets the target, and the draft if there is one, read a prompt, so that the time excludes it. Raises `CallError`.

    In three tokens, because of two the draft can propose none; in turns, because `auto` may not use the draft.
    """
    client.generate(prompt, **options, max_tokens=3, speculation="lockstep" if drafted else "off")


def sample_of(events: Iterable[Event], way: str, index: int = 0, category: str = "") -> Sample:
    """Returns the sample that results from the events of one generation."""
    text, token_count, first_count = "", 0, 0
    for event in events:
        if isinstance(event, bridge_pb2.GenerateDelta):
            text, token_count = text + event.text, token_count + len(event.token_ids)
            first_count = first_count or len(event.token_ids)
        elif isinstance(event, bridge_pb2.GenerateFinished):
            did = event.speculation
    after_first_ns = did.elapsed_ns - did.first_token_ns
    return Sample(index, category, way, token_count - first_count, after_first_ns, did.first_token_ns, text, did)


def speed(samples: Iterable[Sample]) -> float:
    """Returns tokens per second over all samples, or 0 if they have no token after the first pass."""
    timed = [one for one in samples if one.token_count]
    return 1e9 * sum(one.token_count for one in timed) / sum(one.elapsed_ns for one in timed) if timed else 0.0


def by(samples: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Returns the samples grouped by a property, in order of appearance."""
    found: dict[str, list[T]] = {}
    for one in samples:
        found.setdefault(key(one), []).append(one)
    return found


def ratio(samples: Sequence[Sample], way: str) -> float:
    """Returns the speed of a way over that of the target alone, or 0 if there is nothing to compare."""
    ways = by(samples, lambda one: one.way)
    alone = speed(ways[ALONE])
    return speed(ways[way]) / alone if alone else 0.0


def table(samples: Sequence[Sample]) -> Table:
    """Returns a row for each way: speed, its prediction, tokens per pass and acceptance.

    Below `auto` stands a row for each source that it had candidates of, with the part of the text that they were.
    """
    result = _columns("", "tokens/s", "ratio", "predicted", "tokens/pass", "text", "accepted")
    for way, found in by(samples, lambda one: one.way).items():
        predicted = _predicted(found)
        result.add_row(
            way,
            f"{speed(found):.1f}",
            f"{ratio(samples, way):.2f}x",
            f"{predicted:.1f}" if predicted and way == AUTO else "",
            f"{tokens_per_pass(found):.2f}",
            "",
            _accepted([one.speculation for one in found]),
        )
        if way == AUTO:
            sources = [source for one in found for source in one.speculation.sources if source.num_draft_tokens]
            for name, ones in by(sources, lambda source: source.name).items():
                part = sum(one.accepted_byte_count for one in ones) / max(_total(found, "generated_byte_count"), 1)
                result.add_row(f" {_SOURCES.get(name, name)}", "", "", "", "", f"{part:.0%}", _accepted(ones))
    return result


def tokens_per_pass(found: Sequence[Sample]) -> float:
    """Returns how many tokens a pass of the target gave on average. A sample's count lacks the first token."""
    return (sum(one.token_count for one in found) + len(found)) / _total(found, "target_pass_count")


def _accepted(counted: Sequence[Any]) -> str:
    """Returns how many of the candidates of some statistics were accepted; empty if there were none."""
    candidates = sum(one.num_draft_tokens for one in counted)
    return f"{sum(one.num_accepted_tokens for one in counted) / candidates:.0%} of {candidates}" if candidates else ""


def time_table(samples: Sequence[Sample]) -> Table:
    """Returns a row for each way: what the time went to, in parts that add up to the whole.

    The bridge works partly while the target computes, so its time is not a part: what it adds is between passes.
    """
    result = _columns("time", "target", "waiting for the draft", "network, queues and bridge")
    for way, found in by(samples, lambda one: one.way).items():
        elapsed = _total(found, "elapsed_ns")
        target, waiting = (_total(found, part) / elapsed for part in ("verify_ns", "waited_ns"))
        result.add_row(way, f"{target:.0%}", f"{waiting:.0%}", f"{max(1 - target - waiting, 0):.0%}")
    return result


def _columns(*names: str) -> Table:
    # Narrow enough for a terminal of 80 columns.
    result = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in result.columns[1:]:
        column.justify = "right"
    return result


def _total(samples: Sequence[Sample], field: str) -> int:
    return sum(getattr(one.speculation, field) for one in samples)


def _predicted(found: Sequence[Sample]) -> float:
    """Returns the predicted tokens per second over all samples, by the time that all their tokens take."""
    timed = [one for one in found if one.token_count and one.speculation.predicted_tokens_per_second]
    if not timed:
        return 0.0
    seconds = sum(one.token_count / one.speculation.predicted_tokens_per_second for one in timed)
    return sum(one.token_count for one in timed) / seconds


def verdict(samples: Sequence[Sample], draft: str) -> str:
    """Returns one sentence: what to use, what to expect of it, and where it is not worth it."""
    ways = [way for way in by(samples, lambda one: one.way) if way != ALONE]
    if not speed(one for one in samples if one.way == ALONE):
        return "No text was longer than one pass: give longer prompts or more --tokens."
    accepted = {way: _total([one for one in samples if one.way == way], "num_accepted_tokens") for way in ways}
    ratios = {way: ratio(samples, way) for way in ways}
    # A pass with candidates takes no less time than one without. So a way cannot gain more than its passes have tokens,
    # and nothing if none of its candidates was accepted, whatever the times are.
    gain = {
        way: min(ratios[way], tokens_per_pass(found)) if accepted[way] else min(ratios[way], 1.0)
        for way, found in by(samples, lambda one: one.way).items()
        if way in ways
    }
    has_draft = "draft model" in ways
    with_draft = max((way for way in (AUTO, "draft model") if way in ways), key=gain.__getitem__, default="")
    helped = [one for one in samples if one.way == with_draft and _accepted_of(one, "draft")]
    lookup = max((way for way in ("prompt lookup", AUTO)[: 1 if helped else 2] if way in ways), key=gain.__getitem__)
    drafts = bool(helped) and gain[with_draft] >= WORTH_IT * gain[lookup]
    best = with_draft if drafts else lookup
    if not any(accepted.values()):
        lowest, highest = min(ratios.values()), max(ratios.values())
        costs = lowest < _LOST and highest < WORTH_IT  # without candidates, a way can only seem to be faster
        why = f"and speculation costs time here ({lowest:.2f}x)" if costs else "so the times differ by chance"
        return f"Use the target alone: no candidate was accepted, {why}."
    if gain[best] < WORTH_IT:
        return f"Use the target alone: speculation gains nothing here ({max(gain.values()):.2f}x)."
    categories = by(samples, lambda one: one.category)
    losers = [name for name, some in categories.items() if name and ratio(some, best) < WORTH_IT]
    for_all = f"; it is not worth it for {', '.join(losers)}" if losers and len(losers) < len(categories) else ""
    if drafts:
        how = ' with its candidates alone (sources "draft")' if best == "draft model" else ""
        return (
            f"Use {draft} as the draft{how}: expect {gain[best]:.2f}x ({gain[lookup]:.2f}x without a draft){for_all}."
        )
    without = f", and {draft} adds nothing" if has_draft else ""
    return f"Use no draft: expect {gain[best]:.2f}x from prompt lookup{without}{for_all}."


def _accepted_of(sample: Sample, source: str) -> int:
    return sum(one.num_accepted_tokens for one in sample.speculation.sources if one.name == source)


def differences(samples: Sequence[Sample]) -> str:
    """Returns a sentence about texts that differ from that of the target alone; empty if there are none."""
    alone = {one.prompt: one for one in samples if one.way == ALONE}
    different = [one for one in samples if one.text != alone[one.prompt].text]
    if not different:
        return ""
    # Rounding may have decided in either text.
    unexplained = (one for one in different if not one.speculation.near_ties)
    if strange := sorted({one.prompt for one in unexplained if not alone[one.prompt].speculation.near_ties}):
        return (
            f"{len(strange)} prompts have texts that differ without a near tie (the first is number {strange[0] + 1}). "
            "That is a bug, here or in the engine: please report it with the prompt."
        )
    count = len({one.prompt for one in different})
    return (
        f"{count} prompts have texts that differ after a near tie, where rounding decides. "
        "`serve --deterministic` makes all texts equal."
    )


def check_plot(path: Path) -> None:
    """Raises `InvalidPrompts` without matplotlib, the extra `plot`, and for other files than PDF, PNG and SVG."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidPrompts(f"--plot needs matplotlib: {install_extra('plot')}") from error
    if path.suffix.lower().lstrip(".") not in _PICTURES:  # other kinds need programs that may be missing
        raise InvalidPrompts(f"--plot cannot draw {path.name}: name a file that ends with {', '.join(_PICTURES)}")


def plot(samples: Sequence[Sample], title: str, path: Path) -> None:
    """Draws a bar for each category and way, its speed over that of the target alone. Raises what `check_plot` does."""
    check_plot(path)
    from matplotlib.figure import Figure

    groups = by(samples, lambda one: one.category or "all")
    if len(groups) > 1:
        groups = {"all": list(samples), **groups}
    ways = [way for way in by(samples, lambda one: one.way) if way != ALONE]
    figure = Figure(figsize=(7.5, 0.9 + 0.24 * len(groups) * (len(ways) + 1)), layout="constrained")
    axes = figure.subplots()
    colours = {"prompt lookup": "tab:cyan", "draft model": "tab:green", AUTO: "tab:blue"}
    height = 0.8 / len(ways)
    for place, way in enumerate(ways):
        ratios = [ratio(some, way) for some in groups.values()]
        places = [row + (place - (len(ways) - 1) / 2) * height for row in range(len(groups))]
        bars = axes.barh(places, ratios, height, color=colours[way], label=way)
        axes.bar_label(bars, [f"{value:.2f}" for value in ratios], padding=2, fontsize=7)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlabel("speed over the target alone")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(ways), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def as_json(samples: Sequence[Sample], about: Mapping[str, Any]) -> str:
    """Returns everything that was measured, and under which conditions."""
    runs = [
        {name: value for name, value in vars(one).items() if name != "speculation"}
        | {"speculation": MessageToDict(one.speculation, preserving_proto_field_name=True)}
        for one in samples
    ]
    return json.dumps({**about, "processor": cpu_name(), "cores": core_count(), "runs": runs}, indent=1)
