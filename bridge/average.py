"""A mean that forgets."""

from dataclasses import dataclass

# How much of it each new value takes the place of.
_FRESH = 0.1


@dataclass
class Average:
    """A mean that forgets; `value` is what it begins with."""

    value: float
    count: int = 0

    def learn(self, value: float, fresh: float = _FRESH) -> None:
        """The first values count the same, later ones for what is `fresh`."""
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, fresh)
