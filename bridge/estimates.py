"""What is known of a target and its drafts from what they did: costs, acceptance, and whether a draft pays.

Shared by all requests to a target, so that one learns from the other. All of it is guesses about time: a wrong one
costs speed, never text.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum

# How much of an average each new value takes the place of.
_FRESH = 0.1
# Of a line through widths: what the past is worth against each new point.
_FADE = 0.98
# A first guess at what each further token of a forward costs, in parts of a forward of one.
_STEP = 0.05
# Passes of one token after which their time is taken for known, and how many others may follow until it is not.
_SURE, _RECENT = 4, 16
# Where one group of match lengths ends and the next begins, and how much of a match is accepted until it is known.
_LENGTHS = (8, 16, 32)
_ACCEPTED = (0.3, 0.5, 0.65, 0.8)
# Candidates that such a guess counts for, and at which counts are halved.
_GUESSED, _REMEMBERED = 20.0, 400.0


@dataclass
class Average:
    """A mean that forgets; `start` until there is a value."""

    value: float
    count: int = 0

    def learn(self, value: float, fresh: float = _FRESH) -> None:
        """The first values count the same, later ones for what is `fresh`."""
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, fresh)


@dataclass
class Steps:
    """Nanoseconds that a pass of more tokens takes beyond a pass of one, as a line through widths from two on."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

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

    A pass of one token is the request's own: it takes longer behind a long text. What others take beyond it is much the
    same for all requests to a target.
    """

    steps: Steps = field(default_factory=Steps)
    _single: Average = field(default_factory=lambda: Average(1.0))
    _seen: int = 0
    _since: int = 0

    def learn(self, width: int, nanoseconds: float) -> None:
        """Takes note of a pass of so many tokens."""
        if self._single.count:  # now and then one takes far longer, because of something else on the machine
            nanoseconds = min(nanoseconds, 3 * self.of(width))
        self._since = 0 if width == 1 else self._since + 1
        self._seen += width == 1
        if width > 1 and self._seen >= _SURE and self._since <= _RECENT:
            self.steps.learn(width, nanoseconds - self._single.value)
        else:  # if there are no passes of one, the others tell by what is known of them
            known = self._single.value if self._single.count else nanoseconds
            self._single.learn(max(nanoseconds - self.steps.of(width, known), nanoseconds / width))

    def of(self, width: int) -> float:
        """What a pass of so many tokens takes, as far as it can be told; before there was any, in parts of one."""
        return self._single.value + self.steps.of(width, self._single.value)


@dataclass
class Acceptance:
    """How much of a suffix match is accepted, by its length. `behind`: what is known from other requests."""

    behind: "Acceptance | None" = None
    _counts: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in _ACCEPTED])

    def learn(self, length: int, candidate_count: int, accepted_count: int) -> None:
        """Takes note of candidates from a match of `length` bytes. What follows a rejected one says nothing."""
        if self.behind:
            self.behind.learn(length, candidate_count, accepted_count)
        counts = self._counts[bisect_right(_LENGTHS, length)]
        counts[0] += accepted_count
        counts[1] += min(accepted_count + 1, candidate_count)
        if counts[1] > _REMEMBERED:
            counts[:] = [count / 2 for count in counts]

    @property
    def total(self) -> float:
        """The part of all candidates accepted; 0 if there were none."""
        accepted, tried = (sum(column) for column in zip(*self._counts, strict=True))
        return accepted / tried if tried else 0.0

    def of(self, length: int) -> float:
        """The part of candidates accepted at each position, behind accepted ones."""
        group = bisect_right(_LENGTHS, length)
        accepted, tried = self._counts[group]
        guess = self.behind.of(length) if self.behind else _ACCEPTED[group]
        weight = _GUESSED / 4 if self.behind else _GUESSED
        return (accepted + guess * weight) / (tried + weight)


class Drafting(Enum):
    """What a draft model is for: nothing, to run ahead of a target that waits for nobody, or to be waited for."""

    NONE = "without the draft model"
    AHEAD = "with the draft model running ahead"
    AWAITED = "with the target waiting for the draft model"


# Passes of a trial, those at its beginning that are not counted, and how many trials go by before another way is
# tried again, at first and at most.
_TRIAL, _SETTLING = 10, 3
_AGAIN, _SELDOM = 6, 192
# How much faster than none a draft has to be.
_MARGIN = 1.08


@dataclass
class _Way:
    """One way to use a draft. `speed`: tokens in a nanosecond. `due`: trials of the best until it is tried again."""

    speed: Average = field(default_factory=lambda: Average(0.0))
    interval: int = _AGAIN
    due: int = _AGAIN


@dataclass
class Trial:
    """Whether and how a draft model pays: each way is tried in turn, those that turned out worse ever more seldom."""

    drafting: Drafting = Drafting.NONE
    ways: dict[Drafting, _Way] = field(default_factory=lambda: {way: _Way() for way in Drafting})
    # Nanoseconds of a token of the draft, and of a message there and back.
    token: Average = field(default_factory=lambda: Average(0.0))
    round_trip: Average = field(default_factory=lambda: Average(0.0))
    _tokens: int = 0
    _elapsed_ns: int = 0
    _passes: int = 0

    def learn(self, token_count: int, elapsed_ns: int) -> None:
        """Takes note of a pass, done as `drafting` says."""
        self._passes += 1
        if self._passes > _SETTLING:
            self._tokens += token_count
            self._elapsed_ns += elapsed_ns
        if self._passes == _TRIAL:
            self.ways[self.drafting].speed.learn(self._tokens / max(self._elapsed_ns, 1), 0.3)
            self._next()

    @property
    def choice(self) -> str:
        """How fast it is each way, in words; nothing as long as only one was tried."""
        known = {way: one.speed.value for way, one in self.ways.items() if one.speed.count}
        if len(known) < 2 or not self.token.count:
            return ""
        return ", ".join(f"{1e9 * speed:.1f} tokens/s {way.value}" for way, speed in known.items())

    def _worth(self, way: Drafting) -> float:
        # Trials are short: a draft that seems to be a little faster may as well be slower.
        return self.ways[way].speed.value * (_MARGIN if way is Drafting.NONE else 1.0)

    def _next(self) -> None:
        self._tokens = self._elapsed_ns = self._passes = 0
        if untried := [way for way, one in self.ways.items() if not one.speed.count]:
            self.drafting = untried[0]
            return
        best = max(self.ways, key=self._worth)
        tried = self.ways[self.drafting]
        if self.drafting is best:
            tried.interval = _AGAIN
            for one in self.ways.values():
                one.due -= 1
        else:
            far = tried.speed.value < 0.7 * self.ways[best].speed.value
            tried.due = tried.interval = min((4 if far else 2) * tried.interval, _SELDOM)
        due = [way for way, one in self.ways.items() if way is not best and one.due <= 0]
        self.drafting = due[0] if due and self.drafting is best else best


@dataclass
class Estimates:
    """Of one target."""

    steps: Steps = field(default_factory=Steps)
    acceptance: Acceptance = field(default_factory=Acceptance)
    # Nanoseconds from a pass to the candidates for the next, as the target waited for them.
    hop: Average = field(default_factory=lambda: Average(600_000.0))
    trials: dict[str, Trial] = field(default_factory=dict)

    def trial(self, draft: str) -> Trial:
        """Of a draft, by name."""
        return self.trials.setdefault(draft, Trial())
