"""Shares the candidates of one forward among its sequences, for an engine that runs many sequences in one forward."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from operator import mul

import numpy as np

from bridge.planning.costs import ForwardTime, WidthCost


class BatchCosts:
    """Estimates the time of a forward by its number of sequences and candidates.

    Times are kept by level of load (1, 2 to 3, 4 to 7 sequences and so on), as the width per sequence: one token and
    its share of the candidates.
    """

    def __init__(self, forward_costs: Sequence[tuple[int, int]] = ()) -> None:
        self._levels = [ForwardTime(WidthCost.measured(forward_costs), float(dict(forward_costs).get(1, 0)))]

    def of(self, sequence_count: int) -> ForwardTime:
        """Returns the times at a level of load. A new level starts as a copy of the level below."""
        while len(self._levels) < sequence_count.bit_length():
            self._levels.append(deepcopy(self._levels[-1]))
        return self._levels[sequence_count.bit_length() - 1]

    def observe(self, sequence_count: int, candidate_count: int, nanoseconds: float) -> None:
        """Records a forward that ran one token and the candidates of each sequence."""
        self.of(sequence_count).observe(1 + candidate_count / sequence_count, nanoseconds)


def share(chances: Sequence[Sequence[float]], sequence_count: int, time: ForwardTime) -> list[int]:
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
    tokens = sequence_count + np.cumsum(survivals[order])
    ratios = time.widths.of_all(1 + np.arange(1, len(order) + 1) / sequence_count)
    speeds = tokens / ratios
    best = int(np.argmax(speeds))
    taken = order[: best + 1] if speeds[best] > sequence_count else order[:0]
    widths: list[int] = np.bincount(owners[taken], minlength=len(chances)).tolist()
    return widths
