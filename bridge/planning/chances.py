"""How often candidates are right: calibrated chances by source and evidence, for all requests and for one."""

from bisect import bisect_right
from collections.abc import Sequence

# Candidates that a prior counts for, and the number of candidates at which counts are halved.
_PRIOR_COUNT, _MAX_COUNT = 8.0, 800.0
# Candidates that what other requests found counts for in one request; and what is left of a request's own counts after
# a pass, so that what was wrong at its beginning is tried again.
_SHARED_COUNT, _FADE = 24.0, 0.99
# What is left after a pass of the right candidates that an optimistic request imagines at its beginning.
_HOPE_FADE = 0.8


class Chances:
    """The chance that a candidate is right if those before it are, by the evidence for it.

    Evidence is divided into groups by `edges`. `priors`: one chance for each group, one more than edges.
    """

    def __init__(self, edges: Sequence[float], priors: Sequence[float]) -> None:
        self._edges, self._priors = edges, priors
        self._counts = [[0.0, 0.0] for _ in priors]

    def of(self, evidence: float) -> float:
        """Returns the chance of a candidate with this evidence."""
        group = bisect_right(self._edges, evidence)
        right, tried = self._counts[group]
        return (right + self._priors[group] * _PRIOR_COUNT) / (tried + _PRIOR_COUNT)

    def observe(self, evidence: float, right: float) -> None:
        """Takes note of a candidate whose predecessors were right: 1 if it was too, 0 if not, or its chance."""
        counts = self._counts[bisect_right(self._edges, evidence)]
        counts[0] += right
        counts[1] += 1
        if counts[1] > _MAX_COUNT:
            counts[:] = [count / 2 for count in counts]


class RequestChances:
    """The same for one request: the shared odds, shifted by how much better or worse this request's candidates fare.

    The shift is one for all evidence, so that every candidate tells something about the others. It fades, so that a
    source that was wrong for a while is tried again. `hope`: candidates that it imagines to have been right before its
    first pass, so that what is not known yet is tried.
    """

    def __init__(self, shared: Chances, hope: float = 0.0) -> None:
        self._shared, self._hope = shared, hope
        self._right = self._expected = self._tried = 0.0
        self._shift = 1.0  # the factor by which this request's odds differ

    def of(self, evidence: float) -> float:
        """Returns the chance of a candidate with this evidence."""
        shared = _within(self._shared.of(evidence))
        if not self._tried:
            return (self._hope + _SHARED_COUNT * shared) / (self._hope + _SHARED_COUNT)
        odds = shared / (1 - shared) * self._shift
        return odds / (1 + odds)

    def observe(self, evidence: float, right: float) -> None:
        """Takes note of a candidate, here and for all requests; see `Chances.observe`."""
        self._expected += self._shared.of(evidence)
        self._right += right
        self._tried += 1
        self._shared.observe(evidence, right)
        self._compare()

    def fade(self) -> None:
        """Makes what was observed before this pass count less."""
        self._hope *= _HOPE_FADE
        self._right, self._expected, self._tried = (
            _FADE * count for count in (self._right, self._expected, self._tried)
        )
        self._compare()

    def _compare(self) -> None:
        if self._tried:
            mean = _within(self._expected / self._tried)
            own = self._right + self._hope + _SHARED_COUNT * mean
            own = _within(own / (self._tried + self._hope + _SHARED_COUNT))
            self._shift = own / (1 - own) / (mean / (1 - mean))


def _within(chance: float) -> float:
    return min(max(chance, 0.01), 0.99)
