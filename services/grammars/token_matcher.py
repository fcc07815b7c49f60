"""Follows one sequence through a grammar, and returns which tokens may follow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar
from bridge.text.common_prefix import common_prefix_length
from services.grammars.byte_matcher import forced_bytes
from services.grammars.compiler import invalid, refused
from services.grammars.tokenizer import GrammarTokenizer
from services.grammars.usage import Growth, TimeSpent

# The end of the text that an error quotes.
_QUOTED_BYTES = 40
# The forced bytes that decide about the next token. Few tokens are longer.
_FORCED_BYTES = 64
# The memory of one text's automata. A string of 6,000 characters takes 15 to 50 MB.
_MAX_BYTES = 128 << 20
# The limit on a text's processor time: a fixed part, and more for each mask and each byte. With 262,144 tokens, masks
# of ordinary grammars take 0.1 to 1 ms on average, and bytes some microseconds. The masks of an ambiguous grammar take
# longer from token to token, and delay all sequences.
_TEXT_SECONDS, _MASK_SECONDS, _BYTE_SECONDS = 1.0, 0.01, 0.0001
# The event loop waits for so much processor time, and for one id more.
_CERTAIN_SECONDS = 0.005


class GrammarPosition:
    """A position in a grammar. The ids in `ends` are allowed exactly where the grammar may end.

    All methods raise `InvalidGrammar` if the grammar exceeds a limit. One thread may use it at a time.
    """

    def __init__(
        self, matcher: LLMatcher, grammar: Grammar, tokenizer: GrammarTokenizer, ends: frozenset[int], name: str
    ) -> None:
        self._matcher, self._grammar, self._tokenizer, self._name = matcher, grammar, tokenizer, name
        self._ends, self._end_ids = ends, np.array(sorted(ends), np.int64)
        self._text = bytearray()
        self._growth, self._time = Growth(_MAX_BYTES), TimeSpent(_TEXT_SECONDS)

    def allowed(self) -> NDArray[np.bool_]:
        """Returns which ids may follow, shape [size of the vocabulary].

        Raises `InvalidGrammar` if none may, because the tokenizer has no token for what the grammar requires.
        """
        with self._growth, self._time:
            own = self._allowed()
        self._time.allow(_MASK_SECONDS)
        if self._growth.exceeds:
            raise invalid(self._grammar, f"is too complex: it takes more than {_MAX_BYTES >> 20} MiB{self._place}")
        if self._time.exceeds:
            what = f"finding the tokens that may follow takes more than {_MASK_SECONDS * 1000:g} ms on average"
            raise invalid(self._grammar, f"is too complex or ambiguous: {what}{self._place}")
        return own

    def _allowed(self) -> NDArray[np.bool_]:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failed()
        size = self._tokenizer.size
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._tokenizer.end + 1, bitorder="little")
        own = found[:size].view(np.bool_)
        own[self._end_ids] = found[self._tokenizer.end]
        if not own.any():
            own[self._byte_ids(found[size : self._tokenizer.end])] = True
        return own

    def _byte_ids(self, bytes_: NDArray[np.uint8]) -> list[int]:
        """Returns the single-byte tokens that may follow where no other does: `stop_token_ids` may forbid a token."""
        wanted = bytes(np.flatnonzero(bytes_).astype(np.uint8))
        known = self._tokenizer.vocabulary.byte_ids
        if ids := [known[byte] for byte in wanted if byte in known and known[byte] not in self._ends]:
            return ids
        raise invalid(
            self._grammar,
            f"cannot be satisfied{self._place}: it requires one of {wanted!r}, and {self._name} has no token for that "
            "which does not end the text",
        )

    @property
    def _place(self) -> str:
        return f" after {bytes(self._text[-_QUOTED_BYTES:])!r}" if self._text else ""

    def _failed(self) -> InvalidGrammar:
        return refused(self._grammar, self._matcher.get_error(), self._place)


@dataclass(frozen=True)
class _Forced:
    """The token of bytes that must follow. Those in `longer` go on after these bytes, and may be allowed, too."""

    token_id: int
    longer: NDArray[np.intp]


class TokenMatcher(GrammarPosition):
    """Follows a sequence token by token, with a way back.

    Bytes without an alternative are written in the tokenizer's own tokens, if its vocabulary has all common bytes.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        byte_matcher: LLMatcher,
        grammar: Grammar,
        tokenizer: GrammarTokenizer,
        ends: frozenset[int],
        name: str,
    ) -> None:
        super().__init__(matcher, grammar, tokenizer, ends, name)
        self._byte_matcher = byte_matcher
        # The number of bytes of each token so far.
        self._lengths: list[int] = []

    def restart(self, token_ids: Sequence[int]) -> None:
        """Moves to the position after `token_ids` from the start. Raises `InvalidGrammar` if they do not follow it."""
        self._matcher.reset()
        self._byte_matcher.reset()
        self._text.clear()
        self._lengths.clear()
        self.advance(token_ids)

    def advance(self, token_ids: Iterable[int]) -> None:
        """Moves over ids, which must not be in `ends`. Raises `InvalidGrammar` if the grammar does not allow them."""
        with self._time:
            self._advance(token_ids)

    def _advance(self, token_ids: Iterable[int]) -> None:
        for id_ in token_ids:
            if not self._matcher.consume_token(id_):
                raise self._failed()
            data = self._tokenizer.vocabulary.token_bytes(id_)
            if not self._byte_matcher.consume_tokens(list(data)):
                raise refused(self._grammar, self._byte_matcher.get_error(), self._place)
            self._text += data
            self._lengths.append(len(data))
            self._time.allow(len(data) * _BYTE_SECONDS)

    @contextmanager
    def excursion(self) -> Iterator[None]:
        """Returns to the present position after the block."""
        count = len(self._lengths)
        try:
            yield
        finally:
            if (passed := len(self._lengths) - count) and not (
                self._matcher.rollback(passed) and self._byte_matcher.rollback(sum(self._lengths[count:]))
            ):
                raise self._failed()
            del self._text[len(self._text) - sum(self._lengths[count:]) :], self._lengths[count:]

    def _allowed(self) -> NDArray[np.bool_]:
        """Returns which ids may follow, as `GrammarPosition` does; only one within bytes that must follow."""
        forced = self._forced()
        own = None if forced and not forced.longer.size else super()._allowed()
        if forced and (own is None or not own[forced.longer].any()):
            own = np.zeros(self._tokenizer.size, np.bool_)
            own[forced.token_id] = True
        assert own is not None
        return own

    def accepted(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the ids may follow, of which only the last may be one that ends the text."""
        count = next((place for place, id_ in enumerate(token_ids) if id_ in self._ends), len(token_ids))
        with self._growth, self._time:
            found = int(self._matcher.try_consume_tokens(list(token_ids[:count])))
        may_end = found == count < len(token_ids) and self._matcher.is_accepting()
        if found and not self._matcher.rollback(found):
            raise self._failed()
        return found + bool(may_end)

    def certain(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Returns how many of the ids must follow, because the grammar allows no other, and whether the rest may.

        The rest may not follow if another id must. It may miss ids that must follow, because it computes no masks and
        ends after some milliseconds.
        """
        end = thread_time() + _CERTAIN_SECONDS
        with self.excursion(), self._growth, self._time:
            for place, id_ in enumerate(token_ids):
                if thread_time() >= end:
                    return place, True
                forced = self._forced()
                if not forced or forced.longer.size:
                    return place, True
                if id_ != forced.token_id:
                    return place, False
                self._advance((id_,))
        return len(token_ids), True

    def _forced(self) -> _Forced | None:
        """Returns the first token of the bytes that must follow; None if no bytes must, or no token can be written."""
        if not self._tokenizer.forcing:
            return None
        data, ends = forced_bytes(self._byte_matcher, _FORCED_BYTES)
        if not data or self._byte_matcher.is_error():
            return None
        id_ = self._tokenizer.first_id(data)
        if id_ is None or id_ in self._ends:
            return None
        return _Forced(id_, np.empty(0, np.intp) if ends else self._tokenizer.longer(data))


class TextMatcher(GrammarPosition):
    """Moves to any text, whatever its tokens are: a draft's context has tokens of its own."""

    def seek(self, data: bytes) -> bool:
        """Moves to the position after `data`. Returns False if the grammar does not allow `data`."""
        common = common_prefix_length(self._text, data)
        if len(self._text) > common and not self._matcher.rollback(len(self._text) - common):
            raise self._failed()
        del self._text[common:]
        return self._append(data[common:])

    def advance(self, token_ids: Iterable[int]) -> None:
        """Moves over ids, byte by byte, so that `seek` can return to the middle of a token."""
        if not self._append(self._tokenizer.vocabulary.spell(token_ids)):
            raise self._failed()

    def _append(self, data: bytes) -> bool:
        with self._growth, self._time:
            found = int(self._matcher.try_consume_tokens([self._tokenizer.byte_id(byte) for byte in data]))
        self._time.allow(found * _BYTE_SECONDS)
        self._text += data[:found]
        return found == len(data)
