"""What a tokenizer's ids stand for, in bytes.

In the middle of a text every token id stands for a fixed byte string, whatever its neighbours, so
that detokenizing is concatenation. The table comes from `tokenizer.json`: the decoder there says how
a token's written form becomes text, and it is applied to each token by itself.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenizers import Encoding, Tokenizer

from bridge.errors import TokenizerNotUnderstood

Component = Mapping[str, Any]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with (GPT-2, `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def components(component: Component | None) -> Iterator[Component]:
    """The parts of a normalizer, pre-tokenizer or decoder, sequences taken apart."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for part in component.get(key, ()):
                yield from components(part)
    else:
        yield component


def _spell(token: str, decoder: Sequence[Component]) -> bytes:
    """The bytes of one token in the middle of a text, as `decoder` has them."""
    for part in decoder:
        match part["type"]:
            case "ByteLevel":
                if all(char in _ALPHABET for char in token):
                    return bytes(_ALPHABET[char] for char in token)
            case "ByteFallback":
                if match_ := _BYTE_TOKEN.match(token):
                    return bytes([int(match_[1], 16)])
            case "Replace":
                token = token.replace(part["pattern"]["String"], part["content"])
            case "Metaspace":
                token = token.replace(part["replacement"], " ")
            case "WordPiece":
                prefix = part["prefix"]
                token = token[len(prefix) :] if token.startswith(prefix) else " " + token
            case "BPEDecoder":
                token = token.replace(part["suffix"], " ")
    return token.encode("utf-8", "surrogatepass")


def _understood(decoder: Sequence[Component]) -> None:
    # Fuse joins tokens and Strip trims the whole text's ends: neither changes the middle of a text.
    known = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "WordPiece", "BPEDecoder", "Fuse", "Strip"}
    for part in decoder:
        if part["type"] not in known or (part["type"] == "Replace" and "String" not in part["pattern"]):
            raise TokenizerNotUnderstood(
                f"the tokenizer's decoder has a part {part['type']!r} that DraftBridge cannot turn into bytes: "
                "serve this model from a tokenizer.json with a byte-level, SentencePiece-style or WordPiece decoder",
                component="decoder",
                type=part["type"],
            )


def _without_dummy_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for the middle of a text: no space is put in front, no token around."""

    def keep(component: Component | None, list_key: str) -> Component | None:
        if component is None:
            return None
        if component["type"] == "Sequence":
            parts = [part for one in component[list_key] if (part := keep(one, list_key))]
            return {**component, list_key: parts}
        if component["type"] == "Prepend":
            return None
        changed = dict(component)
        if component["type"] == "Metaspace":
            changed |= {"prepend_scheme": "never"}
            changed.pop("add_prefix_space", None)
        if component["type"] == "ByteLevel":
            changed |= {"add_prefix_space": False}
        return changed

    return {
        **spec,
        "normalizer": keep(spec.get("normalizer"), "normalizers"),
        "pre_tokenizer": keep(spec.get("pre_tokenizer"), "pretokenizers"),
        "post_processor": None,
    }


def _local(part: Component) -> bool:
    """Whether a pre-tokenizer looks at no more than one character to split there."""
    match part["type"]:
        case "Metaspace":
            return True
        case "ByteLevel":
            return not part.get("use_regex", True)
        case "Split":
            return len(part["pattern"].get("String", "..")) == 1
    return False


@dataclass(frozen=True)
class Pieces:
    """Consecutive tokens that spell `consumed` bytes of what was encoded.

    `exact`: the tokens' bytes are exactly the bytes given. `seams[i]`: what stands on the two sides of the
    end of token i has no part in how the other is encoded.
    """

    ids: list[int]
    seams: list[bool]
    consumed: int
    exact: bool


class Vocabulary:
    """A tokenizer, understood down to bytes.

    >>> vocabulary = Vocabulary(path.read_bytes())
    >>> vocabulary.spell(vocabulary.encode("naïve").ids)
    b'na\\xc3\\xafve'

    Raises `TokenizerNotUnderstood` for a file that is no tokenizer, or one whose decoder has parts
    that no byte table can be made of.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        self.sha256 = hashlib.sha256(tokenizer_json).hexdigest()
        try:
            spec = json.loads(tokenizer_json)
            self._whole = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # the library raises plain Exception for a file that it cannot read
            raise TokenizerNotUnderstood(
                f"this is no tokenizer.json that the tokenizers library reads ({error}): "
                "save the model's fast tokenizer again with save_pretrained"
            ) from error
        self._whole.no_truncation()
        self._whole.no_padding()
        middle = _without_dummy_prefix(spec)
        if all(middle.get(part) == spec.get(part) for part in ("normalizer", "pre_tokenizer")):
            self._middle = self._whole
        else:
            self._middle = Tokenizer.from_str(json.dumps({**middle, "truncation": None, "padding": None}))
        decoder = self._decoder(spec)
        _understood(decoder)
        byte_level = any(part["type"] == "ByteLevel" for part in decoder)
        added = self._whole.get_added_tokens_decoder()
        self.special = frozenset(id_ for id_, token in added.items() if token.special)
        written = {id_: token for token, id_ in self._whole.get_vocab(with_added_tokens=True).items()}
        # Stands for whatever it stands for: no control token, though files mark it as one.
        unknown = spec["model"].get("unk_token") or spec["model"].get("unk_id")
        self.unknown = self._whole.token_to_id(unknown) if isinstance(unknown, str) else unknown
        self.size = max(written, default=-1) + 1
        self._bytes: list[bytes | None] = [None] * self.size
        for id_, token in written.items():
            if id_ in self.special:
                self._bytes[id_] = b""
            elif id_ in added and byte_level:
                self._bytes[id_] = token.encode()
            else:
                self._bytes[id_] = _spell(token, decoder)
        self._splits_by_context = any(not _local(part) for part in components(spec.get("pre_tokenizer")))

    @staticmethod
    def _decoder(spec: dict[str, Any]) -> list[Component]:
        decoder = list(components(spec.get("decoder")))
        if decoder:
            return decoder
        # Some files leave the decoder out; what was done on the way in tells what to undo.
        for part in components(spec.get("pre_tokenizer")):
            if part["type"] in ("ByteLevel", "Metaspace"):
                return [part]
        if spec["model"].get("type") == "WordPiece":
            return [{"type": "WordPiece", "prefix": spec["model"]["continuing_subword_prefix"]}]
        return []

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
                written = self._whole.id_to_token(id_) or ""
                # Of several, `<0x41>` is what byte fallback writes and "A" what the model reads.
                if data[0] not in table or not _BYTE_TOKEN.match(written):
                    table[data[0]] = id_
        return table

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, in the middle of a text. Control tokens have none."""
        return b"".join(self.token_bytes(id_) for id_ in ids)

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of one id; an id without a token has none."""
        return (self._bytes[id_] or b"") if id_ < self.size else b""

    def name(self, id_: int) -> str:
        """How the tokenizer writes the id."""
        return self._whole.id_to_token(id_) or f"<{id_}>"

    def control_id(self, written: str) -> int | None:
        """The control token that is written so, if there is one."""
        id_ = self._whole.token_to_id(written)
        return id_ if id_ in self.special else None

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """How the control tokens are written, longest first."""
        texts = (self._whole.id_to_token(id_) for id_ in self.special)
        return tuple(sorted((text for text in texts if text), key=len, reverse=True))

    def encode(self, text: str, *, whole: bool = False, framed: bool = False) -> Encoding:
        """The tokenizer's own encoding of `text`, control tokens in it understood as such.

        `whole`: as the start of a text, where some tokenizers put a space; otherwise as the middle of
        one. `framed`: with the control tokens that the tokenizer puts around a text.
        """
        tokenizer = self._whole if whole else self._middle
        return tokenizer.encode(text, add_special_tokens=framed)

    def pieces(self, data: bytes, *, whole: bool = False) -> Pieces:
        """Tokens for `data`, any bytes at all, as the middle of a text (`whole`: as its start).

        Control tokens written out in it are plain text. Bytes that are no UTF-8 become single-byte
        tokens where the vocabulary has them. Ends before a character whose last bytes are missing.
        """
        ids: list[int] = []
        seams: list[bool] = []
        position, exact = 0, True
        while position < len(data):
            text, bad = _valid_prefix(data[position:])
            if text:
                raw = text.encode()
                first = whole and position == 0
                spelled = b""
                for part in self._plain(text, first):
                    spelled += self.spell(part.ids)
                    ids += part.ids
                    seams += self._seams(part)
                exact &= spelled == raw or (first and spelled == b" " + raw)
                position += len(raw)
            if bad is None:
                break
            for byte in bad:
                if byte in self.byte_ids:
                    ids.append(self.byte_ids[byte])
                    seams.append(True)
                else:
                    exact = False
                position += 1
        return Pieces(ids, seams, position, exact)

    def _plain(self, text: str, whole: bool) -> list[Encoding]:
        """Encodings that together say `text`, none of them with a control token."""
        encoding = self._encode_plain(text, whole)
        if self.special.isdisjoint(encoding.ids) or not self._control_pattern.search(text):
            return [encoding]
        # Unigram models have control tokens among their pieces and find them in any text: cut each in two.
        cuts = [0, *(match_.start() + 1 for match_ in self._control_pattern.finditer(text)), len(text)]
        return [self._encode_plain(text[start:end], whole and start == 0) for start, end in pairwise(cuts)]

    def _encode_plain(self, text: str, whole: bool) -> Encoding:
        tokenizer = self._whole if whole else self._middle
        tokenizer.encode_special_tokens = True
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens = False

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Finds where control tokens are spelled, overlapping ones too."""
        spelled = "|".join(re.escape(text) for text in self.control_texts if len(text) > 1)
        return re.compile(f"(?={spelled})" if spelled else r"(?!)")

    def _seams(self, encoding: Encoding) -> list[bool]:
        words, ids = encoding.word_ids, encoding.ids
        return [
            index + 1 == len(ids) or words[index] != words[index + 1] or self._separable(ids[index], ids[index + 1])
            for index in range(len(ids))
        ]

    def _separable(self, left: int, right: int) -> bool:
        """Inside a word: no token holds the bytes that meet here side by side, so the two never become one."""
        if self._splits_by_context:
            return False  # the rest of a word, taken by itself, may be split in another way
        before, after = self.token_bytes(left), self.token_bytes(right)
        return not before or not after or (before[-1] << 8 | after[0]) not in self._neighbours

    def warm(self) -> None:
        """Computes now what the first use would."""
        if not self._splits_by_context:
            _ = self._neighbours
        _ = self.byte_ids, self.control_texts

    @cached_property
    def _neighbours(self) -> frozenset[int]:
        """Every two bytes that stand side by side inside some token."""
        found: set[int] = set()
        for data in self._bytes:
            if data:
                found.update(a << 8 | b for a, b in pairwise(data))
        return frozenset(found)


def _valid_prefix(data: bytes) -> tuple[str, bytes | None]:
    """The text that `data` begins with, and the bytes behind it that are no UTF-8.

    None in their place: nothing more, or only the beginning of a character.
    """
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        text = data[: error.start].decode()
        if error.reason == "unexpected end of data":
            return text, None
        return text, data[error.start : error.end]
