"""Draws what speculation gains and where it does not: `benchmarks/gain.json` as `docs/gain.png`.

    python -m benchmarks.plot_gain [--data benchmarks/gain.json] [--plot docs/gain.png]

Needs matplotlib. The left plot compares `auto` with the best fixed way in hindsight, by setting and temperature; the
right plot shows `auto` by category of the prompts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_AUTO, _FIXED, _ALONE = "#1f5fa8", "#b9c7dc", "#b7791f"
_MARKERS = {
    "a": ("s", "#b0413e"), "b": ("^", "#8a5a00"), "b2": ("v", "#6b4fa0"), "c": ("o", "#1f5fa8"), "d": ("D", "#2f7d43"),
}  # fmt: skip


def main() -> None:
    """Draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "gain.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "gain.png")
    arguments = parser.parse_args()
    draw(json.loads(arguments.data.read_text()), arguments.plot)


def draw(data: dict[str, Any], path: Path) -> None:
    """Writes the plot of the data to a file, whose ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.5, 5.8), width_ratios=(3, 2), layout="constrained")
    _by_setting(left, data)
    _by_category(right, data["runs"])
    figure.savefig(path, dpi=110)


def _by_setting(axes: Any, data: dict[str, Any]) -> None:
    runs = data["runs"]
    for place, run in enumerate(runs):
        (way, best), height = next(iter(run["best_fixed"].items())), 0.38
        axes.barh(place - height / 2, run["auto"], height, color=_AUTO, label="auto" if place == 0 else None)
        fixed = "best fixed way in hindsight" if place == 0 else None
        axes.barh(place + height / 2, best, height, color=_FIXED, label=fixed)
        axes.text(_beyond_axis(run["auto"]), place - height / 2, f"{run['auto']:.2f}x", va="center", weight="bold")
        text = f"{best:.2f}x  {_way_name(way)}"
        axes.text(_beyond_axis(best), place + height / 2, text, va="center", fontsize=9, color="#33415c")
    labels = [
        f"({run['setting']}) {data['settings'][run['setting']]}\nT={run['temperature']}, {run['prompts']} prompts"
        for run in runs
    ]
    axes.set_yticks(range(len(runs)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 4)
    axes.axvline(1, color=_ALONE)
    axes.set_xlabel("speed, target alone = 1")
    axes.set_title("auto vs. target alone", fontsize=11)
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _way_name(way: str) -> str:
    if way.startswith("turns "):
        return f"{way.removeprefix('turns ')} draft tokens per turn"
    if way.startswith("ahead "):
        return f"draft {way.removeprefix('ahead ')} tokens ahead"
    return {"off": "target alone", "suffix": "prompt lookup"}.get(way, way)


def _beyond_axis(ratio: float) -> float:
    """Returns where to write a bar's label: after its end, but not on the line at 1."""
    return max(ratio, 1.0) + 0.02 if ratio > 0.8 else ratio + 0.02


def _by_category(axes: Any, runs: list[dict[str, Any]]) -> None:
    found = [run for run in runs if "categories" in run]
    categories = sorted(
        found[0]["categories"],
        key=lambda name: max(run["categories"][name] for run in found),
    )
    for run in found:
        marker, color = _MARKERS[run["setting"]]
        ratios = [run["categories"][name] for name in categories]
        label = f"({run['setting']})"
        axes.scatter(ratios, range(len(categories)), s=55, marker=marker, color=color, label=label, zorder=3)
    axes.set_yticks(range(len(categories)), categories)
    axes.set_xlim(0.8, 0.2 + max(max(run["categories"].values()) for run in runs if "categories" in run))
    axes.axvline(1, color=_ALONE)
    axes.grid(axis="x", color="#e3e7ee")
    axes.set_xlabel("speed, target alone = 1")
    axes.set_title("auto vs. target alone, by category, T=0", fontsize=11)
    axes.legend(loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
