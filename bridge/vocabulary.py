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
from bridge.errors import TokenizerNotUnderstood
from bridge.prefix_cache import Block, PrefixCache
from bridge.spelled import Spelled
from bridge.token_table import TokenTable

# A boundary between tokens is final once this many bytes stand behind it. Pre-tokenizers look
# ahead by a few characters (a contraction, a group of digits); runs that they look at whole are treated apart.
LOOKAHEAD = 32
# The library holds the interpreter's lock while it encodes one text, not while it encodes a batch.
_LONG_TEXT = 8192
# Where words end, and how long a chunk is at least that is tried by itself.
_WORD_END = re.compile(r"(?<=\S)(?=[ \t\n])|(?<=[。，、！？；：])(?=\w)")
_CHUNK_CHARACTERS = 24
# How far back a seam is looked for before a boundary inside a word is taken.
_NEAR_TOKENS = 48
# Pre-tokenizers that find their cuts by the characters there, wherever the text began.
_CUTTING_AS_THEY_GO = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}
# How many tokens behind a boundary are looked at again, and how near to the end of what was known they may change.
_AFTER = 8
_UNSURE = 12
_JOINS = 1 << 14
# Letters that patterns keep together: they tell only large ones from the others.
_LETTERS = ("Lo", "Lm", "Ll")


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
class Marks:
    """Characters that a text has nowhere else. What stands on the two sides of `split` is encoded apart; the one
    character behind `literal` is plain text. They themselves are left out."""

    split: str
    literal: str

    def out_of(self, text: str) -> str:
        """The text without them."""
        return text.replace(self.split, "").replace(self.literal, "")


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
        # Whether an added token is found in what a normalizer makes of a text, not in the text itself.
        self.normalizes_added = self._changes_characters and any(token.normalized for token in added)
        # Added tokens whose neighbours must be looked at apart from each other.
        words = self.dummy_prefix and spec_of.prefixes_words(spec)
        self._anew = {
            id_ for id_, token in self._added.items() if self.dummy_prefix and (words or not token.normalized)
        }
        strips = {id_ for id_, token in self._added.items() if token.lstrip or token.rstrip}
        self._apart = self.control | self._anew | strips
        # The unknown token is one of them where a text spells it, and only there.
        self._unknown_text = self.name(self.unknown) if self.unknown in self._all_added else ""
        # Added tokens that must stand alone, and those that a normalizer puts a space before as it does before a text:
        # where a text is cut decides which of them are found in it.
        prepends = any(part["type"] == "Prepend" for part in spec_of.components(spec.get("normalizer")))
        self._never_settles = any(token.single_word or (prepends and token.normalized) for token in added)
        self._merges = spec["model"].get("type", "BPE") == "BPE"
        # Whether a word can be cut: none of it is changed by standing by itself.
        kinds = {part["type"] for part in spec_of.components(spec.get("pre_tokenizer"))}
        self._cuts_words = self._merges and kinds <= _CUTTING_AS_THEY_GO and self.pieces(b"x").exact
        # A plain dictionary, each step of which threads may take at once.
        self._joins: dict[tuple[int, int], bool] = {}
        # Bytes that must stand behind a boundary: longer than any added token that a text may be about to spell.
        self.lookahead = max([LOOKAHEAD, *(len(token.content.encode()) for token in added)])
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
                if id_ in self._added and self._added[id_].content in wanted.strings
            }
        return sorted(spans)

    def cuttable(self, before: str, after: str) -> bool:
        """Whether a seam between these two characters stays one, whatever comes after `LOOKAHEAD` more.

        Not inside a run that pre-tokenizers look at whole, and not where a normalizer may join the two.
        """
        if not before or not after:
            return True  # a byte that is no part of a character
        if before.isspace() and after.isspace():
            return False
        if self._splits_by_context and _same_run(before, after):
            return False
        return not self._changes_characters or _stands_alone(before, after)

    def prompt(self, text: str, *, marks: Marks | None = None, plain: bool = False) -> EncodedPrompt:
        """The tokenizer's own encoding of a whole text; only what no earlier text began with is encoded.

        Control tokens in it are understood as such, unless `plain`, or the text has `marks` that say otherwise. The
        control tokens of `frame` are not added.
        """
        data = text.encode()
        salt = f"{plain} {marks}".encode()
        known = self.prefixes.find(data, salt)
        tokens = self._marked(data, known.position, marks, plain)
        if known.ids and not self.follows(data, known.position, known.ids[-1], tokens.ids, known.after):
            known = self.prefixes.nothing(data, salt)
            tokens = self._marked(data, 0, marks, plain)
        # What the tail of an earlier text settled is part of the first new block.
        behind = known.ids[known.token_count :]

        def block(first: int, begin: int, end: int, text: bytes = b"", before: Sequence[int] = ()) -> tuple[Block, int]:
            found = self.settled(data, tokens.ids, tokens.ends, tokens.seams, end - self.lookahead)
            count = max(found, first)
            ids = np.array([*before, *tokens.ids[first:count]], np.uint32)
            after = self.after(tokens.ids, tokens.ends, count, end)
            return Block(ids, begin, tokens.ends[count - 1] if count else known.position, after, text), count

        blocks: list[Block] = []
        done, begin, before = 0, known.start, behind
        for end in known.ends:
            new, done = block(done, begin, end, before=before)
            blocks.append(new)
            begin, before = new.settled, []
        tail, done = block(done, begin, len(data), data[known.last_end :], before)
        branch = None
        if known.branch_end is not None:
            text_of_branch = data[known.block_end : known.branch_end]
            branch, _ = block(0, known.start, known.branch_end, text_of_branch, behind)
        self.prefixes.keep(known, blocks, tail, branch)
        # Behind the last control token there is text and nothing else, so it settles all before it.
        control = next((i + 1 for i in range(len(tokens.ids) - 1, -1, -1) if tokens.ids[i] in self.control), 0)
        count = max(done, control)
        settled = tokens.ends[count - 1] if count else known.position
        known_count = len(known.ids)
        known.ids += tokens.ids
        return EncodedPrompt(known.ids, known_count + count, settled)

    def settled(
        self,
        data: bytes | bytearray,
        ids: Sequence[int],
        ends: Sequence[int],
        seams: Sequence[bool],
        limit: int,
        first: int = 0,
    ) -> int:
        """How many tokens of `data` are the same whatever comes behind `limit` and the `lookahead` after it.

        `ids[first:]` are the tokens. The last of them may have to be looked at again with what follows: see `joins`.
        """
        if self._never_settles:
            return 0
        count = bisect_right(ends, limit)
        # A space in front of the text is by itself no beginning that could be settled.
        least = bisect_right(ends, 0)
        near = range(count, max(count - _NEAR_TOKENS, least), -1)
        for found in near:
            if seams[found - 1] and self.cuttable(*_around(data, ends[found - 1])):
                return found
        for found in near if self._cuts_words else ():
            inside = _inside_word(*_around(data, ends[found - 1]), self._splits_by_context)
            if inside and first + found < len(ids) and self.joins(*ids[first + found - 1 : first + found + 1]):
                return found
        for found in range(count - len(near), least, -1):
            if seams[found - 1] and self.cuttable(*_around(data, ends[found - 1])):
                return found
        return 0

    def joins(self, left: int, right: int) -> bool:
        """Whether two tokens may stand side by side in a text.

        What is encoded apart may be put together where the two tokens that meet come out of their own bytes. In BPE
        a sequence is a text's encoding if and only if every two neighbours in it are (van Antwerpen and Neubeck, "So
        many tokens, so little time", 2024).
        """
        joins = self._joins.get((left, right))
        if joins is None:
            written = (self._whole.id_to_token(left) or "") + (self._whole.id_to_token(right) or "")
            joins = [token.id for token in self._whole.model.tokenize(written)] == [left, right]
            if len(self._joins) >= _JOINS:
                self._joins.clear()
            self._joins[left, right] = joins
        return joins

    def after(self, ids: Sequence[int], ends: Sequence[int], count: int, known: int, first: int = 0) -> tuple[int, ...]:
        """What stands behind the first `count` of `ids[first:]`, as far as `known` bytes decide it; see `follows`."""
        last = min(bisect_right(ends, known - _UNSURE), count + _AFTER)
        return tuple(ids[first + count : first + last])

    def follows(
        self, data: bytes | bytearray, position: int, last: int, ids: Sequence[int], after: Sequence[int]
    ) -> bool:
        """Whether `ids`, for what is behind `position`, may stand behind the token `last`, encoded without them.

        `after`: what stood there when `last` was settled, and must again.
        """
        if list(ids[: len(after)]) != list(after):
            return False
        before, next_ = _around(data, position)
        if not (ids and self._cuts_words and _inside_word(before, next_, self._splits_by_context)):
            return True
        return (not self._splits_by_context and self._separable(last, ids[0])) or self.joins(last, ids[0])

    def _marked(self, data: bytes, start: int, marks: Marks | None, plain: bool) -> _Tokens:
        """Tokens of `data`, which is UTF-8, from `start` on."""
        tokens, position = _Tokens(), start

        def read(text: str, *, literal: bool) -> None:
            nonlocal position
            tokens.add(self._read(text, position == 0, plain=literal), position)
            position += len(text.encode())

        text = data[start:].decode()
        if marks is None:
            read(text, literal=plain)
            return tokens
        for index, broken in enumerate(text.split(marks.split)):
            position += len(marks.split.encode()) * (index > 0)
            for number, part in enumerate(broken.split(marks.literal)):
                if number == 0:
                    read(part, literal=plain)
                else:
                    position += len(marks.literal.encode())
                    read(part[:1], literal=True)
                    read(part[1:], literal=plain)
        return tokens

    def pieces(self, data: bytes | bytearray, *, whole: bool = False) -> Pieces:
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
        if plain or (self._apart.isdisjoint(ids) and not (self._unknown_text and self._unknown_text in text)):
            return self._section(text, ids, words, start)
        # A text begins anew behind such a token, and is another one than that before it.
        tokens, position, first, character, dummy = _Tokens(), 0, 0, 0, start
        for index, (id_, (begin, end)) in enumerate(zip(ids, encoding.offsets, strict=True)):
            spelled = id_ == self.unknown and self._unknown_text == text[begin:end]
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
            tokens.add(_Tokens([id_], [length], [not (anew or self._all_added[id_].rstrip)]), position)
            position += length
            first, character, dummy = index + 1, end, anew
        tokens.add(self._section(text[character:], ids[first:], words[first:], dummy), position)
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
        seams: list[bool] = []
        ends, position, begin = [], 0, 0
        while begin < len(text):
            # Where a cut changes something, a longer chunk may not.
            for end in [*cuts[bisect_right(cuts, begin) :][:4], len(text)]:
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
        return _Tokens(ids, ends, seams, exact=False)

    def _read_literally(self, text: str, start: bool) -> _Tokens:
        """For Unigram models, which have control tokens among their pieces and find them in any text.

        Each that is written there is cut in two, and what is a single character is said byte by byte.
        """
        places = {0, len(text)}
        for begin, end in self.spans(text, self.controls):
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
        try:
            return tokenizer.encode(text) if len(text) < _LONG_TEXT else tokenizer.encode_batch([text])[0]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's, which is no Exception
                raise
            raise TokenizerNotUnderstood(
                f"the tokenizer broke down over a text ({error}): serve this model with another tokenizer.json",
                component="pre_tokenizer",
            ) from error

    def _seams(self, ids: list[int], words: list[int | None]) -> list[bool]:
        if self._splits_by_context or not self._merges:
            # The rest of a word, taken by itself, may be split in another way, or be another one of equal score.
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
        _ = self.byte_ids, self.controls, self.frame

    @cached_property
    def _neighbours(self) -> frozenset[int]:
        """Every two bytes that stand side by side inside some token."""
        found: set[int] = set()
        for data in self._spelled:
            found.update(a << 8 | b for a, b in pairwise(data))
        return frozenset(found)


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


def _around(data: bytes | bytearray, offset: int) -> tuple[str, str]:
    """The characters before and behind an offset, empty where there is none; spaces where it is inside of one."""
    if 0 < offset < len(data) and data[offset] & 0xC0 == 0x80:
        return " ", " "
    before = data[max(offset - 4, 0) : offset].decode(errors="ignore")
    after = data[offset : offset + 4].decode(errors="ignore")
    return before[-1:], after[:1]


def _inside_word(before: str, after: str, splits_by_context: bool) -> bool:
    """Whether a pre-tokenizer that keeps these two together keeps together what is on either side of a cut between."""
    if not before or not after or before.isspace() or after.isspace():
        return False
    if not splits_by_context:
        return True
    left, right = unicodedata.category(before), unicodedata.category(after)
    return left == right == "Lu" or (left in (*_LETTERS, "Mn", "Mc") and right in _LETTERS)


def _same_run(before: str, after: str) -> bool:
    """Two letters, or marks on them, or two digits."""
    kinds = {unicodedata.category(character)[0] for character in (before, after)}
    return kinds <= {"L", "M"} or kinds == {"N"}


def _stands_alone(before: str, after: str) -> bool:
    """Whether no Unicode normalization joins or reorders the two."""
    extends = unicodedata.combining(after) != 0 or unicodedata.category(after) in ("Mn", "Mc", "Me", "Cf")
    return not extends and unicodedata.is_normalized("NFC", before + after)
