"""Draws the charts of a report as inline SVG.

Colours differ in lightness, too. Twelve series differ in their marks and dashes alone, 24 with colours.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2, log10
from typing import NamedTuple

from markupsafe import Markup, escape

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 3", "10 4", "4 4", "3 1", "12 2 2 2", "6 2 1 2 1 2", "1 6", "14 6")
# Shapes around a place: filled, then only outlined.
_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.5l4.5 8h-9z",
    "M0 -5l4.5 5l-4.5 5l-4.5 -5z",
    "M0 4.5l4.5 -8h-9z",
)
_STROKES = ("M-4 0h8M0 -4v8", "M-3.5 -3.5l7 7M-3.5 3.5l7 -7")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 460, 260, 52, 44, 12, 14
# Of the widest usual letters at the size of the labels.
_LETTER_WIDTH = 7.2
_LEGEND_ROW, _MAX_HALF_ROW, _MAX_NAME = 17, 30, 66


class Point(NamedTuple):
    """A point of a chart. `name`: what it is in its series."""

    x: float
    y: float
    name: str = ""


def heat(gain: float) -> tuple[str, str]:
    """Returns the background and the text colour of a gain: orange below 1, white at 1, blue above.

    The colour is full at a factor of 2.
    """
    if gain <= 0:
        return "#eeeeee", "#333333"
    share = max(-1.0, min(1.0, log2(gain)))
    end = (0, 68, 136) if share > 0 else (179, 88, 6)
    parts = [round(255 + abs(share) * (part - 255)) for part in end]
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in (one / 255 for one in parts)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # The colour, white or black, with the higher contrast: at least 4.5 for any background.
    text = "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
    return "#" + "".join(f"{part:02x}" for part in parts), text


def lines(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> Markup:
    """Returns a chart with a line for each series."""
    return _chart(series, x_label, y_label, joined=True)


def scatter(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, *, diagonal: bool = False) -> Markup:
    """Returns a chart with marks; with `diagonal`, the line on which both values are equal is drawn."""
    return _chart(series, x_label, y_label, joined=False, diagonal=diagonal)


def intervals(rows: Sequence[tuple[str, float, float | None, float | None]], x_label: str) -> Markup:
    """Returns a row for each name with its mean, low and high value if known, and a vertical line at 1."""
    if not rows:
        return Markup("<p>Nothing was measured.</p>")
    height, left = 26 * len(rows) + 40, max(260, _LETTER_WIDTH * max(len(name) for name, *_ in rows) + 20)
    width = left + 440
    top = max(high or mean for _, mean, _, high in rows) * 1.05
    low_end = min(0.0, *(mean if low is None else low for _, mean, low, _ in rows))
    top = max(top, 1.1)

    def x(value: float) -> float:
        return left + (min(value, top) - low_end) / (top - low_end) * (width - left - 60)

    parts = [_open(width, height, x_label)]
    parts.append(f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{height - 36}" class="base"/>')
    for place, (name, mean, low, high) in enumerate(rows):
        y, colour = 16 + 26 * place, COLOURS[7]
        if low is None or high is None:
            low = high = mean
        elif low > 1 or high < 1:
            colour = COLOURS[0] if low > 1 else COLOURS[1]
        parts.append(
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
            f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            f'<circle cx="{x(mean):.1f}" cy="{y}" r="4.5" fill="{colour}"/>'
            f'<text x="{x(high) + 8:.1f}" y="{y + 4}">{mean:.2f}</text>'
        )
    for tick in _ticks(low_end, top):
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 22}" text-anchor="middle" class="tick">{tick:g}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text></svg>')
    return Markup("".join(parts))


def _chart(
    series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, *, joined: bool, diagonal: bool = False
) -> Markup:
    series = {name: some for name, some in series.items() if some}
    if not series:
        return Markup("<p>Nothing was measured.</p>")
    points = [point for some in series.values() for point in some]
    xs, ys = [point.x for point in points], [point.y for point in points]
    x_low, x_high = (0.0 if diagonal or not joined else min(xs)), max(max(xs), 1e-9)
    y_high = max(max(ys), 1e-9) * 1.05
    x_high = x_high if x_high > x_low else x_low + 1
    if not joined:  # no mark lies on the edge
        x_high, y_high = 1.05 * x_high, 1.02 * y_high
    if diagonal:
        x_high = y_high = max(x_high, y_high)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / y_high * (_HEIGHT - _BOTTOM - _TOP),
        )

    columns = 1 if max(map(len, series)) > _MAX_HALF_ROW else 2
    height = _HEIGHT + _LEGEND_ROW * ceil(len(series) / columns)
    parts = [_open(_WIDTH, height, f"{y_label} by {x_label}")]
    for tick in _ticks(0.0, y_high):
        _, y = place(x_low, tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="tick">{tick:g}</text>'
        )
    for tick in _ticks(x_low, x_high):
        x, _ = place(tick, 0.0)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle" class="tick">{tick:g}</text>'
        )
    if diagonal:
        (x1, y1), (x2, y2) = place(0, 0), place(x_high, x_high)
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="base"/>')
    for number, (name, some) in enumerate(series.items()):
        parts.append(_series(name, [place(point.x, point.y) for point in some], some, number, joined=joined))
        row, column = divmod(number, columns)
        parts.append(_legend(name, (14 + column * _WIDTH / 2, _HEIGHT + 6 + _LEGEND_ROW * row), number))
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(13,{(_HEIGHT - _BOTTOM) / 2 + 6}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text></svg>"
    )
    return Markup("".join(parts))


def _series(
    name: str, places: Sequence[tuple[float, float]], values: Sequence[Point], number: int, *, joined: bool
) -> str:
    found = ""
    if joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]
        found += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    for place, value in zip(places, values, strict=True):
        title = f"{name}{value.name and f' ← {value.name}'}: {value.x:.3g}, {value.y:.3g}"
        found += f"<g><title>{escape(title)}</title>{_mark(place, number)}</g>"
    return found


def _legend(name: str, place: tuple[float, float], number: int) -> str:
    x, y = place
    half = _MAX_NAME // 2
    shown = name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[1 - half :]}"
    text = f'<text x="{x + 10:g}" y="{y + 4:g}" class="tick">{escape(shown)}</text>'
    return f'<g class="legend">{_mark(place, number)}{text}</g>'


def _mark(place: tuple[float, float], number: int) -> str:
    """Returns a mark that identifies the series by its shape as well as its colour."""
    colour, shape = COLOURS[number % len(COLOURS)], number % (2 * len(_SHAPES) + len(_STROKES))
    outline = f'fill="none" stroke="{colour}" stroke-width="2"'
    if shape < len(_SHAPES):
        path, paint = _SHAPES[shape], f'fill="{colour}"'
    else:
        path, paint = (*_SHAPES, *_STROKES)[shape - len(_SHAPES)], outline
    return f'<path class="mark" transform="translate({place[0]:.1f} {place[1]:.1f})" d="{path}" {paint}/>'


def _open(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers between two values."""
    raw = (high - low) / 5 or 1.0
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(step * number, 10) for number in range(first, floor(high / step + 1e-9) + 1)]
