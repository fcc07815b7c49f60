"""How often candidates are right: calibrated chances by source and evidence, for all requests and for one."""

from bisect import bisect_right
from collections.abc import Sequence

# Candidates that a prior counts for, and the number of candidates at which counts are halved.
_PRIOR_COUNT, _MAX_COUNT = 8.0, 800.0
# Candidates that what other requests found counts for in one request; and what is left of a request's own counts after
# a pass, so that what was wrong at its beginning is tried again.
_SHARED_COUNT, _FADE = 24.0, 0.99


class Chances:
    """The chance that a candidate is right if those before it are, by the evidence for it.

    Evidence is divided into groups by `edges`. `priors`: one chance for each group, one more than edges.
    """

    def __init__(self, edges: Sequence[float], priors: Sequence[float]) -> None:
        self._edges, self._priors = edges, priors
        self._counts = [[0.0, 0.0] for _ in priors]

    def of(self, evidence: float) -> float:
        """The chance for a candidate with this evidence."""
        group = bisect_right(self._edges, evidence)
        right, tried = self._counts[group]
        return (right + self._priors[group] * _PRIOR_COUNT) / (tried + _PRIOR_COUNT)

    @property
    def tried_count(self) -> float:
        """Candidates that the chances are known from."""
        return sum(tried for _, tried in self._counts)

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
    source that was wrong for a while gets another try.
    """

    def __init__(self, shared: Chances) -> None:
        self._shared = shared
        self._right = self._expected = self._tried = 0.0

    def of(self, evidence: float) -> float:
        """The chance for a candidate with this evidence."""
        shared = self._shared.of(evidence)
        if not self._tried:
            return shared
        mean = min(max(self._expected / self._tried, 0.01), 0.99)
        own = (self._right + _SHARED_COUNT * mean) / (self._tried + _SHARED_COUNT)
        own = min(max(own, 0.01), 0.99)
        odds = shared / (1 - shared) * (own / (1 - own)) / (mean / (1 - mean))
        return odds / (1 + odds)

    @property
    def tried_count(self) -> float:
        """Candidates of this request that the shift is known from."""
        return self._tried

    def observe(self, evidence: float, right: float) -> None:
        """Takes note of a candidate, here and for all requests; see `Chances.observe`."""
        self._expected += self._shared.of(evidence)
        self._right += right
        self._tried += 1
        self._shared.observe(evidence, right)

    def fade(self) -> None:
        """Lets a pass go by."""
        self._right, self._expected, self._tried = (
            _FADE * count for count in (self._right, self._expected, self._tried)
        )
