"""Draws the charts of a report as inline SVG. Colours differ in lightness, too, and every series has its own mark."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2, log10

from markupsafe import Markup, escape

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 3", "10 4", "4 4", "3 1")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 460, 260, 52, 44, 12, 130
Point = tuple[float, float]


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


def lines(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, *, from_zero: bool = True) -> Markup:
    """Returns a chart with a line for each series."""
    return _chart(series, x_label, y_label, from_zero=from_zero, joined=True)


def scatter(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, *, diagonal: bool = False) -> Markup:
    """Returns a chart with marks; with `diagonal`, the line on which both values are equal is drawn."""
    return _chart(series, x_label, y_label, from_zero=True, joined=False, diagonal=diagonal)


def intervals(rows: Sequence[tuple[str, float, float, float]], x_label: str, marked: float = 1.0) -> Markup:
    """Returns a row for each name with its mean, low and high value, and a vertical line at `marked`."""
    if not rows:
        return Markup("<p>Nothing was measured.</p>")
    height, left, width = 26 * len(rows) + 40, 260, 700
    top = max(max(high, mean) for _, mean, _, high in rows) * 1.05
    low_end = min(0.0, *(low for _, _, low, _ in rows))
    top = max(top, marked * 1.1)

    def x(value: float) -> float:
        return left + (min(value, top) - low_end) / (top - low_end) * (width - left - 60)

    parts = [_open(width, height, x_label)]
    parts.append(f'<line x1="{x(marked):.1f}" x2="{x(marked):.1f}" y1="0" y2="{height - 36}" class="base"/>')
    for place, (name, mean, low, high) in enumerate(rows):
        y, colour = 16 + 26 * place, COLOURS[0] if low > marked else COLOURS[1] if high < marked else COLOURS[7]
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
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    from_zero: bool,
    joined: bool,
    diagonal: bool = False,
) -> Markup:
    points = [point for some in series.values() for point in some]
    if not points:
        return Markup("<p>Nothing was measured.</p>")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = (0.0 if diagonal or not joined else min(xs)), max(max(xs), 1e-9)
    y_low, y_high = (0.0 if from_zero else min(ys)), max(max(ys), 1e-9) * 1.05
    x_high = x_high if x_high > x_low else x_low + 1
    if not joined:  # no mark lies on the edge
        x_high, y_high = 1.05 * x_high, 1.02 * y_high
    if diagonal:
        x_high = y_high = max(x_high, y_high)

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (point[1] - y_low) / (y_high - y_low or 1) * (_HEIGHT - _BOTTOM - _TOP)
        return x, y

    parts = [_open(_WIDTH, _HEIGHT, f"{y_label} by {x_label}")]
    for tick in _ticks(y_low, y_high):
        _, y = place((x_low, tick))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="tick">{tick:g}</text>'
        )
    for tick in _ticks(x_low, x_high):
        x, _ = place((tick, y_low))
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle" class="tick">{tick:g}</text>'
        )
    if diagonal:
        (x1, y1), (x2, y2) = place((0, 0)), place((x_high, x_high))
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="base"/>')
    for number, (name, some) in enumerate(series.items()):
        parts.append(_series(name, [place(point) for point in some], some, number, joined=joined))
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(13,{(_HEIGHT - _BOTTOM) / 2 + 6}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text></svg>"
    )
    return Markup("".join(parts))


def _series(
    name: str, places: Sequence[tuple[float, float]], values: Sequence[Point], number: int, *, joined: bool
) -> str:
    colour, y = COLOURS[number % len(COLOURS)], _TOP + 8 + 17 * number
    found = ""
    if joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = _DASHES[number % len(_DASHES)]
        found += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    for place, value in zip(places, values, strict=True):
        title = f"{name}: {value[0]:.3g}, {value[1]:.3g}"
        found += f"<g><title>{escape(title)}</title>{_mark(place, number)}</g>"
    legend = _mark((_WIDTH - _RIGHT + 14, y - 4), number)
    return f'{found}{legend}<text x="{_WIDTH - _RIGHT + 24}" y="{y}" class="tick">{escape(_short(name))}</text>'


def _mark(place: tuple[float, float], number: int) -> str:
    """Returns a mark that identifies the series by its shape as well as its colour."""
    (x, y), colour, shape = place, COLOURS[number % len(COLOURS)], number % 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    if shape == 1:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{colour}"/>'
    if shape == 2:
        return f'<path d="M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z" fill="{colour}"/>'
    return f'<path d="M{x:.1f} {y - 5:.1f}l4.5 5l-4.5 5l-4.5 -5z" fill="{colour}"/>'


def _short(name: str) -> str:
    return name if len(name) <= 17 else name[:16] + "…"


def _open(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers between two values."""
    raw = (high - low) / 5 or 1.0
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(step * number, 10) for number in range(first, floor(high / step + 1e-9) + 1)]
