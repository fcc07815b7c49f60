"""A clock that does not move by itself."""


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)
