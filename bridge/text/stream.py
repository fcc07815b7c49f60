"""Turns committed bytes into the text that a client receives."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Span:
    """A run of text bytes from one source; the source's name is empty for the target's own tokens."""

    source: str
    byte_count: int


class TextStream:
    """Turns bytes into text that has only whole characters and ends before the first stop string.

    The first stop string to be complete counts, however the bytes are divided. Text that may be the beginning of a stop
    string is held back until it cannot be one. Bytes that are not UTF-8 become U+FFFD, as in Hugging Face's decoders.
    The source of each byte is kept until its text is sent.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        # The sources of the bytes that are not decoded yet, and of those of the text that `spans` was not asked for.
        self._undecoded: list[str] = []
        self._sources: list[str] = []
        self.stopped = False

    def push(self, data: bytes, source: str = "", *, final: bool = False) -> str:
        """Takes bytes that `source` proposed and returns the text that can be sent, which is all of it if `final`."""
        assert not self.stopped
        self._held += self._decoded(data, source, final)
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        sent = len(self._held) - (0 if final else self._stop_prefix_length())
        text, self._held = self._held[:sent], self._held[sent:]
        return text

    def spans(self, text: str) -> tuple[Span, ...]:
        """Returns the sources of text that `push` returned. Must be called once for each piece of text, in order."""
        count = len(text.encode())
        names = self._sources[:count]
        del self._sources[:count]
        return tuple(Span(name, len(list(run))) for name, run in groupby(names))

    def _decoded(self, data: bytes, source: str, final: bool) -> str:
        """Returns the whole characters so far, and notes the source of each byte of them."""
        self._undecoded += [source] * len(data)
        text = self._decoder.decode(data, final)
        names = self._undecoded[: len(self._undecoded) - len(self._decoder.getstate()[0])]
        del self._undecoded[: len(names)]
        if missing := len(text.encode()) - len(names):
            # A replacement character has more bytes than the invalid ones that it replaces, and their source.
            place = len(text[: text.index("\ufffd")].encode())
            names[place:place] = [names[place]] * missing
        self._sources += names
        return text

    def _stop_prefix_length(self) -> int:
        """Returns the length of the longest end of the held text with which a stop string begins."""
        held = self._held
        lengths = ((stop, range(min(len(stop) - 1, len(held)), 0, -1)) for stop in self._stop)
        found = (next((n for n in some if held.endswith(stop[:n])), 0) for stop, some in lengths)
        return max(found, default=0)
