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
        self._stop = [_StopString(one) for one in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        # The sources of the bytes that are not decoded yet, and of those of the text that `spans` was not asked for.
        self._undecoded: list[str] = []
        self._sources: list[str] = []
        self.stopped = False

    def push(self, data: bytes, source: str = "", *, final: bool = False) -> str:
        """Takes bytes that `source` proposed and returns the text that can be sent, which is all of it if `final`."""
        assert not self.stopped
        begin = len(self._held)
        self._held += self._decoded(data, source, final)
        for end in range(begin + 1, len(self._held) + 1) if self._stop else ():
            # Of several that end here, the longest one counts: it began first.
            if length := max(one.add(self._held[end - 1]) for one in self._stop):
                self.stopped = True
                return self._held[: end - length]
        sent = len(self._held) - (0 if final else max((one.begun for one in self._stop), default=0))
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


class _StopString:
    """Finds a stop string in a text in constant time per character, after Knuth, Morris and Pratt (1977).

    `begun`: the length of the longest end of the text with which the string begins.
    """

    def __init__(self, text: str) -> None:
        self._text, self.begun = text, 0
        # By length of a beginning: that of the longest shorter one with which it ends.
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def _longer(self, length: int, character: str) -> int:
        while length and self._text[length] != character:
            length = self._shorter[length]
        return length + (self._text[length] == character)

    def add(self, character: str) -> int:
        """Adds a character to the text. Returns the length of the string if it is complete, else 0."""
        self.begun = self._longer(self.begun, character)
        return self.begun if self.begun == len(self._text) else 0
