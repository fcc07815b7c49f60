"""What is known of a target and its drafts from what they did: costs, and how much is accepted.

Shared by all requests to a target, so that one learns from the other. All of it is guesses about time: a wrong one
costs speed, never text.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

from bridge.average import Average
from bridge.trial import DraftRecord, Trial

# Of a line through widths: what the past is worth against each new point.
_FADE = 0.98
# A first guess at what each further token of a forward costs, in parts of a forward of one.
_STEP = 0.05
# Passes of one token after which their time is taken for known, and how many others may follow until it is not; and how
# much one counts behind more.
_SURE, _RECENT, _RARE = 4, 16, 0.5
# Candidates that a guess at their acceptance counts for, and at which counts are halved.
_GUESSED, _REMEMBERED = 20.0, 400.0


@dataclass
class Steps:
    """Nanoseconds that a pass of more tokens takes beyond a pass of one, as a line through widths from two on."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def known(self) -> bool:
        """Whether any pass has told anything of it."""
        return self._sums[0] > 0

    def learn(self, width: int, nanoseconds: float) -> None:
        """Takes note of what a pass of so many tokens took beyond one."""
        now = (1.0, width, width * width, nanoseconds, width * nanoseconds)
        self._sums = [_FADE * old + new for old, new in zip(self._sums, now, strict=True)]

    def of(self, width: int, single: float) -> float:
        """What so many tokens take beyond a pass of one that takes `single`."""
        if width == 1:
            return 0.0
        count, wide, square, taken, product = self._sums
        for guess in (2, 16):  # as much as a single one can tell, until there is more
            step = single * _STEP * (guess - 1)
            count, wide, square = count + 1, wide + guess, square + guess * guess
            taken, product = taken + step, product + guess * step
        slope = max((count * product - wide * taken) / (count * square - wide * wide), 0.0)
        return max((taken - slope * wide) / count + slope * width, 0.0)


@dataclass
class PassCost:
    """Nanoseconds of one request's passes by width.

    A pass of one token is the request's own: it takes longer behind a long text. Until there was any, it is what
    another request's last took. What others take beyond it is much the same for all requests to a target (`steps`).
    """

    _single: Average = field(default_factory=lambda: Average(1.0))
    _seen: int = 0
    _since: int = 0

    def learn(self, width: int, nanoseconds: float, steps: Steps) -> None:
        """Takes note of a pass of so many tokens."""
        if self._single.count:  # now and then one takes far longer, because of something else on the machine
            nanoseconds = min(nanoseconds, 3 * self.of(width, steps))
        rare = width == 1 and self._since > _RECENT
        self._since = 0 if width == 1 else self._since + 1
        self._seen += width == 1
        sure = self._seen >= _SURE or (self._seen and steps.known)
        if width > 1 and sure and self._since <= _RECENT:
            steps.learn(width, nanoseconds - self._single.value)
        elif rare:
            self._single.learn(nanoseconds, _RARE)
        else:  # if there are no passes of one, the others tell by what is known of them
            known = self._single.value if self._single.count else nanoseconds
            self._single.learn(max(nanoseconds - steps.of(width, known), nanoseconds / width))

    def known(self, steps: Steps) -> bool:
        """Whether it can be told what wider passes take, or the next of them will tell."""
        return steps.known or self._seen >= _SURE

    def of(self, width: int, steps: Steps) -> float:
        """What a pass of so many tokens takes, as far as it can be told."""
        return self._single.value + self.beyond(width, steps)

    def beyond(self, width: int, steps: Steps) -> float:
        """What it takes beyond a pass of one."""
        return steps.of(width, self._single.value)


class Acceptance:
    """How much of what is proposed is accepted, by what was said for it: one group below each edge and one beyond."""

    def __init__(self, edges: Sequence[float], guesses: Sequence[float], behind: "Acceptance | None" = None) -> None:
        """`guesses`: one for each group, until it is known. `behind`: what is known from other requests."""
        self._edges, self._guesses, self._behind = edges, guesses, behind
        self._counts = [[0.0, 0.0] for _ in guesses]

    def of_request(self) -> "Acceptance":
        """For one request, which begins with what is known from others and tells them what it finds."""
        return Acceptance(self._edges, self._guesses, self)

    def learn(self, sign: float, tried_count: int, accepted_count: int) -> None:
        """Takes note of what was tried in a row: of the accepted ones and the first that was not."""
        if self._behind:
            self._behind.learn(sign, tried_count, accepted_count)
        counts = self._counts[bisect_right(self._edges, sign)]
        counts[0] += accepted_count
        counts[1] += min(accepted_count + 1, tried_count)
        if counts[1] > _REMEMBERED:
            counts[:] = [count / 2 for count in counts]

    @property
    def total(self) -> float:
        """The part accepted of everything tried; 0 if nothing was."""
        accepted, tried = (sum(column) for column in zip(*self._counts, strict=True))
        return accepted / tried if tried else 0.0

    def of(self, sign: float) -> float:
        """The part accepted at each position, behind accepted ones."""
        group = bisect_right(self._edges, sign)
        accepted, tried = self._counts[group]
        guess = self._behind.of(sign) if self._behind else self._guesses[group]
        weight = _GUESSED / 4 if self._behind else _GUESSED
        return (accepted + guess * weight) / (tried + weight)


@dataclass
class Costs:
    """Of one target under one load."""

    steps: Steps = field(default_factory=Steps)
    # Nanoseconds of a pass of one token, as a request last had it; until then all is told in parts of it.
    single: float = 1.0
    # Nanoseconds from a pass to the candidates for the next, as the target waited for them.
    hop: Average = field(default_factory=lambda: Average(600_000.0))
    drafts: dict[str, DraftRecord] = field(default_factory=dict)


class Estimates:
    """Of one target: how much is accepted, and what is known of costs under each load."""

    def __init__(self) -> None:
        # By bytes of a match, and by the draft's own probability.
        self.lengths = Acceptance((8, 16, 32), (0.3, 0.5, 0.65, 0.8))
        self.confidences = Acceptance((0.3, 0.5, 0.7, 0.9, 0.97), (0.3, 0.4, 0.55, 0.7, 0.85, 0.95))
        # Passes since candidates of a match were verified, that had a match which did not pay.
        self.untried = 0
        # Passes since one of one token.
        self.wide = 0
        self._running = 0
        self._costs: list[Costs] = [Costs()]

    @property
    def load(self) -> int:
        """Requests that run now; 1 at least."""
        return max(self._running, 1)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as running."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def costs(self) -> Costs:
        """Under this load: 1, 2 to 3, 4 to 7 requests and so on. A new one begins with what the one below knows."""
        level = self.load.bit_length() - 1
        while len(self._costs) <= level:
            self._costs.append(deepcopy(self._costs[-1]))
        return self._costs[level]

    def trial(self, draft: str) -> Trial:
        """Of a draft, by name, for one request."""
        return Trial(self.costs.drafts.setdefault(draft, DraftRecord()))
