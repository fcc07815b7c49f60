"""What forwards cost: averages that forget, and how a forward's time grows with the number of its tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# How much of an average a new value replaces.
_FRESH = 0.1
# Numbers of tokens for which a forward's time is recorded; between them it is interpolated.
_KNOTS = (1, 2, 3, 5, 9, 17, 33)
# What each further token adds to a forward until that is known, relative to a forward of one token.
_PRIOR_STEP = 0.05
# A wide forward says what its width costs only if a narrow one was seen at most this many forwards earlier.
_RECENT_FORWARDS = 16
# How much of the time of one token a forward of one token replaces, if it is the first for long.
_FRESH_RARE = 0.5
# Now and then a forward takes far longer, because of something else on the machine: it counts as this multiple.
_OUTLIER = 3.0


@dataclass
class Ewma:
    """An exponentially weighted moving average; `value` is the prior. The first values count the same."""

    value: float
    count: int = 0

    def observe(self, value: float, fresh: float = _FRESH) -> None:
        """Moves the average towards a value, by `fresh` at least."""
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, fresh)


@dataclass
class WidthCost:
    """How many times as long a forward of several tokens takes as a forward of one, for one model under one load.

    `seen`: which of the recorded numbers of tokens are known; the others follow the largest that is.
    """

    ratios: list[float] = field(default_factory=lambda: [1 + _PRIOR_STEP * (knot - 1) for knot in _KNOTS])
    seen: list[bool] = field(default_factory=lambda: [True] + [False] * (len(_KNOTS) - 1))

    @classmethod
    def measured(cls, forward_costs: Sequence[tuple[int, int]]) -> "WidthCost":
        """Starts with what a service measured: pairs of a number of tokens and nanoseconds."""
        costs = sorted(cost for cost in forward_costs if min(cost) > 0)
        if len(costs) < 2 or costs[0][0] != 1:
            return cls()
        widths = [width for width, _ in costs]
        times = [nanoseconds / costs[0][1] for _, nanoseconds in costs]
        ratios = [max(_interpolated(widths, times, knot), 1.0) for knot in _KNOTS]
        return cls([max(ratios[: index + 1]) for index in range(len(ratios))], [True] * len(_KNOTS))

    def of(self, width: int) -> float:
        """The ratio for `width` tokens."""
        return _interpolated(_KNOTS, self.ratios, width)

    def table(self, width: int) -> list[float]:
        """The ratios for 1 to `width` tokens."""
        return [self.of(one) for one in range(1, width + 1)]

    def observe(self, width: int, ratio: float) -> None:
        """Takes note of one forward. Only the two nearest of the recorded widths learn from it."""
        error = ratio - self.of(width)
        right = min(max(bisect_left(_KNOTS, width), 1), len(_KNOTS) - 1)
        share = (width - _KNOTS[right - 1]) / (_KNOTS[right] - _KNOTS[right - 1])
        for index, part in ((right - 1, 1 - share), (right, min(share, 1.0))):
            if index > 0 and part > 0:
                self._move(index, 2 * _FRESH * part * error)

    def _move(self, index: int, change: float) -> None:
        self.ratios[index] = max(self.ratios[index] + change, 1.0)
        self.seen[index] = True
        before, last = [index for index, seen in enumerate(self.seen) if seen][-2:]
        step = _PRIOR_STEP
        if before > 0:  # the second token may cost more than the others
            step = max((self.ratios[last] - self.ratios[before]) / (_KNOTS[last] - _KNOTS[before]), 0.0)
        for wider in range(last + 1, len(_KNOTS)):
            self.ratios[wider] = self.ratios[last] + step * (_KNOTS[wider] - _KNOTS[last])


def _interpolated(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """Linear between the places, and beyond them as between the nearest two."""
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


class ForwardTime:
    """How long a forward of one sequence takes, in nanoseconds, by its number of tokens.

    A forward of one token is the sequence's own: it takes longer the longer the sequence is. How much longer wider
    ones take is much the same for all sequences, which share a `WidthCost`.
    """

    def __init__(self, widths: WidthCost, single_ns: float) -> None:
        self.widths = widths
        self._single = Ewma(single_ns)
        self._since_narrow = _RECENT_FORWARDS + 1

    @property
    def single_ns(self) -> float:
        """Of one token."""
        return self._single.value

    @property
    def known(self) -> bool:
        """Whether any forward was seen."""
        return self._single.count > 0

    def of(self, width: int) -> float:
        """Of `width` tokens."""
        return self._single.value * self.widths.of(width)

    def observe(self, width: int, nanoseconds: float) -> None:
        """Takes note of one forward."""
        if self._single.count:
            nanoseconds = min(nanoseconds, _OUTLIER * self.of(width))
        rare = self._since_narrow > _RECENT_FORWARDS
        self._since_narrow = 0 if width == 1 else self._since_narrow + 1
        if width > 1 and not rare:
            self.widths.observe(width, nanoseconds / self._single.value)
        else:
            fresh = _FRESH_RARE if width == 1 and rare else _FRESH
            self._single.observe(nanoseconds / self.widths.of(width), fresh)
