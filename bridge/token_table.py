"""What a tokenizer's ids stand for, in bytes.

In the middle of a text every token id stands for a fixed byte string, whatever its neighbours, so
that detokenizing is concatenation. The table comes from `tokenizer.json`: the decoder there says how
a token's written form becomes text, and it is applied to each token by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from bridge import tokenizer_json as spec_of


class TokenTable:
    """Ids, their bytes, and which of them are control tokens.

    Raises `TokenizerNotUnderstood` for a decoder with parts that no byte table can be made of.
    """

    def __init__(self, spec: Mapping[str, Any], library: Tokenizer) -> None:
        """`spec`: the file's content; `library`: what the tokenizers library makes of it."""
        self.library = library
        decoder = spec_of.decoder(spec)
        # Why decoding is more than concatenation, as far as the file tells.
        self.whole_text_step = spec_of.whole_text_step(decoder)
        byte_level = any(part["type"] == "ByteLevel" for part in decoder)
        added = library.get_added_tokens_decoder()
        spec_of.check_added(token.content for token in added.values())
        self.special = frozenset(id_ for id_, token in added.items() if token.special)
        # Stands for whatever it stands for: no control token, though files mark it as one.
        unknown = spec_of.unknown_token(spec)
        self.unknown = self.library.token_to_id(unknown) if isinstance(unknown, str) else unknown
        self.control = self.special - {self.unknown}
        # Found in a text before all else. The unknown token is one of them where a text spells it, and only there.
        self.added = {id_: token for id_, token in added.items() if id_ != self.unknown}
        self.unknown_text = added[self.unknown].content if self.unknown in added else ""
        written = {id_: token for token, id_ in self.library.get_vocab(with_added_tokens=True).items()}
        self.size = max(written, default=-1) + 1
        self._bytes: list[bytes | None] = [None] * self.size
        for id_, token in written.items():
            if id_ in added:  # as it is decoded: from 0.23 on with what a normalizer puts in front
                token = self.library.id_to_token(id_) or token
            if id_ in self.special:
                self._bytes[id_] = b""
            elif id_ in added and byte_level:
                self._bytes[id_] = token.encode()
            else:
                self._bytes[id_] = spec_of.spell(token, decoder)
        self._spelled = [data or b"" for data in self._bytes]

    @property
    def tokens(self) -> Sequence[bytes | None]:
        """Bytes by id; None for an id that has no token, empty for a control token."""
        return self._bytes

    @cached_property
    def byte_ids(self) -> Mapping[int, int]:
        """Ids that stand for a single byte, by that byte."""
        table: dict[int, int] = {}
        for id_, data in enumerate(self._bytes):
            if data is not None and len(data) == 1:
                written = self.library.id_to_token(id_) or ""
                # Of several, `<0x41>` is what byte fallback writes and "A" what the model reads.
                if data[0] not in table or not spec_of.BYTE_TOKEN.match(written):
                    table[data[0]] = id_
        return table

    @cached_property
    def frame(self) -> tuple[int, ...]:
        """Control tokens that the tokenizer puts in front of a text."""
        encoding = self.library.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(id_ for id_, _ in takewhile(lambda pair: pair[1], marked))

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, in the middle of a text. Control tokens have none."""
        return b"".join(self.token_bytes(id_) for id_ in ids)

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of one id; an id without a token has none."""
        return self._spelled[id_] if id_ < self.size else b""

    def name(self, id_: int) -> str:
        """How the tokenizer writes the id."""
        return self.library.id_to_token(id_) or f"<{id_}>"

    def decode(self, ids: Sequence[int]) -> str:
        """What the tokenizer itself says that `ids` spell, as the start of a text, control tokens left out."""
        return str(self.library.decode(list(ids), skip_special_tokens=True))

    def control_id(self, written: str) -> int | None:
        """The control token that is written so, if there is one."""
        id_ = self.library.token_to_id(written)
        return id_ if id_ in self.special else None

    def model_ids(self, *ids: int) -> list[int]:
        """What the model, without anything around it, makes of the written forms of `ids` in a row."""
        written = "".join(self.library.id_to_token(id_) or "" for id_ in ids)
        return [token.id for token in self.library.model.tokenize(written)]

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """How the control tokens are written."""
        return frozenset(text for id_ in self.special if (text := self.library.id_to_token(id_)))
