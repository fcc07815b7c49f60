"""Makes a model's tokens known to `llguidance`."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from bridge.text.translation import segment
from bridge.text.vocabulary import Vocabulary

# The bytes of texts without control characters and without the rarest planes of Unicode. Vocabularies that were trained
# on bytes may lack others.
_COMMON_BYTES = frozenset((0x0A, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)))


class Tokens:
    """The tokens of a tokenizer in the form that the library reads: its attributes are the library's.

    `tokens`: bytes by id, without the id `end`, which follows them. `encode` returns ids that spell its argument.
    """

    def __init__(self, tokens: Sequence[bytes], end: int, encode: Callable[[bytes], list[int]]) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id, self.bos_token_id = end, None
        self.special_token_ids = [end]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


def library_tokenizer(tokens: Tokens, slices: list[str] | None = None) -> LLTokenizer:
    """Returns the library's tokenizer. `slices`: groups of tokens that it prepares; None for its own choice."""
    return LLTokenizer(tokens, slices=slices)  # type: ignore[arg-type]


class GrammarTokenizer:
    """The library's tokenizer for a vocabulary, with a further id for each byte and one for the end of a text.

    The further ids are never chosen. `byte_id` lets a matcher follow bytes that are not a model's tokens; `end` stands
    for all ids that end a text. `forcing`: all but very rare texts can be spelled in the vocabulary's tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.size = vocabulary, vocabulary.size
        self.end = self.size + 256
        self.forcing = vocabulary.byte_ids.keys() >= _COMMON_BYTES
        tokens = vocabulary.tokens + [bytes([byte]) for byte in range(256)]
        self.library = library_tokenizer(Tokens(tokens, self.end, lambda data: segment(vocabulary, data)))
        found = sorted((data, id_) for id_, data in enumerate(vocabulary.tokens) if data)
        self._sorted = [data for data, _ in found]
        self._sorted_ids = np.array([id_ for _, id_ in found], np.intp)

    def byte_id(self, byte: int) -> int:
        """Returns the further id of a byte."""
        return self.size + byte

    def first_id(self, data: bytes) -> int | None:
        """Returns the first token of `data` in the tokenizer's own tokens; None if they do not spell `data`."""
        ids = segment(self.vocabulary, data)
        return ids[0] if self.vocabulary.spell(ids) == data and self.vocabulary.token_bytes(ids[0]) else None

    def longer(self, data: bytes) -> NDArray[np.intp]:
        """Returns the ids of the tokens that begin with `data` and go on."""
        first = bisect_right(self._sorted, data)
        end = bisect_right(self._sorted, data, first, key=lambda token: token[: len(data)])
        return self._sorted_ids[first:end]
