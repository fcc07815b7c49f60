"""Shares the candidates of one forward among its sequences, for an engine that runs many sequences in one forward."""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, floor, log
from operator import mul

import numpy as np
from numpy.typing import NDArray

# Times are recorded at powers of this number of tokens.
_STEP = log(2) / 2
# The time of a forward is assumed to grow with this power of its tokens until it is measured: 0 if it waits for memory,
# 1 if it computes all the time.
_PRIOR_POWER = 0.3
# Beyond the largest recorded number, the power is that of this many numbers before it. Forwards may be wider than any
# before by the second factor.
_POWER_OF, _MAX_WIDENING = 3, 1.5
# The number of first forwards with candidates that are not counted: engines are slow at something new.
_LEFT_OUT = 3
# The least weight of a new time, and the largest deviation from the expected time: the machine may have stalled. What
# was recorded keeps this part of its weight with each forward: texts grow, and other ones begin. What has less than the
# smallest weight is forgotten if it contradicts a new time.
_FRESH, _OUTLIER, _FADE, _MIN_WEIGHT = 0.15, log(3), 0.97, 0.1
# The minimum speedup over a forward without candidates, because estimates are never exact.
_MIN_GAIN = 1.03


class BatchCosts:
    """Estimates the time of a forward by the number of tokens that it runs, over all its sequences.

    Between recorded numbers of tokens, and beyond the largest, time is a power of the number. Sequences and candidates
    count alike, so each forward informs about all ways to use as many tokens.
    """

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = ()) -> None:
        # By the exponent of `_STEP`: the logarithm of the time in nanoseconds, and the weight of what was seen.
        self._known: dict[int, tuple[float, float]] = {}
        # The places in order, and their values as they are used: see `_rising`.
        self._places, self._values = np.empty(0), np.empty(0)
        self._left_out_count = 0
        for token_count, nanoseconds in forward_costs:
            if token_count > 0 and nanoseconds > 0:  # an engine's own values are not trusted
                self.observe(token_count, 0, float(nanoseconds))

    def observe(self, sequence_count: int, candidate_count: int, nanoseconds: float) -> None:
        """Records a forward that ran one token of each sequence and the candidates of all."""
        if candidate_count and self._left_out_count < _LEFT_OUT:
            self._left_out_count += 1
            return
        place, time = log(sequence_count + candidate_count) / _STEP, log(max(nanoseconds, 1.0))
        lower = floor(place)
        shares = {lower: 1 - (place - lower), lower + 1: place - lower}
        usual = float(self._at(np.array([place]))[0]) if self._known else time
        new = {index: (usual + (index - place) * _PRIOR_POWER * _STEP, 0.0) for index in shares}
        nearest = {index: self._known.get(index, new[index]) for index in shares}
        expected = sum(part * nearest[index][0] for index, part in shares.items())
        error = min(max(time - expected, -_OUTLIER), _OUTLIER)
        self._known = {index: (value, weight * _FADE) for index, (value, weight) in self._known.items()}
        for index, part in shares.items():
            if part:
                value, weight = nearest[index]
                fresh = max(part / (weight * _FADE + part), _FRESH * part)
                self._known[index] = value + fresh * error, weight * _FADE + part
        for index, (value, weight) in tuple(self._known.items()):
            if weight < _MIN_WEIGHT and (value - time) * (index - place) < 0:
                del self._known[index]
        indices = sorted(self._known)
        self._places = np.array(indices, dtype=float)
        self._values = np.array(_rising([self._known[index] for index in indices]))

    def of_all(self, token_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the times of forwards of these numbers of tokens, relative to each other."""
        return np.exp(self._at(np.log(token_counts) / _STEP))

    def max_candidates(self, sequence_count: int) -> int:
        """Returns how many candidates a forward may have at most, so that it is not much wider than those seen."""
        widest = exp(max(self._known, default=0) * _STEP)
        return int(_MAX_WIDENING * max(widest, sequence_count)) - sequence_count

    def _at(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the logarithms of the times at these logarithms of numbers of tokens, to the base of the step."""
        if not self._known:
            return places * _PRIOR_POWER * _STEP
        known, values, power = self._places, self._values, _PRIOR_POWER
        if len(known) > 1:
            first = -min(len(known), _POWER_OF)
            power = min((values[-1] - values[first]) / ((known[-1] - known[first]) * _STEP), 1.0)
        below, beyond = np.minimum(places - known[0], 0), np.maximum(places - known[-1], 0)
        found: NDArray[np.float64] = np.interp(places, known, values)
        found += (below * _PRIOR_POWER + beyond * power) * _STEP
        return found


def _rising(known: Sequence[tuple[float, float]]) -> list[float]:
    """Returns values that never decrease, because more tokens never take less time.

    Given values with weights, those that decrease become their average: it is near those that were seen most and last.
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in known:
        block = value, weight, 1
        while blocks and blocks[-1][0] > block[0]:
            before, before_weight, before_count = blocks.pop()
            weights = before_weight + block[1]
            mean = before + (block[0] - before) * block[1] / weights
            block = mean, weights, before_count + block[2]
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]


def share(chances: Sequence[Sequence[float]], sequence_count: int, costs: BatchCosts) -> list[int]:
    """Returns how many candidates of each sequence to verify, so that the forward yields the most tokens per second.

    `chances`: for each sequence with candidates, the chance of each if all before it are right. `sequence_count`: all
    sequences of the forward. Candidates are taken over all sequences, in the order of their chance to be reached and
    right, so that those taken of one sequence are always its first.
    """
    if not any(chances):
        return [0] * len(chances)
    survivals = np.array([value for one in chances for value in accumulate(one, mul)])
    owners = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
    order = np.argsort(-survivals, kind="stable")
    order = order[: costs.max_candidates(sequence_count)]
    tokens = sequence_count + np.cumsum(np.append(0.0, survivals[order]))
    speeds = tokens / costs.of_all(sequence_count + np.arange(0.0, len(order) + 1))
    best = int(np.argmax(speeds))
    taken = order[: best if speeds[best] > _MIN_GAIN * speeds[0] else 0]
    widths: list[int] = np.bincount(owners[taken], minlength=len(chances)).tolist()
    return widths
