"""Follows a text through a grammar byte by byte, which needs no tokenizer."""

from math import inf
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from services.grammars.tokenizer import Tokens, library_tokenizer
from services.grammars.usage import Growth, TimeSpent

_END = 256
# The event loop waits for so much processor time. Ordinary grammars take microseconds a byte.
_FORCING_SECONDS = 0.005
# Processor time that the event loop may spend on following a text, and the bytes between two readings of the clock. In
# an ambiguous grammar, each byte takes longer than the one before: ten milliseconds after a few hundred bytes.
_FOLLOWING_SECONDS, _PART_BYTES = 0.02, 4
# The memory of one text's automaton. A string of 6,000 characters takes about 25 MB at most.
_MAX_BYTES = 32 << 20
# The limit on a text's processor time: a fixed part, and more for each byte and each call. Ordinary grammars take 10 to
# 25 microseconds a byte, and ambiguous ones take longer for each byte than for the one before.
_TEXT_SECONDS, _BYTE_SECONDS = 0.3, 0.0001


def byte_tokenizer() -> LLTokenizer:
    """Returns the library's tokenizer whose tokens are the bytes, followed by an end of text."""
    return library_tokenizer(Tokens([bytes([byte]) for byte in range(256)], _END, list), slices=[])


def allowed_bytes(matcher: LLMatcher) -> list[int]:
    """Returns the bytes that may follow; empty if none may or the matcher failed."""
    bits = matcher.compute_bitmask()
    return [] if matcher.is_error() else [byte for byte in range(256) if bits[byte >> 3] >> (byte & 7) & 1]


def forced_bytes(matcher: LLMatcher, limit: int, seconds: float = inf) -> tuple[bytes, bool]:
    """Returns the bytes that must follow, at most `limit`, and whether the text must end after them.

    The library's own `compute_ff_bytes` has no limit: a short grammar may force millions of bytes. It returns fewer
    after `seconds`, because a byte of a hostile grammar may take milliseconds.
    """
    found, ends, end = bytearray(), False, thread_time() + seconds
    while len(found) < limit and not matcher.is_stopped() and thread_time() < end:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if bits == 0 or bits & (bits - 1) or (ends := bits == 1 << _END):
            break
        found.append(bits.bit_length() - 1)
        matcher.consume_token(found[-1])
    ends = ends or (not matcher.is_error() and bool(matcher.is_stopped()))
    if found and not matcher.is_error():
        matcher.rollback(len(found))
    return bytes(found), ends


class ByteMatcher:
    """Implements `bridge.ports.TextGrammar` for one text.

    If the grammar exceeds a limit of memory or time, or the text does not follow it, nothing is forced or refused from
    then on: the target alone decides about the text.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._lost = False
        self._growth, self._time = Growth(_MAX_BYTES), TimeSpent(_TEXT_SECONDS)

    def commit(self, data: bytes) -> None:
        """See `TextGrammar`."""
        if not self._lost:
            self._lost = self._consume(data) < len(data) or self._lost

    def accepted(self, before: bytes, data: bytes) -> tuple[int, bool]:
        """See `TextGrammar`."""
        if self._lost:
            return len(data), True
        held = self._consume(before)
        count = self._consume(data) if held == len(before) else 0
        ends = count == len(data) and bool(self._matcher.is_accepting())
        self._rollback(held + count)
        return (len(data), True) if self._lost else (count, ends)

    def forced(self, after: bytes, limit: int) -> tuple[bytes, bool]:
        """See `TextGrammar`."""
        if self._lost or (count := self._consume(after)) < len(after):
            if not self._lost:
                self._rollback(count)
            return b"", False
        with self._growth, self._time:
            data, ends = forced_bytes(self._matcher, limit, _FORCING_SECONDS)
        self._allow(len(data))
        self._rollback(count)
        return (b"", False) if self._lost else (data, ends)

    def _consume(self, data: bytes) -> int:
        """Returns the number of bytes that follow; fewer, and gives up, when the time is over."""
        count, end = 0, thread_time() + _FOLLOWING_SECONDS
        with self._growth, self._time:
            while count < len(data):
                part = data[count : count + _PART_BYTES]
                count += (found := int(self._matcher.try_consume_tokens(list(part))))
                if found < len(part):
                    break
                if thread_time() >= end and count < len(data):
                    self._lost = True
                    break
        self._allow(count)
        return count

    def _rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
        self._lost = self._lost or self._matcher.is_error()

    def _allow(self, count: int) -> None:
        """Gives up if a call that followed `count` bytes exceeds a limit of the text."""
        self._time.allow((count + 1) * _BYTE_SECONDS)
        self._lost = self._lost or self._growth.exceeds or self._time.exceeds
