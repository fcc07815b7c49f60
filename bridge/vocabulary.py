"""A tokenizer, understood down to bytes: what its ids stand for, and what ids a text is.

Texts come in pieces, and what was encoded before is not encoded again: see `seams` and `prefix_cache`.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from tokenizers import Encoding, Tokenizer

from bridge import tokenizer_json as spec_of
from bridge.errors import TokenizerNotUnderstood
from bridge.prefix_cache import PrefixCache
from bridge.seams import Seams, Tokens
from bridge.spelled import Spelled
from bridge.token_table import TokenTable

# The library holds the interpreter's lock while it encodes one text, not while it encodes a batch.
_LONG_TEXT = 8192
# Where words end, and how long a chunk is at least that is tried by itself.
_WORD_END = re.compile(r"(?<=\S)(?=[ \t\n])|(?<=[。，、！？；：])(?=\w)")
_CHUNK_CHARACTERS = 24
# How many ends a chunk is tried with before the rest of the text is taken whole.
_CHUNK_TRIES = 4


@dataclass
class Pieces(Tokens):
    """Tokens for the first `consumed` bytes of what was encoded."""

    consumed: int = 0


@dataclass(frozen=True)
class Marks:
    """Characters that a text has nowhere else. What stands on the two sides of `split` is encoded apart; the one
    character behind `literal` is plain text. They themselves are left out."""

    split: str
    literal: str

    def out_of(self, data: bytes) -> bytes:
        """Text, in UTF-8, without them."""
        return data.replace(self.split.encode(), b"").replace(self.literal.encode(), b"")

    def parts(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """What is encoded apart: offset in bytes, text, and whether it is literal."""
        offset = 0
        for broken in text.split(self.split):
            for number, part in enumerate(broken.split(self.literal)):
                offset += len(self.literal.encode()) * (number > 0)
                for piece, literal in ((part[: number > 0], True), (part[number > 0 :], False)):
                    if piece:
                        yield offset, piece, literal
                    offset += len(piece.encode())
            offset += len(self.split.encode())


@dataclass(frozen=True)
class Rendering:
    """A prompt in one model's tokens.

    The first `settled` of `ids` cannot change, whatever follows, and all control tokens are among them. `text`:
    the bytes behind those; the tokens of their end may change when more follows.
    """

    ids: list[int]
    settled: int
    text: bytes


class Vocabulary(TokenTable):
    """Ids for texts, beside bytes for ids. All its methods may be called from any thread.

    Raises `TokenizerNotUnderstood` for a file that is no tokenizer, or that no byte table can be made of.

    >>> vocabulary = Vocabulary(path.read_bytes())
    >>> vocabulary.spell(vocabulary.pieces("naïve".encode()).ids)
    b'na\\xc3\\xafve'
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        spec, library = spec_of.read(tokenizer_json)
        super().__init__(spec, library)
        self.sha256 = hashlib.sha256(tokenizer_json).hexdigest()
        # Whether a space is put in front of a text.
        self.dummy_prefix = spec_of.has_dummy_prefix(spec)
        self._variants = {
            (start, plain): spec_of.variant(spec, library, middle=not start, plain=plain)
            for start in ((True, False) if self.dummy_prefix else (False,))
            for plain in (True, False)
        }
        # Whether an added token is found in what a normalizer makes of a text, not in the text itself.
        normalized = {id_ for id_, token in self.added.items() if token.normalized}
        self.normalizes_added = bool(normalized) and spec_of.changes_characters(spec)
        # Added tokens behind which a text begins anew, and those whose neighbours must be looked at apart.
        each = self.added.keys() if spec_of.prefixes_words(spec) else self.added.keys() - normalized
        self._anew = set(each) if self.dummy_prefix else set()
        strips = {id_ for id_, token in self.added.items() if token.lstrip or token.rstrip}
        self._apart = self.control | self._anew | strips
        self._strip_behind = {id_ for id_, token in library.get_added_tokens_decoder().items() if token.rstrip}
        self.seams = Seams(spec, self, self.spell(self._encode("x", False, plain=True).ids) == b"x")
        self.prefixes = PrefixCache()

    @cached_property
    def controls(self) -> Spelled:
        """How the control tokens are written."""
        return Spelled(self.control_texts)

    def spans(self, text: str, wanted: Spelled) -> list[tuple[int, int]]:
        """Where `text` spells added tokens that are `wanted`: starts and ends, in characters, overlapping ones too."""
        spans = wanted.find(text)
        if self.normalizes_added:  # what only the library finds, and overlapping ones it does not
            encoding = self._encode(text, False, plain=False)
            spans |= {
                span
                for id_, span in zip(encoding.ids, encoding.offsets, strict=True)
                if id_ in self.added and self.added[id_].content in wanted.strings
            }
        return sorted(spans)

    def prompt(self, text: str, marks: Marks | None = None, *, framed: bool) -> Rendering:
        """The tokenizer's own encoding of a whole text; only what no earlier text began with is encoded.

        Control tokens in it are understood as such, unless it has `marks` that say otherwise. `framed`: with the
        control tokens in front that the tokenizer puts there.
        """
        data = text.encode()
        known = self.prefixes.find(data, str(marks).encode())
        tokens = self._marked(data, known.position, marks)
        if known.ids and not self.seams.follows(data, known.position, known.ids[-1], tokens.ids, known.after):
            known = known.forgotten()
            tokens = self._marked(data, 0, marks)
        settled = self.prefixes.keep(known, data, tokens, self.seams)
        # Behind the last control token there is text and nothing else, so it settles all before it.
        control = next((i + 1 for i in range(len(tokens.ids) - 1, -1, -1) if tokens.ids[i] in self.control), 0)
        settled = max(settled, control)
        rest = data[tokens.end(settled, known.position) :]
        frame = self.frame if framed else ()
        ids = [*frame, *known.ids, *tokens.ids]
        return Rendering(ids, len(ids) - len(tokens.ids) + settled, marks.out_of(rest) if marks else rest)

    def _marked(self, data: bytes, start: int, marks: Marks | None) -> Tokens:
        """Tokens of `data`, which is UTF-8, from `start` on."""
        tokens, text = Tokens(), data[start:].decode()
        for offset, part, literal in marks.parts(text) if marks else [(0, text, False)]:
            position = start + offset
            tokens.add(self._read(part, position == 0, plain=literal), position)
        return tokens

    def pieces(self, data: bytes | bytearray, *, whole: bool = False) -> Pieces:
        """Tokens for `data`, any bytes at all, as the middle of a text (`whole`: as its start).

        Control tokens written out in it are plain text. Bytes that are no UTF-8 become single-byte
        tokens where the vocabulary has them. Ends before a character whose last bytes are missing.
        """
        pieces, position = Pieces(), 0
        while position < len(data):
            text, bad = _valid_prefix(data[position:] if position else data)
            if text:
                pieces.add(self._read(text, whole and position == 0, plain=True), position)
                position += len(text.encode())
            if bad is None:
                break
            for byte in bad:
                position += 1
                if byte in self.byte_ids:
                    pieces.add(Tokens([self.byte_ids[byte]], [0], [True]), position)
                else:
                    pieces.exact = False
        pieces.consumed = position
        return pieces

    def _read(self, text: str, start: bool, *, plain: bool) -> Tokens:
        """Tokens of `text` as the tokenizer gives them; `plain`: none of them a control token."""
        encoding = self._encode(text, start, plain=plain)
        ids, words = encoding.ids, encoding.word_ids
        if plain and not self.control.isdisjoint(ids):
            return self._read_literally(text, start)
        if plain or (self._apart.isdisjoint(ids) and not (self.unknown_text and self.unknown_text in text)):
            return self._section(text, ids, words, start)
        # A text begins anew behind such a token, and is another one than that before it.
        tokens, position, first, character, dummy = Tokens(), 0, 0, 0, start
        for index, (id_, (begin, end)) in enumerate(zip(ids, encoding.offsets, strict=True)):
            spelled = id_ == self.unknown and self.unknown_text == text[begin:end]
            if id_ not in self._apart and not spelled:
                continue
            anew = id_ in self._anew or (spelled and self.dummy_prefix)
            if anew and not start:  # but not at its own beginning
                before = self._read(text[:begin], False, plain=False)
                before.add(self._read(text[begin:], True, plain=False), len(text[:begin].encode()))
                return before
            section = self._section(text[character:begin], ids[first:index], words[first:index], dummy)
            tokens.add(section, position)
            position += len(text[character:begin].encode())
            length = len(text[begin:end].encode())
            # Behind it a text is robbed of its white space, or begins with a space that it has not.
            tokens.add(Tokens([id_], [length], [not (anew or id_ in self._strip_behind)]), position)
            position += length
            first, character, dummy = index + 1, end, anew
        tokens.add(self._section(text[character:], ids[first:], words[first:], dummy), position)
        return tokens

    def _section(self, text: str, ids: list[int], words: list[int | None], start: bool) -> Tokens:
        """Where the tokens `ids` of `text`, without any control token, end. `start`: a space may be put in front."""
        raw = text.encode()
        spelled = [self._spelled[id_] for id_ in ids]
        said = b"".join(spelled)
        dummy = b" " if start and len(said) > len(raw) else b""
        if said == dummy + raw:
            ends = list(accumulate(map(len, spelled), initial=-len(dummy)))[1:]
            return Tokens(ids, ends, self.seams.of(ids, words))
        # A normalizer changed it, or something in it cannot be said, and the library's offsets are not always right
        # then. So seams are where the text, cut before a word, gives the same ids.
        cuts = [0]
        for match_ in _WORD_END.finditer(text):
            place = match_.start()
            if place - cuts[-1] >= _CHUNK_CHARACTERS and self.seams.lasting(text[place - 1], text[place]):
                cuts.append(place)
        seams: list[bool] = []
        ends, position, begin = [], 0, 0
        while begin < len(text):
            # Where a cut changes something, a longer chunk may not.
            for end in [*cuts[bisect_right(cuts, begin) :][:_CHUNK_TRIES], len(text)]:
                part = self._encode(text[begin:end], start and begin == 0, plain=True).ids
                if part == ids[len(ends) : len(ends) + len(part)] and (
                    end < len(text) or len(ends) + len(part) == len(ids)
                ):
                    break
            else:
                # Nothing says then that the last cut was right.
                if seams:
                    seams[-1] = False
                ends += [len(raw)] * (len(ids) - len(ends))
                seams += [False] * (len(ids) - len(seams))
                break
            position += len(text[begin:end].encode())
            if seams and part and part[0] == self.unknown:
                seams[-1] = False  # one unknown token looks like another
            ends += [position] * len(part)
            if part:
                seams += [False] * (len(part) - 1) + [part[-1] != self.unknown]
            begin = end
        return Tokens(ids, ends, seams, exact=False)

    def _read_literally(self, text: str, start: bool) -> Tokens:
        """For Unigram models, which have control tokens among their pieces and find them in any text.

        Each that is written there is cut in two, and what is a single character is said byte by byte.
        """
        places = {0, len(text)}
        for begin, end in self.spans(text, self.controls):
            places |= {begin, end} if end - begin == 1 else {begin + 1}
        tokens, position = Tokens(), 0
        for begin, end in pairwise(sorted(places)):
            raw = text[begin:end].encode()
            if self.control.isdisjoint(self._encode(text[begin:end], start and begin == 0, plain=True).ids):
                part = self._read(text[begin:end], start and begin == 0, plain=True)
            else:
                ids = [self.byte_ids[byte] for byte in raw if byte in self.byte_ids]
                part = Tokens(ids, [len(raw)] * len(ids), [False] * len(ids), exact=len(ids) == len(raw))
            tokens.add(part, position)
            position += len(raw)
        return tokens

    def _encode(self, text: str, start: bool, *, plain: bool) -> Encoding:
        tokenizer: Tokenizer = self._variants[start and self.dummy_prefix, plain]
        try:
            return tokenizer.encode(text) if len(text) < _LONG_TEXT else tokenizer.encode_batch([text])[0]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's, which is no Exception
                raise
            raise TokenizerNotUnderstood(
                f"the tokenizer broke down over a text ({error}): serve this model with another tokenizer.json",
                component="pre_tokenizer",
            ) from error

    def warm(self) -> None:
        """Computes now what the first use would."""
        self.seams.warm()
        _ = self.byte_ids, self.controls, self.frame


def _valid_prefix(data: bytes | bytearray) -> tuple[str, bytes | None]:
    """The text that `data` begins with, and the bytes behind it that are no UTF-8.

    None in their place: nothing more, or only the beginning of a character.
    """
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        text = data[: error.start].decode()
        if error.reason == "unexpected end of data":
            return text, None
        return text, bytes(data[error.start : error.end])
