"""Writes the report of a zoo: one HTML file that needs no network, with charts as inline SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from services.cli.zoo import charts
from services.cli.zoo.figures import PairFigures, advice, plain_speed, ranking
from services.cli.zoo.predict import Prediction
from services.cli.zoo.samples import AUTO, TURNS, Sample

_MAX_EXAMPLES_PER_TARGET = 2


@dataclass(frozen=True)
class Report:
    """Everything that a report shows. `models`: descriptions by name; `refused`: reasons by pair."""

    title: str
    setting: str
    models: Mapping[str, Mapping[str, Any]]
    targets: Sequence[str]
    drafts: Sequence[str]
    samples: Sequence[Sample]
    figures: Sequence[PairFigures]
    predictions: Sequence[Prediction]
    overlaps: Mapping[tuple[str, str], float]
    refused: Mapping[tuple[str, str], str]


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
    predicted = {(one.target, one.draft): one for one in report.predictions}
    ranked = ranking(report.figures)
    return {
        "report": report,
        "rows": [
            (
                target,
                f"{plain_speed(report.samples, target):.1f}",
                [_cell(report, figures, predicted, target, draft) for draft in report.drafts],
            )
            for target in report.targets
        ],
        "advice": [advice(target, report.figures) for target in report.targets],
        "ranked": ranked,
        "ranking_chart": charts.intervals(
            [(f"{one.target} ← {one.draft}", one.gain.mean, one.gain.low, one.gain.high) for one in ranked],
            "speed over the target alone, with 95% interval",
        ),
        "cost_chart": charts.lines(
            {
                name: [(count, ns / 1e6) for count, ns in model["costs"]]
                for name, model in report.models.items()
                if model["costs"]
            },
            "tokens of a forward",
            "milliseconds",
        ),
        "positions": [
            (
                target,
                charts.lines(
                    {
                        one.draft: [(place + 1, share) for place, share in enumerate(one.by_position)]
                        for one in report.figures
                        if one.target == target and one.by_position
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
                    (report.overlaps[target, one.draft], one.acceptance)
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
                    (predicted[target, one.draft].gain, one.gain.mean)
                    for one in report.figures
                    if one.target == target and one.gain.count and (target, one.draft) in predicted
                ]
                for target in report.targets
            },
            "predicted gain",
            "measured gain",
            diagonal=True,
        ),
        "predicted": predicted,
        "categories": list(dict.fromkeys(one.category for one in report.samples)),
        "temperatures": sorted({one.temperature for one in report.samples}),
        "examples": _examples(report, ranked),
    }


def _cell(
    report: Report,
    figures: Mapping[tuple[str, str], PairFigures],
    predicted: Mapping[tuple[str, str], Prediction],
    target: str,
    draft: str,
) -> dict[str, Any]:
    """Returns a cell of the map: its two figures, its colours, and the lines of its tooltip."""
    found, prediction = figures.get((target, draft)), predicted.get((target, draft))
    head = f"{draft} beside {target}"
    if found is None or not found.gain.count:
        reason = report.refused.get((target, draft)) or "not measured"
        background, colour = charts.heat(0.0)
        return {"gain": "–", "below": "", "background": background, "colour": colour, "lines": [head, reason]}
    background, colour = charts.heat(found.gain.mean)
    lines = [
        head,
        f"{found.gain.mean:.2f}x the target alone (95% interval {found.gain.low:.2f} to {found.gain.high:.2f})",
        f"{found.tokens_per_second:.1f} tokens/s; always in turns {found.turns.mean:.2f}x",
        f"{found.acceptance:.0%} of candidates accepted, {found.tokens_per_pass:.2f} tokens and "
        f"{found.accepted_bytes_per_pass:.1f} accepted bytes per pass",
    ]
    if prediction:
        lines.append(f"predicted {prediction.gain:.2f}x, by {prediction.plan}")
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
                found.append(
                    {"target": target, "draft": pair.draft, "category": own[0].category, "pieces": pieces(own[0])}
                )
    return found


def pieces(sample: Sample) -> list[tuple[str, str]]:
    """Returns the text as pieces, each with who wrote it: "draft", or "target".

    A character that several tokens make up belongs to the piece that completes it.
    """
    data, found, place = sample.text.encode(), [], 0
    kept = b""
    for count, source in sample.spans:
        kept += data[place : place + count]
        place += count
        try:
            text, kept = kept.decode(), b""
        except UnicodeDecodeError:
            continue
        if text:
            found.append((text, source or "target"))
    rest = (kept + data[place:]).decode(errors="replace")
    return [*found, (rest, "target")] if rest else found
