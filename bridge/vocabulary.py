"""A tokenizer, understood down to bytes: what its ids stand for, and what ids a text is.

Texts come in pieces, and what was encoded before is not encoded again. So every encoding tells its seams: the
boundaries between tokens over which nothing that stands on one side has any part in how the other is encoded.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer

from bridge import tokenizer_json as spec_of
from bridge.prefix_cache import Block, PrefixCache
from bridge.token_table import TokenTable

# A boundary between tokens is final once this many bytes stand behind it. Pre-tokenizers look
# ahead by a few characters (a contraction, a group of digits); runs that they look at whole are treated apart.
LOOKAHEAD = 32
# The library holds the interpreter's lock while it encodes one text, not while it encodes a batch.
_LONG_TEXT = 8192
# Where words end, and how long a chunk is at least that is tried by itself.
_WORD_END = re.compile(r"(?<=\S)(?=[ \t\n])")
_CHUNK_CHARACTERS = 24


@dataclass(frozen=True)
class Pieces:
    """Consecutive tokens for `consumed` bytes of what was encoded.

    `ends[i]`: offset in it, in bytes, behind token i. `seams[i]`: what stands on the two sides of the end of
    token i has no part in how the other is encoded. `exact`: the tokens' bytes are exactly those given.
    """

    ids: list[int]
    ends: list[int]
    seams: list[bool]
    consumed: int
    exact: bool


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's ids. The first `settled_token_count` of them, for the first `settled` bytes, are the same
    whatever follows; no control token is behind them."""

    ids: list[int]
    settled_token_count: int
    settled: int


@dataclass
class _Tokens:
    """Tokens of consecutive texts; `ends` and `seams` as those of `Pieces`."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    seams: list[bool] = field(default_factory=list)
    exact: bool = True

    def add(self, more: "_Tokens", position: int) -> None:
        """Appends the tokens of a text that begins at `position`."""
        self.ids += more.ids
        self.ends += [position + end for end in more.ends] if position else more.ends
        self.seams += more.seams
        self.exact &= more.exact


class Vocabulary(TokenTable):
    """Ids for texts, beside bytes for ids. All its methods may be called from any thread.

    >>> vocabulary = Vocabulary(path.read_bytes())
    >>> vocabulary.spell(vocabulary.pieces("naïve".encode()).ids)
    b'na\\xc3\\xafve'
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        super().__init__(tokenizer_json)
        spec, self._spec = self._spec, {}  # as large as the file, and not needed any more
        # Whether a space is put in front of a text.
        self.dummy_prefix = spec_of.has_dummy_prefix(spec)
        self._splits_by_context = spec_of.splits_by_context(spec)
        self._changes_characters = spec_of.changes_characters(spec)
        self._variants = {
            (start, plain): spec_of.variant(spec, self._whole, middle=not start, plain=plain)
            for start in ((True, False) if self.dummy_prefix else (False,))
            for plain in (True, False)
        }
        added = self._added.values()
        # Whether a control token is found in what a normalizer makes of a text, not in the text itself.
        self.normalizes_controls = spec.get("normalizer") is not None and any(
            token.special and token.normalized for token in added
        )
        self._single_words = any(token.single_word for token in added)
        # Added tokens whose neighbours must be looked at apart from each other.
        self._apart = self.control | {
            id_ for id_, token in self._added.items() if self.dummy_prefix or token.lstrip or token.rstrip
        }
        # Longer than any added token that a text may be about to spell.
        self._lookahead = max([LOOKAHEAD, *(len(token.content.encode()) for token in added)])
        self.prefixes = PrefixCache()

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where `text` spells a control token: starts and ends, in characters, overlapping ones too."""
        starts, lengths = self._control_shapes
        spans = {
            (start, start + length)
            for match_ in starts.finditer(text)
            for start in [match_.start()]
            for length in lengths
            if text[start : start + length] in self.control_texts
        }
        if self.normalizes_controls:  # what only the library finds, and overlapping ones it does not
            encoding = self._encode(text, False, plain=False)
            spans |= {span for id_, span in zip(encoding.ids, encoding.offsets, strict=True) if id_ in self.control}
        return sorted(spans)

    @cached_property
    def _control_shapes(self) -> tuple[re.Pattern[str], list[int]]:
        """What the control tokens begin with, and how long they are: thousands of them in one alternation are slow."""
        firsts = "".join(sorted({re.escape(text[0]) for text in self.control_texts}))
        return re.compile(f"[{firsts}]" if firsts else r"(?!)"), sorted({len(text) for text in self.control_texts})

    def cuttable(self, before: str, after: str) -> bool:
        """Whether a seam between these two characters stays one, whatever comes after `LOOKAHEAD` more.

        Not inside a run that pre-tokenizers look at whole, and not where a normalizer may join the two.
        """
        if not before or not after:
            return True  # a byte that is no part of a character
        if before.isspace() and after.isspace():
            return False
        if self._single_words and not after.isspace():
            return False  # an added token that must stand alone looks at what is before it
        if self._splits_by_context and _in_word(before) and _in_word(after):
            return False
        return not self._changes_characters or _stands_alone(before, after)

    def prompt(self, text: str, *, mark: str = "", plain: bool = False) -> EncodedPrompt:
        """The tokenizer's own encoding of a whole text; only what no earlier text began with is encoded.

        Control tokens in it are understood as such, unless `plain`. What stands on the two sides of a `mark`
        is encoded apart, and the mark itself left out; behind two marks in a row all is plain up to the next.
        The control tokens of `frame` are not added.
        """
        data = text.encode()
        known = self.prefixes.find(data, f"{plain} {mark}".encode())
        tokens = self._marked(data, known.position, mark, plain)
        # What the tail of an earlier text settled is part of the first new block.
        behind = known.ids[known.token_count :]

        def block(start: int, end: int, text: bytes = b"", before: Sequence[int] = ()) -> tuple[Block, int]:
            count = max(self.settled(data, tokens.ends, tokens.seams, end - self._lookahead), start)
            ids = np.array([*before, *tokens.ids[start:count]], np.uint32)
            return Block(ids, tokens.ends[count - 1] if count else known.position, text), count

        blocks: list[Block] = []
        done, before = 0, behind
        for end in known.ends:
            new, done = block(done, end, before=before)
            blocks.append(new)
            before = []
        tail, done = block(done, len(data), data[known.last_end :], before)
        branch = None
        if known.branch_end is not None:
            branch, _ = block(0, known.branch_end, data[known.block_end : known.branch_end], behind)
        self.prefixes.keep(known, blocks, tail, branch)
        # Behind the last control token there is text and nothing else, so it settles all before it.
        control = next((i + 1 for i in range(len(tokens.ids) - 1, -1, -1) if tokens.ids[i] in self.control), 0)
        count = max(done, control)
        settled = tokens.ends[count - 1] if count else known.position
        known_count = len(known.ids)
        known.ids += tokens.ids
        return EncodedPrompt(known.ids, known_count + count, settled)

    def settled(self, data: bytes | bytearray, ends: Sequence[int], seams: Sequence[bool], limit: int) -> int:
        """How many tokens of `data` are the same whatever comes behind `limit` and the `LOOKAHEAD` after it."""
        count = min(bisect_right(ends, limit), len(seams))
        while count > 0:
            end = ends[count - 1]
            if end > 0 and seams[count - 1] and data[end] & 0xC0 != 0x80:
                before = data[max(end - 4, 0) : end].decode(errors="ignore")
                after = data[end : end + 4].decode(errors="ignore")
                if self.cuttable(before[-1:], after[:1]):
                    break
            count -= 1
        return count

    def _marked(self, data: bytes, start: int, mark: str, plain: bool) -> _Tokens:
        """Tokens of `data`, which is UTF-8, from `start` on."""
        tokens, position, literal = _Tokens(), start, plain
        text = data[start:].decode()
        for index, segment in enumerate(text.split(mark) if mark else [text]):
            tokens.add(self._read(segment, position == 0, plain=literal), position)
            position += len(segment.encode()) + len(mark.encode())
            # Nothing between two marks; before the first there is only the beginning.
            literal = plain or (not segment and index > 0)
        return tokens

    def pieces(self, data: bytes, *, whole: bool = False) -> Pieces:
        """Tokens for `data`, any bytes at all, as the middle of a text (`whole`: as its start).

        Control tokens written out in it are plain text. Bytes that are no UTF-8 become single-byte
        tokens where the vocabulary has them. Ends before a character whose last bytes are missing.
        """
        tokens, position = _Tokens(), 0
        while position < len(data):
            text, bad = _valid_prefix(data[position:] if position else data)
            if text:
                tokens.add(self._read(text, whole and position == 0, plain=True), position)
                position += len(text.encode())
            if bad is None:
                break
            for byte in bad:
                position += 1
                if byte in self.byte_ids:
                    tokens.add(_Tokens([self.byte_ids[byte]], [0], [True]), position)
                else:
                    tokens.exact = False
        return Pieces(tokens.ids, tokens.ends, tokens.seams, position, tokens.exact)

    def _read(self, text: str, start: bool, *, plain: bool) -> _Tokens:
        """Tokens of `text` as the tokenizer gives them; `plain`: none of them a control token."""
        encoding = self._encode(text, start, plain=plain)
        ids, words = encoding.ids, encoding.word_ids
        if plain and not self.control.isdisjoint(ids):
            return self._read_literally(text, start)
        if plain or self._apart.isdisjoint(ids):
            return self._section(text, ids, words, start)
        # A text begins anew behind such a token, and is another one than that before it.
        tokens, position, first, character = _Tokens(), 0, 0, 0
        for index, (id_, (begin, end)) in enumerate(zip(ids, encoding.offsets, strict=True)):
            if id_ not in self._apart:
                continue
            if not start and self.dummy_prefix:  # but not at its own beginning
                before = self._read(text[:begin], False, plain=False)
                before.add(self._read(text[begin:], True, plain=False), len(text[:begin].encode()))
                return before
            section = self._section(text[character:begin], ids[first:index], words[first:index], self.dummy_prefix)
            tokens.add(section, position)
            position += len(text[character:begin].encode())
            length = len(text[begin:end].encode())
            # Behind it a text is robbed of its white space, or begins with a space that it has not.
            tokens.add(_Tokens([id_], [length], [not (self.dummy_prefix or self._added[id_].rstrip)]), position)
            position += length
            first, character = index + 1, end
        tokens.add(self._section(text[character:], ids[first:], words[first:], self.dummy_prefix), position)
        return tokens

    def _section(self, text: str, ids: list[int], words: list[int | None], start: bool) -> _Tokens:
        """Where the tokens `ids` of `text`, without any control token, end. `start`: a space may be put in front."""
        raw = text.encode()
        spelled = [self._spelled[id_] for id_ in ids]
        said = b"".join(spelled)
        dummy = b" " if start and len(said) > len(raw) else b""
        if said == dummy + raw:
            ends = list(accumulate(map(len, spelled), initial=-len(dummy)))[1:]
            return _Tokens(ids, ends, self._seams(ids, words))
        # A normalizer changed it, or something in it cannot be said, and the library's offsets are not always right
        # then. So seams are where the text, cut before a word, gives the same ids.
        cuts = [0]
        for match_ in _WORD_END.finditer(text):
            place = match_.start()
            if place - cuts[-1] >= _CHUNK_CHARACTERS and self.cuttable(text[place - 1], text[place]):
                cuts.append(place)
        ends, seams, position = [], [], 0
        for begin, end in pairwise([*cuts, len(text)]):
            position += len(text[begin:end].encode())
            part = self._encode(text[begin:end], start and begin == 0, plain=True).ids
            if part != ids[len(ends) : len(ends) + len(part)]:
                break
            ends += [position] * len(part)
            seams += [False] * (len(part) - 1) + [True] * bool(part)
        if len(ends) < len(ids):
            ends, seams = [len(raw)] * len(ids), [False] * len(ids)
        return _Tokens(ids, ends, seams, exact=False)

    def _read_literally(self, text: str, start: bool) -> _Tokens:
        """For Unigram models, which have control tokens among their pieces and find them in any text.

        Each that is written there is cut in two, and what is a single character is said byte by byte.
        """
        places = {0, len(text)}
        for begin, end in self.control_spans(text):
            places |= {begin, end} if end - begin == 1 else {begin + 1}
        tokens, position = _Tokens(), 0
        for begin, end in pairwise(sorted(places)):
            raw = text[begin:end].encode()
            if self.control.isdisjoint(self._encode(text[begin:end], start and begin == 0, plain=True).ids):
                part = self._read(text[begin:end], start and begin == 0, plain=True)
            else:
                ids = [self.byte_ids[byte] for byte in raw if byte in self.byte_ids]
                part = _Tokens(ids, [len(raw)] * len(ids), [False] * len(ids), exact=len(ids) == len(raw))
            tokens.add(part, position)
            position += len(raw)
        return tokens

    def _encode(self, text: str, start: bool, *, plain: bool) -> Encoding:
        tokenizer: Tokenizer = self._variants[start and self.dummy_prefix, plain]
        return tokenizer.encode(text) if len(text) < _LONG_TEXT else tokenizer.encode_batch([text])[0]

    def _seams(self, ids: list[int], words: list[int | None]) -> list[bool]:
        if self._splits_by_context:
            # The rest of a word, taken by itself, may be split in another way.
            seams = [left != right for left, right in pairwise(words)]
        else:
            pairs = zip(pairwise(words), pairwise(ids), strict=True)
            seams = [a != b or self._separable(left, right) for (a, b), (left, right) in pairs]
        if None in words:  # added tokens are no words
            seams = [seam or words[i] is None or words[i + 1] is None for i, seam in enumerate(seams)]
        return [*seams, True] if ids else []

    def _separable(self, left: int, right: int) -> bool:
        """Inside a word: no token holds the bytes that meet here side by side, so the two never become one."""
        if self.unknown in (left, right):
            return False  # unknown characters in a row can be one token
        before, after = self._spelled[left], self._spelled[right]
        return not before or not after or (before[-1] << 8 | after[0]) not in self._neighbours

    def warm(self) -> None:
        """Computes now what the first use would."""
        if not self._splits_by_context:
            _ = self._neighbours
        _ = self.byte_ids, self._control_shapes, self.frame

    @cached_property
    def _neighbours(self) -> frozenset[int]:
        """Every two bytes that stand side by side inside some token."""
        found: set[int] = set()
        for data in self._spelled:
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


def _in_word(character: str) -> bool:
    """A letter, a digit, or a mark on one."""
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _stands_alone(before: str, after: str) -> bool:
    """Whether no Unicode normalization joins or reorders the two."""
    extends = unicodedata.combining(after) != 0 or unicodedata.category(after) in ("Mn", "Mc", "Me", "Cf")
    return not extends and unicodedata.is_normalized("NFC", before + after)
