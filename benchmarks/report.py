"""The measurement of one prompt, and tables and plots of many."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

ALONE = "off"
LEARNING = "auto, learning"
BRIDGED = ("lockstep", "opportunistic", "auto", LEARNING)
_COLOURS = {"the target alone": "0.6", "with the bridge": "tab:blue", "other software": "tab:orange"}
_COLUMNS = (
    "", "", "tokens/s", "token, ms", "ratio", "range", "accepted", "of the text", "tokens/pass", "first, ms",
    "same text",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One prompt in one mode or by one rival. Counts are in the target's tokens; 0 if not reported."""

    category: str
    mode: str
    token_count: int
    elapsed_ns: int
    first_token_ns: int
    pass_count: int
    candidate_count: int
    accepted_count: int
    same_text: bool
    suffix_accepted_count: int = 0
    byte_count: int = 0
    near_ties: int = 0
    note: str = ""
    plan_summary: str = ""

    @property
    def token_ns(self) -> float:
        """Mean nanoseconds per token after the first."""
        return (self.elapsed_ns - self.first_token_ns) / max(self.token_count - 1, 1)


def by_category(samples: Sequence[Sample]) -> list[tuple[str, list[Sample]]]:
    """Returns samples by category, and those of all together if there are several categories."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        found[one.category].append(one)
    return [*found.items(), *([("all", list(samples))] if len(found) > 1 else [])]


def ratio(found: Sequence[Sample], mode: str) -> float:
    """Returns the speed of a mode over that of the target alone, from the times of all tokens after the first."""
    return _mean_token_ns(_of(found, ALONE)) / _mean_token_ns(_of(found, mode))


def table(samples: Sequence[Sample], modes: Sequence[str], title: str) -> Table:
    """Returns a table with a row per category and mode. Times are medians over prompts."""
    result = Table(*_COLUMNS, title=title, box=box.SIMPLE)
    for category, found in by_category(samples):
        for mode in modes:
            result.add_row(category, mode, *_cells(found, mode))
            category = ""
        result.add_section()
    return result


def _cells(everything: Sequence[Sample], mode: str) -> list[str]:
    found = _of(everything, mode)
    # A text of one token has no time after the first.
    timed = [
        (one.token_ns, other.token_ns / one.token_ns)
        for one, other in zip(found, _of(everything, ALONE), strict=True)
        if one.token_count > 1 and other.token_count > 1
    ]
    candidates, accepted, suffix, tokens, passes = (
        sum(getattr(one, name) for one in found)
        for name in ("candidate_count", "accepted_count", "suffix_accepted_count", "token_count", "pass_count")
    )
    times, ratios = zip(*timed, strict=True) if timed else ((), ())
    return [
        f"{1e9 / median(times):.1f}" if timed else "-",
        f"{median(times) / 1e6:.1f}" if timed else "-",
        f"{ratio(everything, mode):.2f}" if timed else "-",
        f"{min(ratios):.2f}-{max(ratios):.2f}" if timed else "-",
        f"{accepted / candidates:.0%}" if candidates else "-",
        f"{suffix / accepted:.0%}" if suffix else "-",
        f"{tokens / passes:.2f}" if passes else "-",
        f"{median(one.first_token_ns for one in found) / 1e6:.0f}",
        f"{sum(one.same_text for one in found)}/{len(found)}",
    ]


def _of(samples: Sequence[Sample], mode: str) -> list[Sample]:
    return [one for one in samples if one.mode == mode]


def _mean_token_ns(found: Sequence[Sample]) -> float:
    times = sum(one.elapsed_ns - one.first_token_ns for one in found)
    return times / max(sum(one.token_count - 1 for one in found), 1)


def plot(samples: Sequence[Sample], modes: Sequence[str], title: str, path: Path) -> None:
    """Writes a PNG with a field per category and a bar per mode, whose length is the ratio to the target alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    categories = by_category(samples)
    columns = min(len(categories), 4)
    rows = -(-len(categories) // columns)
    figure = Figure(figsize=(2.4 + 2.6 * columns, rows * (0.6 + 0.24 * len(modes)) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    fields = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for field, (category, found) in zip(fields, categories, strict=False):
        _bars(field, category, [(ratio(found, mode), _COLOURS[_kind(mode)]) for mode in modes])
    for empty in range(len(categories), len(fields)):
        fields[empty].set_visible(False)
        fields[empty - columns].tick_params(labelbottom=True)
    fields[0].set_yticks(range(len(modes)), ["target alone" if mode == ALONE else mode for mode in modes])
    fields[0].invert_yaxis()
    kinds = dict.fromkeys(_kind(mode) for mode in modes)
    figure.legend(
        [Patch(color=_COLOURS[kind]) for kind in kinds], kinds, loc="outside lower center", ncols=3, fontsize=9,
        title="speed over the target alone", title_fontsize=9, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _bars(field: Any, category: str, ratios: Sequence[tuple[float, str]]) -> None:
    lengths, colours = zip(*ratios, strict=True)
    bars = field.barh(range(len(lengths)), lengths, color=colours)
    field.axvline(1, color="black", linewidth=0.8, linestyle=":")
    # White, so that the dotted line does not cross the numbers.
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    field.bar_label(bars, [f"{one:.2f}" for one in lengths], padding=3, fontsize=8, bbox=ground)
    field.set_title(category, fontsize=9, fontweight="bold" if category == "all" else "normal")
    field.spines[["top", "right"]].set_visible(False)
    field.tick_params(labelsize=8)
    field.margins(x=0.2)


def _kind(mode: str) -> str:
    if mode == ALONE:
        return "the target alone"
    return "with the bridge" if mode in BRIDGED else "other software"
