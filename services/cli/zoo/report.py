"""Writes the report of a zoo: one HTML file that needs no network, with charts as inline SVG."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from services.cli.pieces import pieces
from services.cli.zoo import charts
from services.cli.zoo.charts import Point
from services.cli.zoo.figures import PairFigures, advice, plain_speed, ranking
from services.cli.zoo.predict import Prediction
from services.cli.zoo.samples import AUTO, TURNS, Key, Models, Sample

_MAX_EXAMPLES_PER_TARGET = 2


@dataclass(frozen=True)
class Report:
    """Everything that a report shows.

    `refused`: reasons by pair, or with an empty draft, of a target. `failures`: errors of the samples that are missing.
    """

    title: str
    setting: str
    models: Models
    targets: Sequence[str]
    drafts: Sequence[str]
    samples: Sequence[Sample]
    figures: Sequence[PairFigures]
    predictions: Sequence[Prediction]
    overlaps: Mapping[tuple[str, str], float]
    refused: Mapping[tuple[str, str], str]
    failures: Mapping[Key, str] = field(default_factory=dict)

    @property
    def by_label(self) -> dict[str, Mapping[str, Any]]:
        """The models by name, and by name and role where the target of a name differs from the draft."""
        found: dict[str, Mapping[str, Any]] = {}
        for (role, name), model in self.models.items():
            same = all(other == model for (_, one), other in self.models.items() if one == name)
            found[name if same else f"{name} ({role})"] = model
        return found

    @property
    def advice(self) -> list[str]:
        """One sentence or more for each target."""
        return [
            f"{target}: {self.refused[target, '']}." if (target, "") in self.refused else advice(target, self.figures)
            for target in self.targets
        ]

    @property
    def problems(self) -> dict[tuple[str, str], str]:
        """How many samples of a pair failed, and the first error; draft "" is the target alone."""
        errors: dict[tuple[str, str], list[str]] = {}
        for key, error in self.failures.items():
            errors.setdefault((key.target, key.draft), []).append(error)
        samples = Counter((one.target, one.draft) for one in self.samples)
        return {
            pair: f"{len(found)} of {len(found) + samples[pair]} samples failed: {found[0]}"
            for pair, found in errors.items()
        }


@dataclass(frozen=True)
class Comparison:
    """A prediction and the gain that was measured at the same temperature, None if it was not."""

    prediction: Prediction
    measured: float | None

    @property
    def error(self) -> float | None:
        return self.prediction.gain / self.measured - 1 if self.measured else None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ({self.error:+.0%})"
        return f"T={self.prediction.temperature:g}: {self.prediction.gain:.2f}x{error}"


def comparisons(report: Report) -> list[Comparison]:
    """Compares every prediction with the measurement at its temperature."""
    figures = {(one.target, one.draft): one for one in report.figures}
    found = []
    for one in report.predictions:
        pair = figures.get((one.target, one.draft))
        gain = pair.gain_by_temperature.get(one.temperature) if pair else None
        found.append(Comparison(one, gain.mean if gain and gain.count else None))
    return found


def write(report: Report, path: Path) -> None:
    """Writes the report as HTML."""
    environment = Environment(
        loader=PackageLoader("services.cli.zoo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path.write_text(environment.get_template("report.html.jinja").render(_values(report)), encoding="utf-8")


def _values(report: Report) -> dict[str, Any]:
    figures = {(one.target, one.draft): one for one in report.figures}
    compared: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons(report):
        compared.setdefault((one.prediction.target, one.prediction.draft), []).append(one)
    ranked = ranking(report.figures)
    return {
        "report": report,
        "rows": [
            (
                target,
                f"{plain_speed(report.samples, target):.1f}",
                [_cell(report, figures, compared, target, draft) for draft in report.drafts],
            )
            for target in report.targets
        ],
        "advice": report.advice,
        "ranked": ranked,
        "ranking_chart": charts.intervals(
            [(f"{one.target} ← {one.draft}", one.gain.mean, one.gain.low, one.gain.high) for one in ranked],
            "speed over the target alone, with 95% interval",
        ),
        "cost_chart": charts.lines(
            {name: [Point(count, ns / 1e6) for count, ns in model["costs"]] for name, model in report.by_label.items()},
            "tokens of a forward",
            "milliseconds",
        ),
        "positions": [
            (
                target,
                charts.lines(
                    {
                        one.draft: [Point(place + 1, share) for place, share in enumerate(one.by_position)]
                        for one in report.figures
                        if one.target == target
                    },
                    "position in the pass",
                    "accepted up to here",
                ),
            )
            for target in report.targets
        ],
        "overlap_chart": charts.scatter(
            {
                target: [
                    Point(report.overlaps[target, one.draft], one.acceptance, one.draft)
                    for one in report.figures
                    if one.target == target and (target, one.draft) in report.overlaps
                ]
                for target in report.targets
            },
            "share of the draft's tokens that the target has",
            "acceptance",
        ),
        "prediction_chart": charts.scatter(
            {
                target: [
                    Point(one.prediction.gain, one.measured, f"{pair[1]} at T={one.prediction.temperature:g}")
                    for pair, found in compared.items()
                    for one in found
                    if pair[0] == target and one.measured
                ]
                for target in report.targets
            },
            "predicted gain",
            "measured gain",
            diagonal=True,
        ),
        "compared": [
            (f"{target} ← {draft}", one)
            for (target, draft), found in compared.items()
            for one in found
            if one.error is not None
        ],
        "categories": list(dict.fromkeys(one.category for one in report.samples)),
        "temperatures": sorted({one.temperature for one in report.samples}),
        "examples": _examples(report, ranked),
    }


def _cell(
    report: Report,
    figures: Mapping[tuple[str, str], PairFigures],
    compared: Mapping[tuple[str, str], Sequence[Comparison]],
    target: str,
    draft: str,
) -> dict[str, Any]:
    """Returns a cell of the map: its two figures, its colours, and the lines of its tooltip."""
    found, problems = figures.get((target, draft)), report.problems
    problem = report.refused.get((target, draft)) or problems.get((target, draft)) or problems.get((target, ""), "")
    head = f"{draft} beside {target}"
    if found is None or not found.gain.count:
        background, colour = charts.heat(0.0)
        below = "failed" if (target, draft) not in report.refused and problem else ""
        lines = [head, problem or "not measured"]
        return {"gain": "–", "below": below, "background": background, "colour": colour, "lines": lines}
    background, colour = charts.heat(found.gain.mean)
    lines = [
        head,
        f"{found.gain.mean:.2f}x the target alone (95% interval {found.gain.interval})",
        f"{found.tokens_per_second:.1f} tokens/s; always in turns {found.turns.mean:.2f}x",
        f"{found.acceptance:.0%} of candidates accepted, {found.tokens_per_pass:.2f} tokens and "
        f"{found.accepted_bytes_per_pass:.1f} accepted bytes per pass",
    ]
    lines.append(f"{found.texts} to that of the target alone")
    lines += [f"predicted at {one}, by {one.prediction.plan}" for one in compared.get((target, draft), ())]
    lines += [problem] if problem else []
    return {
        "gain": f"{found.gain.mean:.2f}x",
        "below": f"{found.acceptance:.0%}",
        "background": background,
        "colour": colour,
        "lines": lines,
    }


def _examples(report: Report, ranked: Sequence[PairFigures]) -> list[dict[str, Any]]:
    """Returns texts of the best pairs of each target, as pieces with the source that proposed them."""
    found: list[dict[str, Any]] = []
    for target in report.targets:
        best = [one for one in ranked if one.target == target][:_MAX_EXAMPLES_PER_TARGET]
        for pair in best:
            own = [one for one in report.samples if (one.target, one.draft) == (target, pair.draft) and one.text]
            own.sort(key=lambda one: (one.way != TURNS, one.way != AUTO, -one.accepted_byte_count))
            if own:
                one = own[0]
                parts = list(pieces(one.text, one.spans))
                found.append({"target": target, "draft": pair.draft, "category": one.category, "pieces": parts})
    return found
