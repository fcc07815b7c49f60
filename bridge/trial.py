"""Whether a draft model pays, and how it is best used: every way is tried, the better ones more often.

After Thompson, "On the likelihood that one unknown probability exceeds another" (1933): of each way a speed is drawn
from what is thought of it, and the fastest draw is used for a while. What is uncertain is tried so, and what is known
to be slower is not.
"""

import math
import random
from dataclasses import dataclass, field
from enum import Enum

from bridge.average import Average

# What is left of what was seen after each pass: by all requests, and by this one. Of what is known from others, so many
# passes count at most.
_FADE, _FADE_OWN, _BORROWED = 0.998, 0.995, 30.0
# Passes that count until another way may be chosen; those behind a change that tell of the change only, and do not; and
# how many go by until a draft that says nothing counts as one that does not.
_PASSES, _SETTLING, _SILENT = 6, 2, 16
# A way that is slower than the best by so much, over passes that would not count yet, has no need to be heard out.
_HOPELESS = 0.4
# How many passes a way that was never tried is taken to have been like the one it is most like.
_LIKE = 2.0
# Tokens of a pass differ by about so much of their mean, which counts for as many passes.
_SPREAD, _GUESSED = 0.6, 4.0
# Parts of a standard error that draws spread by: whole ones cost more in trials than wrong choices cost.
_DOUBT = 0.5


class Drafting(Enum):
    """What a draft model is for: nothing, to run ahead of a target that waits for nobody, or to be waited for."""

    NONE = "without the draft model"
    AHEAD = "with the draft model running ahead"
    AWAITED = "with the target waiting for the draft model"


@dataclass
class Rate:
    """Tokens in a nanosecond, over passes that are forgotten slowly: their number, and sums of both and of products."""

    _sums: tuple[float, ...] = (0.0,) * 6

    def learn(self, token_count: int, elapsed_ns: int, passes: int = 1) -> None:
        """Takes note of so many passes, together."""
        tokens, time = token_count / passes, elapsed_ns / passes
        now = (passes * one for one in (1.0, tokens, time, tokens**2, tokens * time, time**2))
        self._sums = tuple(old + new for old, new in zip(self._sums, now, strict=True))

    def faded(self, passes: float = math.inf, fade: float = 1.0) -> "Rate":
        """The same with less to say: as that many passes at most."""
        return Rate(tuple(min(fade, passes / max(self.passes, 1.0)) * one for one in self._sums))

    @property
    def passes(self) -> float:
        """How many there were, as far as they count still."""
        return self._sums[0]

    @property
    def speed(self) -> float:
        """Tokens in a nanosecond; 0 where nothing is known."""
        return self._sums[1] / self._sums[2] if self._sums[2] else 0.0

    @property
    def error(self) -> float:
        """Standard error of the speed, of a ratio of means."""
        passes, tokens, _, squares, products, times = self._sums
        if not tokens:
            return 0.0
        speed, mean = self.speed, tokens / passes
        residuals = max(squares - 2 * speed * products + speed**2 * times, 0.0)
        variance = (residuals + _GUESSED * (_SPREAD * mean) ** 2) / (passes + _GUESSED)
        return speed * math.sqrt(variance / passes) / mean


def _rates() -> dict[Drafting, Rate]:
    return {way: Rate() for way in Drafting}


@dataclass
class DraftRecord:
    """What all requests know of one draft with one target.

    Nanoseconds: of a token of it, of a message there and back.
    """

    rates: dict[Drafting, Rate] = field(default_factory=_rates)
    token: Average = field(default_factory=lambda: Average(0.0))
    round_trip: Average = field(default_factory=lambda: Average(0.0))
    draws: random.Random = field(default_factory=lambda: random.Random(0))


class Trial:
    """Of one request, which begins with what others know and tells them what it finds. Without a record: no draft."""

    def __init__(self, record: DraftRecord | None = None) -> None:
        self._record = record or DraftRecord()
        self._ways = tuple(Drafting) if record else (Drafting.NONE,)
        self._rates = {way: rate.faded(_BORROWED) for way, rate in self._record.rates.items()}
        self._done = dict.fromkeys(Drafting, 0)
        self._passes = self._tokens = self._elapsed_ns = 0
        self._counted_from = _SETTLING
        self.drafting = Drafting.NONE
        self._choose()

    @property
    def token(self) -> Average:
        """Nanoseconds of a token of the draft."""
        return self._record.token

    @property
    def round_trip(self) -> Average:
        """Nanoseconds of a message to the draft and its answer."""
        return self._record.round_trip

    def hear(self) -> None:
        """The draft has said something."""
        self._counted_from = min(self._counted_from, self._passes + _SETTLING)

    def learn(self, token_count: int, elapsed_ns: int) -> None:
        """Takes note of a pass, done as `drafting` says."""
        self._done[self.drafting] += 1
        self._passes += 1
        if self._passes > self._counted_from:
            self._note(token_count, elapsed_ns, 1)
        elif self._passes > 1:  # the change itself falls into the first
            self._tokens, self._elapsed_ns = self._tokens + token_count, self._elapsed_ns + elapsed_ns
            if self._hopeless:
                self._note_all()
                self._choose()
        if self._passes >= self._counted_from + _PASSES or self._lost:
            self._choose()

    @property
    def choice(self) -> str:
        """How fast it is each way and how often it went so, in words; nothing as long as only one is known."""
        measured = [way for way in self._ways if self._done[way] or self._record.rates[way].passes]
        known = [(way, self._rates[way].speed) for way in measured if self._rates[way].speed]
        if len(known) < 2 or not self.token.count:
            return ""
        return ", ".join(
            f"{1e9 * speed:.1f} tokens/s {way.value} ({self._done[way] or 'no'} passes here)" for way, speed in known
        )

    def close(self) -> None:
        """The request ends. What a draft cost that was not heard yet is told too, or each request would try it anew."""
        if self._passes <= self._counted_from:
            self._note_all()

    def _note_all(self) -> None:
        """Takes note of passes that would not count yet."""
        if self._elapsed_ns:
            self._note(self._tokens, self._elapsed_ns, self._passes - 1)
        self._tokens = self._elapsed_ns = 0

    def _note(self, token_count: int, elapsed_ns: int, passes: int) -> None:
        for rates, fade in ((self._rates, _FADE_OWN), (self._record.rates, _FADE)):
            for way in self._ways:
                rates[way] = rates[way].faded(fade=fade)
            rates[self.drafting].learn(token_count, elapsed_ns, passes)

    @property
    def _hopeless(self) -> bool:
        """Whether it is so slow, as where two models share too few cores, that no candidates could make up for it."""
        best = max(self._rates[way].speed for way in self._ways)
        return self._tokens < _HOPELESS * best * self._elapsed_ns

    @property
    def _lost(self) -> bool:
        """Whether it is plain already that another way is faster."""
        mine = self._rates[self.drafting]
        if self._passes < self._counted_from + 2 or mine.passes < 2:
            return False
        hoped = mine.speed + 2 * _DOUBT * mine.error
        known = [self._rates[way] for way in self._ways if self._rates[way].passes >= 2]
        return any(rate.speed - 2 * _DOUBT * rate.error > hoped for rate in known)

    def _choose(self) -> None:
        untried = [way for way in self._ways if self._rates[way].passes < 1]
        if untried == [Drafting.AWAITED]:
            self._rates[Drafting.AWAITED] = self._rates[Drafting.AHEAD].faded(_LIKE)
            untried = []
        drafting = untried[0] if untried else max(self._ways, key=self._draw)
        self._passes = self._tokens = self._elapsed_ns = 0
        if drafting is self.drafting:
            self._counted_from = 0
        else:
            self._counted_from = _SETTLING if drafting is Drafting.NONE else _SILENT
        self.drafting = drafting

    def _draw(self, way: Drafting) -> float:
        rate = self._rates[way]
        return rate.speed + _DOUBT * rate.error * self._record.draws.gauss()
