"""Measures what forwards cost: moving averages, and how a forward's time grows with its number of tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

# Nanoseconds that are assumed until they are measured: from a pass until candidates that the bridge already has reach
# the target; a message to the draft and its answer.
PRIOR_CANDIDATE_DELAY_NS, PRIOR_ROUND_TRIP_NS = 600_000.0, 1_000_000.0
# The assumed factor by which a forward is slower while another model computes on the same cores. On two cores it was
# 3 to 9; measuring it takes seconds.
PRIOR_SLOWDOWN = 4.0
# The weight of a new value in an average.
_FRESH = 0.1
# Widths (numbers of tokens) for which a forward's time is recorded; other widths are interpolated or extrapolated.
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 17)
# The width of the widest forward that is planned, in tokens.
MAX_WIDTH = 25
# The assumed cost of each further token, relative to a 1-token forward, until it is measured.
_PRIOR_STEP = 0.05
# The part of the distance to a likely cost by which that of an unseen width shrinks in a forward, the multiple of the
# likely cost at which it no longer does, and the forwards after which a width counts as seen.
_FORGOTTEN, _NEARLY_LIKELY, _MIN_SEEN = 0.02, 1.05, 1.5
# A wide forward updates the cost of its width if a 1-token forward was seen at most this many forwards earlier, or as
# long as its width was seen in fewer forwards than the second number; else it updates that of a 1-token forward.
_RECENT_FORWARDS, _MIN_KNOWN_SEEN = 16, 8.0
# The weight of a 1-token forward that is the first in more than `_RECENT_FORWARDS` forwards.
_FRESH_RARE = 0.5
# A network's delay counts as at most this multiple of the average: networks differ a lot from the priors, and a stall
# of seconds must not keep a draft from being used, because only its use measures it.
MAX_DELAY_RATIO = 10.0
# Other work on the machine sometimes slows down a forward: its time is capped at this multiple of the expected time.
_OUTLIER = 3.0


@dataclass
class Ewma:
    """An exponentially weighted moving average, initially the prior `value`. The first observations weigh equally."""

    value: float
    count: int = 0

    def observe(self, value: float, fresh: float = _FRESH, limit: float = inf) -> None:
        """Moves the average towards a value whose weight is at least `fresh`.

        A value above `limit` times the average, if that is positive, counts as that: one stall shows little.
        """
        self.count += 1
        if self.value > 0:
            value = min(value, limit * self.value)
        self.value += (value - self.value) * max(1.0 / self.count, fresh)


@dataclass
class WidthCost:
    """The time of a forward by width, relative to a 1-token forward, for one model under one load."""

    ratios: list[float] = field(default_factory=lambda: [1 + _PRIOR_STEP * (knot - 1) for knot in _KNOTS])

    def __post_init__(self) -> None:
        # The forwards seen at each width. Until then its ratio is a prior, or what the service measured at its start.
        self._seen = [0.0] * len(_KNOTS)
        self._reported = tuple(self.ratios)
        self._tabulate()

    def _tabulate(self) -> None:
        # Precomputes the ratios for 1 to `MAX_WIDTH` tokens: every plan needs all of them, and they seldom change.
        ratios = self.ratios
        self.table = [ratios[right - 1] + share * (ratios[right] - ratios[right - 1]) for right, share in _BRACKETS]

    @classmethod
    def measured(cls, forward_costs: Sequence[tuple[int, int]]) -> "WidthCost":
        """Starts from a service's own measurements: pairs of a width in tokens and nanoseconds."""
        costs = sorted(dict(cost for cost in forward_costs if min(cost) > 0).items())
        if len(costs) < 2 or costs[0][0] != 1:
            return cls()
        widths = [width for width, _ in costs]
        times = [nanoseconds / costs[0][1] for _, nanoseconds in costs]
        return cls(list(accumulate((_interpolated(widths, times, knot) for knot in _KNOTS), max)))

    def of(self, width: float) -> float:
        """Returns the ratio for `width` tokens."""
        return _interpolated(_KNOTS, self.ratios, width)

    def knows(self, width: float) -> bool:
        """Returns whether enough forwards of about this width were seen to rely on its ratio."""
        right, share = _bracket(_KNOTS, width)
        return self._seen[right if share >= 0.5 else right - 1] >= _MIN_KNOWN_SEEN

    def scale(self, factor: float) -> None:
        """Multiplies all ratios, because a 1-token forward costs less or more than was assumed for them."""
        self.ratios = [1.0, *(max(ratio * factor, 1.0) for ratio in self.ratios[1:])]
        self._tabulate()

    def observe(self, width: float, ratio: float) -> None:
        """Records one forward of more than one token, by updating the two nearest recorded widths."""
        error = ratio - self.of(width)
        right, share = _bracket(_KNOTS, width)
        # Beyond the widest, a change of its ratio changes the estimate `share` times as much.
        for index, part, reach in ((right - 1, 1 - share, 1.0), (right, min(share, 1.0), max(share, 1.0))):
            if index > 0 and part > 0:
                self._seen[index] += part
                fresh = part / reach * max(1 / (1 + self._seen[index]), 2 * _FRESH)
                self.ratios[index] = max(self.ratios[index] + fresh * error, 1.0)
                # The ratios never decrease with the width.
                for narrower in range(index):
                    self.ratios[narrower] = min(self.ratios[narrower], self.ratios[index])
                for wider in range(index + 1, len(_KNOTS)):
                    self.ratios[wider] = max(self.ratios[wider], self.ratios[index])
        self._tabulate()

    def forget(self, width: int) -> None:
        """Lowers the ratios of forwards wider than `width` that were not seen, a little, to what is likely.

        Other work may have disturbed the service when it measured them, and what seems too expensive is never tried.
        It is likely that each further token costs as much as in a forward of `width` tokens, or in the widest seen. If
        these turn out to be expensive, what was lowered rises again.
        """
        seen = (knot for knot, count in zip(_KNOTS, self._seen, strict=True) if count >= _MIN_SEEN)
        widest = max([width, *seen])
        step = max((self.of(widest) - 1) / max(widest - 1, 1), _PRIOR_STEP)
        changed = False
        for index, knot in enumerate(_KNOTS):
            if knot <= width or self._seen[index] >= _MIN_SEEN:
                continue
            ratio, likely = self.ratios[index], 1 + step * (knot - 1)
            goal = likely if ratio > _NEARLY_LIKELY * likely else max(ratio, min(likely, self._reported[index]))
            if goal != ratio:
                self.ratios[index] = max(ratio + _FORGOTTEN * (goal - ratio), self.ratios[index - 1])
                changed = True
        if changed:
            self._tabulate()


def _bracket(places: Sequence[int], place: float) -> tuple[int, float]:
    """Returns the index of the upper of the two nearest places, and the position of `place` between them (0 to 1)."""
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    return right, (place - places[right - 1]) / (places[right] - places[right - 1])


# For each width of the table.
_BRACKETS = tuple(_bracket(_KNOTS, width) for width in range(1, MAX_WIDTH + 1))


def _interpolated(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Returns the value at a place by linear interpolation, or extrapolation from the nearest two places."""
    right, share = _bracket(places, place)
    return values[right - 1] + share * (values[right] - values[right - 1])


class ForwardTime:
    """Estimates how many nanoseconds a forward of one sequence takes, by its number of tokens.

    The time of a 1-token forward is kept per sequence, because it grows with the sequence's length. The relative cost
    of wider forwards differs little between sequences, which share a `WidthCost`. `known`: a forward was observed.
    """

    def __init__(self, widths: WidthCost, single_ns: float) -> None:
        self.widths = widths
        # A time measured elsewhere counts like one forward.
        self._single = Ewma(single_ns, count=1 if single_ns else 0)
        self.known = False
        self._since_narrow = _RECENT_FORWARDS + 1
        # The ratios by which wide forwards have changed the time of a 1-token forward since the last one.
        self._inferred_by: WidthCost | None = None

    @property
    def single_ns(self) -> float:
        """Returns the nanoseconds of a 1-token forward."""
        return self._single.value

    def of(self, width: float) -> float:
        """Returns the nanoseconds of a forward of `width` tokens."""
        return self._single.value * self.widths.of(width)

    def observe(self, width: float, nanoseconds: float) -> None:
        """Records one forward."""
        self.known, nanoseconds = True, max(nanoseconds, 1.0)
        if self._single.count:
            nanoseconds = min(nanoseconds, _OUTLIER * self.of(width))
        alone = self._since_narrow > _RECENT_FORWARDS
        self._since_narrow = 0 if width == 1 else self._since_narrow + 1
        if width == 1:
            expected = self._single.value
            self._single.observe(nanoseconds, _FRESH_RARE if alone else _FRESH)
            # The times of wide forwards were seen, so it is these ratios that were wrong; not those under another load.
            if self._inferred_by is self.widths:
                self.widths.scale(expected / self._single.value)
            self._inferred_by = None
        elif self._single.count and not (alone and self.widths.knows(width)):
            self.widths.observe(width, nanoseconds / self._single.value)
        else:  # Without a 1-token forward nearby, an unexpected time comes from the length of the text.
            self._single.observe(nanoseconds / self.widths.of(width))
            self._inferred_by = self.widths
