"""From committed bytes to the text that a client sees."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Whole characters only, and nothing from a stop string on.

    Of several stop strings the one that is complete first counts, however the bytes come. Text that may be the
    beginning of a stop string is held back until it cannot be one any more. Bytes that are no UTF-8 become U+FFFD,
    as Hugging Face's decoders have them.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes, *, final: bool = False) -> str:
        """Takes the next bytes and returns the text that can be sent. `final`: no more will come."""
        assert not self.stopped
        self._held += self._decoder.decode(data, final)
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        keep = 0 if final else self._beginning_of_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _beginning_of_stop(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
