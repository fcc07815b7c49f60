"""Maps every token id to its bytes.

In the middle of a text a token id stands for the same bytes whatever its neighbours are, so detokenizing is
concatenation. The table results from applying the decoder in `tokenizer.json` to each token separately.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from tokenizers import Tokenizer

from bridge.text.string_matcher import StringMatcher
from bridge.text.tokenizer_json import (
    BYTE_TOKEN,
    Spec,
    check_limits,
    check_token_bytes,
    decode_token,
    decoder_parts,
    whole_text_step,
)


class TokenTable:
    """Holds the ids of a tokenizer, their bytes, and which of them are control tokens.

    The arguments are the result of `tokenizer_json.read`. Raises `TokenizerNotUnderstood` for a decoder that does not
    work token by token.
    """

    def __init__(self, spec: Spec, library: Tokenizer) -> None:
        self.library = library
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        check_limits(spec, library, self.size - 1)
        decoder = decoder_parts(spec)
        # The reason why decoding is more than concatenation, as far as the file shows; empty if it is not.
        self.whole_text_step = whole_text_step(decoder)
        byte_level = any(part["type"] == "ByteLevel" for part in decoder)
        added = library.get_added_tokens_decoder()
        self.special = frozenset(id_ for id_, token in added.items() if token.special)
        # The id for text that the vocabulary lacks. Files mark it as special, but it is not a control token.
        unknown = spec["model"].get("unk_token")
        self.unknown: int | None = spec["model"].get("unk_id") if unknown is None else library.token_to_id(unknown)
        self.unknown_text = added[self.unknown].content if self.unknown in added else ""
        self.control = self.special - {self.unknown}
        # Finds the written forms of the special tokens.
        self.controls = StringMatcher(library.id_to_token(id_) or "" for id_ in self.special)
        # The tokens that the library looks for in a text before it does anything else.
        self.added = {id_: token for id_, token in added.items() if id_ != self.unknown}
        # Bytes by id: empty for a control token, and for an id that has no token.
        self.tokens = [b""] * self.size
        known = set(vocabulary.values())
        self.missing = frozenset(id_ for id_ in range(self.size) if id_ not in known)
        for token, id_ in vocabulary.items():
            if id_ in self.special:
                continue
            if id_ in added:  # since 0.23 the library decodes these with the text that a normalizer puts in front
                token = library.id_to_token(id_) or token
            encoded = id_ in added and byte_level
            self.tokens[id_] = token.encode() if encoded else decode_token(token, decoder)
        check_token_bytes(self.tokens)
        # Ids of single-byte tokens, by that byte.
        self.byte_ids: dict[int, int] = {}
        for id_, data in enumerate(self.tokens):
            # If a byte has two tokens, the model was trained on "A"; `<0x41>` is for byte fallback only.
            if len(data) == 1 and (data[0] not in self.byte_ids or not BYTE_TOKEN.match(self.name(id_))):
                self.byte_ids[data[0]] = id_
        # The control tokens that the tokenizer puts in front of a text.
        encoding = library.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        self.frame = tuple(id_ for id_, _ in takewhile(lambda pair: pair[1], marked))

    def spell(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of `ids` in the middle of a text. Control tokens have no bytes."""
        return b"".join(self.token_bytes(id_) for id_ in ids)

    def token_bytes(self, id_: int) -> bytes:
        """Returns the bytes of one id; empty for an id without a token."""
        return self.tokens[id_] if id_ < self.size else b""

    def name(self, id_: int) -> str:
        """Returns the written form of an id."""
        return self.library.id_to_token(id_) or f"<{id_}>"

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the tokenizer's own decoding of `ids` as the start of a text, without control tokens."""
        return str(self.library.decode(list(ids), skip_special_tokens=True))

    def control_id(self, written: str) -> int | None:
        """Returns the id of the special token with this written form, if there is one."""
        id_ = self.library.token_to_id(written)
        return id_ if id_ in self.special else None
