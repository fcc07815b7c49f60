"""Estimates the chance that a candidate is accepted, by source and evidence, for all requests and for one."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

# The weight of a prior, in candidates, and the number of candidates at which counts are halved.
_PRIOR_COUNT, _MAX_COUNT = 8.0, 800.0
# The weight of the shared chances in one request, in candidates, and the factor by which a request's own counts shrink
# in each pass, so that a source that was wrong at first is tried again.
_SHARED_COUNT, _FADE = 24.0, 0.99
# The factor by which an optimistic request's imagined right candidates shrink in each pass.
_IMAGINED_FADE = 0.8


class Chances:
    """Estimates the chance that a candidate is right if all candidates before it are, by the evidence for it.

    `edges` divide evidence into groups. `priors` has one chance for each group, so one more item than `edges`.
    """

    def __init__(self, edges: Sequence[float], priors: Sequence[float]) -> None:
        self.edges, self._priors = edges, priors
        self._counts = [[0.0, 0.0] for _ in priors]

    def of(self, evidence: float) -> float:
        """Returns the chance of a candidate with this evidence."""
        return self.of_group(bisect_right(self.edges, evidence))

    def of_group(self, group: int) -> float:
        """Returns the chance of a candidate whose evidence is in this group."""
        right, tried = self._counts[group]
        return (right + self._priors[group] * _PRIOR_COUNT) / (tried + _PRIOR_COUNT)

    def of_all(self, evidence: Iterable[float]) -> list[float]:
        """Returns the chance for each item of `evidence`, in less time than `of` for one after the other."""
        chances = [self.of_group(group) for group in range(len(self._priors))]
        return [chances[bisect_right(self.edges, one)] for one in evidence]

    def observe(self, evidence: float, right: float) -> None:
        """Records a candidate whose predecessors were all right: `right` is 1 or 0, or a chance between them."""
        counts = self._counts[bisect_right(self.edges, evidence)]
        counts[0] += right
        counts[1] += 1
        if counts[1] > _MAX_COUNT:
            counts[:] = [count / 2 for count in counts]


class RequestChances:
    """Estimates the same chance for one request: the shared odds times a factor learned from its own candidates.

    The factor is the same for all evidence, so that every candidate informs it. It fades, so that a source that was
    wrong for a while is tried again. `imagined_right`: right candidates that are imagined before the first pass, so
    that a source that is still unknown is tried.
    """

    def __init__(self, shared: Chances, imagined_right: float = 0.0) -> None:
        self.shared, self._imagined_right = shared, imagined_right
        self._right = self._expected = self._tried = 0.0
        self._odds_factor = 1.0
        # By group of evidence, what was asked for since the last pass: planning asks for the same chances many times.
        self._known = dict[int, float]()

    def of(self, evidence: float) -> float:
        """Returns the chance of a candidate with this evidence, as it was at this request's last pass."""
        group = bisect_right(self.shared.edges, evidence)
        if (found := self._known.get(group)) is None:
            found = self._known[group] = self._own(self.shared.of_group(group))
        return found

    def of_all(self, evidence: Iterable[float]) -> list[float]:
        """Returns the chance for each item of `evidence`."""
        return list(map(self.of, evidence))

    def _own(self, shared: float) -> float:
        shared = _within(shared)
        if not self._tried:
            return (self._imagined_right + _SHARED_COUNT * shared) / (self._imagined_right + _SHARED_COUNT)
        odds = shared / (1 - shared) * self._odds_factor
        return odds / (1 + odds)

    def observe(self, candidates: Iterable[tuple[float, float]] = ()) -> None:
        """Records a pass, here and for all requests: the evidence for each candidate, and 1 if it was right, else 0.

        Candidates after a wrong one do not belong to it; see `Chances.observe`. Reduces the weight of earlier passes.
        """
        self._known.clear()
        self._imagined_right *= _IMAGINED_FADE
        self._right, self._expected, self._tried = _FADE * self._right, _FADE * self._expected, _FADE * self._tried
        for evidence, right in candidates:
            self._expected += self.shared.of(evidence)
            self._right += right
            self._tried += 1
            self.shared.observe(evidence, right)
        if self._tried:
            mean = _within(self._expected / self._tried)
            own = self._right + self._imagined_right + _SHARED_COUNT * mean
            own = _within(own / (self._tried + self._imagined_right + _SHARED_COUNT))
            self._odds_factor = own / (1 - own) / (mean / (1 - mean))


def _within(chance: float) -> float:
    return min(max(chance, 0.01), 0.99)
