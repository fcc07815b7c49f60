"""Encodes and decodes with a model's tokenizer.

Text arrives in pieces, and parts that were encoded before are not encoded again: see `seams` and `prefix_cache`.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tokenizers import Encoding, Tokenizer

from bridge.errors import TokenizerNotUnderstood
from bridge.text import tokenizer_json
from bridge.text.prefix_cache import PrefixCache
from bridge.text.seams import Boundary, Seams, Tokens
from bridge.text.string_matcher import StringMatcher
from bridge.text.token_table import TokenTable

# A text of many tokens has more than one in this many bytes, unless it was written to have fewer.
_MAX_USUAL_TOKEN_BYTES = 8
# From this length, a text is encoded as a batch of one, for which the library releases the interpreter's lock.
_MIN_BATCH_CHARACTERS = 8192
_WORD_END = re.compile(r"(?<=\S)(?=[ \t\n])|(?<=[。，、！？；：])(?=\w)")
# The smallest chunk of a changed text that is encoded separately, and the number of ends that are tried for it.
_MIN_CHUNK_CHARACTERS = 24
_MAX_CHUNK_TRIES = 4


@dataclass(frozen=True)
class Marks:
    """Two characters that a text contains only as marks, which are not encoded.

    The text before and after `split` is encoded separately. The character after `literal` is text, not a control token.
    """

    split: str
    literal: str

    def out_of(self, data: bytes) -> bytes:
        """Returns UTF-8 text without the marks."""
        return data.replace(self.split.encode(), b"").replace(self.literal.encode(), b"")

    def parts(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """Yields the parts to encode separately: their offset in bytes, their text, and whether it is literal."""
        offset = 0
        for piece in re.split(f"({self.split}|{self.literal}[^{self.split}{self.literal}]?)", text):
            literal = piece.startswith(self.literal)
            part = piece[1:] if literal or piece == self.split else piece
            end = offset + len(piece.encode())
            if part:
                yield end - len(part.encode()), part, literal
            offset = end


@dataclass(frozen=True)
class Rendering:
    """A prompt in one model's tokens.

    The first `settled` of `ids` remain the same whatever follows, and include all control tokens. `text` holds the
    bytes of the others, which may change when more text follows.
    """

    ids: list[int]
    settled: int
    text: bytes


class Vocabulary(TokenTable):
    """Encodes texts, in addition to what a `TokenTable` does. It is thread-safe.

    Raises `TokenizerNotUnderstood` for a file that is not a tokenizer, or whose ids do not stand for fixed bytes.

    >>> vocabulary = Vocabulary(path.read_bytes())
    >>> vocabulary.spell(vocabulary.pieces("naïve".encode()).ids)
    b'na\\xc3\\xafve'
    """

    def __init__(self, content: bytes) -> None:
        spec, library = tokenizer_json.read(content)
        super().__init__(spec, library)
        self.sha256 = hashlib.sha256(content).hexdigest()
        prefixes_words = tokenizer_json.prefixes_text(spec, "pre_tokenizer")
        # Whether the tokenizer puts a dummy space in front of a text.
        self.dummy_prefix = prefixes_words or tokenizer_json.prefixes_text(spec, "normalizer")
        self._variants = {
            (start, plain): tokenizer_json.variant(spec, library, middle=not start, plain=plain)
            for start in {self.dummy_prefix, False}
            for plain in (True, False)
        }
        # Whether some added tokens are found only in normalized text.
        normalized = {id_ for id_, token in self.added.items() if token.normalized}
        self.normalizes_added = bool(normalized) and tokenizer_json.changes_characters(spec)
        # Added tokens after which text is encoded like the start of a text, and those after which white space is lost.
        restarting = set(self.added if prefixes_words else self.added.keys() - normalized)
        self._restarting = restarting if self.dummy_prefix else set()
        self._stripping = {id_ for id_, token in library.get_added_tokens_decoder().items() if token.rstrip}
        # The added tokens that divide a text into sections.
        trimming = {id_ for id_, token in self.added.items() if token.lstrip or token.rstrip}
        self._dividing = self.control | self._restarting | trimming
        adds_to_words = self.spell(self._encode("x", False, plain=True).ids) != b"x"
        self.seams = Seams(spec, self, adds_to_words)
        self.prefixes = PrefixCache()

    def spans(self, text: str, wanted: StringMatcher) -> list[tuple[int, int]]:
        """Returns the starts and ends, in characters, of the `wanted` tokens that `text` spells. They may overlap."""
        spans = wanted.find(text)
        if self.normalizes_added:  # the library also finds tokens in normalized text, but none that overlap
            encoding = self._encode(text, False, plain=False)
            spans |= {
                span
                for id_, span in zip(encoding.ids, encoding.offsets, strict=True)
                if id_ in self.added and self.added[id_].content in wanted.strings
            }
        return sorted(spans)

    def prompt(
        self, text: str, marks: Marks | None = None, *, framed: bool, max_kept_tokens: int | None = None
    ) -> Rendering:
        """Returns the tokenizer's own encoding of a whole text, and reuses that of earlier texts that began alike.

        Control tokens in the text are recognised, except where `marks` prevent it. `framed`: with the control tokens
        that the tokenizer puts in front. An encoding of more than `max_kept_tokens` is not kept for later texts.
        """
        data, salt = text.encode(), str(marks).encode()
        known, common = self.prefixes.find(data, salt)
        count, tokens = self.seams.reuse(data, known, common, lambda start: self._marked(data, start, marks))
        if max_kept_tokens is None or count + len(tokens.ids) <= max_kept_tokens:
            self.prefixes.keep(data, salt, known, count, tokens)
        rest = data[known.end(count) :]
        # All control tokens count as settled, and so does everything before the last one.
        controls = (i + 1 for i in range(len(tokens.ids) - 1, -1, -1) if tokens.ids[i] in self.control)
        after_control = next(controls, 0)
        settled = max(self.seams.settled(rest, tokens, len(rest)), after_control)
        # Inside a word, the rest may be other tokens if encoded separately: "'ree" is the words "'re" and "e", not "'r"
        # and "ee".
        in_word = settled > after_control and tokens.boundaries[settled - 1] == Boundary.IN_WORD
        if in_word and self._marked(rest, tokens.end(settled), marks).ids != tokens.ids[settled:]:
            settled = after_control
        rest = rest[tokens.end(settled) :]
        head = [*(self.frame if framed else ()), *known.ids[:count]]
        return Rendering([*head, *tokens.ids], len(head) + settled, marks.out_of(rest) if marks else rest)

    def min_count(self, text: str, marks: Marks | None, enough: int) -> int:
        """Returns a lower bound of the number of a text's tokens if it is at least `enough`, otherwise 0.

        It encodes a beginning in which ordinary text has `enough` tokens, and twice as much while that has fewer, so a
        text with far too many tokens costs little more than one with `enough`.
        """
        data, size = text.encode(), _MAX_USUAL_TOKEN_BYTES * enough
        while size < len(data) and not self.seams.never_final:
            part = data[:size].decode(errors="ignore").encode()  # without a part of a character
            tokens = self._marked(part, 0, marks)
            settled = self.seams.settled(part, tokens, len(part))
            if settled >= enough:
                return settled
            size *= 2
        return 0

    def _marked(self, data: bytes, start: int, marks: Marks | None) -> Tokens:
        """Returns the tokens of the UTF-8 text `data` from the offset `start`."""
        tokens, text = Tokens(), data[start:].decode()
        for offset, part, literal in marks.parts(text) if marks else [(0, text, False)]:
            tokens.consumed = offset
            tokens.add(self._read(part, start + offset == 0, plain=literal))
        return tokens

    def pieces(self, data: bytes | bytearray, *, whole: bool = False) -> Tokens:
        """Returns the tokens of any bytes, encoded as the middle of a text, or as a whole text if `whole`.

        Written control tokens are plain text. Bytes that are not UTF-8 become single-byte tokens if the vocabulary has
        these. An incomplete character at the end is not consumed.
        """
        tokens = Tokens()
        while tokens.consumed < len(data):
            rest = data[tokens.consumed :] if tokens.consumed else data
            try:
                text, invalid = rest.decode(), b""
            except UnicodeDecodeError as error:
                text, invalid = rest[: error.start].decode(), bytes(rest[error.start : error.end])
                if error.reason == "unexpected end of data":  # more bytes may complete the character
                    invalid = b""
            if text:
                tokens.add(self._read(text, whole and not tokens.consumed, plain=True))
            if not invalid:
                break
            tokens.add(self.single_bytes(invalid, Boundary.SEAM))
        return tokens

    def ids_of(self, data: bytes) -> list[int] | None:
        """Returns the ids of `pieces(data)` if they spell exactly these bytes, in less time; otherwise None."""
        try:
            ids = self._encode(data.decode(), False, plain=True).ids
        except UnicodeDecodeError:
            return None
        return ids if self.control.isdisjoint(ids) and self.spell(ids) == data else None

    def single_bytes(self, data: bytes | bytearray, boundary: Boundary = Boundary.CLOSED) -> Tokens:
        """Returns a token for each byte that has a single-byte token, and skips the other bytes."""
        found = [(self.byte_ids[byte], end) for end, byte in enumerate(data, start=1) if byte in self.byte_ids]
        return Tokens([id_ for id_, _ in found], [end for _, end in found], [boundary] * len(found), len(data))

    def _read(self, text: str, start: bool, *, plain: bool) -> Tokens:
        """Returns the tokenizer's tokens for `text`; without control tokens if `plain`.

        `start`: it is encoded as the start of a text, perhaps with a dummy space in front.
        """
        encoding = self._encode(text, start, plain=plain)
        ids, words = encoding.ids, encoding.word_ids
        if plain and not self.control.isdisjoint(ids):
            return self._read_literally(text, start)
        if plain or (self._dividing.isdisjoint(ids) and not (self.unknown_text and self.unknown_text in text)):
            return self._section(text, ids, words, start)
        tokens, first, character, prefixed = Tokens(), 0, 0, start
        for index, (id_, (begin, end)) in enumerate(zip(ids, encoding.offsets, strict=True)):
            unknown = id_ == self.unknown and self.unknown_text == text[begin:end]
            if id_ not in self._dividing and not unknown:
                continue
            restarts = id_ in self._restarting or (unknown and self.dummy_prefix)
            if restarts and not start:  # the following text needs the other variant of the tokenizer
                tokens = self._read(text[:begin], False, plain=False)
                tokens.add(self._read(text[begin:], True, plain=False))
                return tokens
            tokens.add(self._section(text[character:begin], ids[first:index], words[first:index], prefixed))
            # Text after such a token loses white space, or gains a space, only because of the token.
            boundary = Boundary.CLOSED if restarts or id_ in self._stripping else Boundary.SEAM
            length = len(text[begin:end].encode())
            tokens.add(Tokens([id_], [length], [boundary], length))
            first, character, prefixed = index + 1, end, restarts
        tokens.add(self._section(text[character:], ids[first:], words[first:], prefixed))
        return tokens

    def _section(self, text: str, ids: list[int], words: list[int | None], start: bool) -> Tokens:
        """Returns `ids` as the tokens of a text without dividing tokens. `start`: it may begin with a dummy space."""
        raw = text.encode()
        spelled = [self.tokens[id_] for id_ in ids]
        written = b"".join(spelled)
        dummy = b" " if start and len(written) > len(raw) else b""
        if written != dummy + raw:
            return self._changed_section(text, ids, start)
        ends = list(accumulate(map(len, spelled), initial=-len(dummy)))[1:]
        seam, in_word = Boundary.SEAM, Boundary.IN_WORD
        # An added token has no word, so there is a seam after it.
        boundaries: list[int] = [seam if a != b or a is None else in_word for a, b in pairwise([*words, None])]
        return Tokens(ids, ends, boundaries, len(raw))

    def _changed_section(self, text: str, ids: list[int], start: bool) -> Tokens:
        """Returns `ids` as the tokens of a text that a normalizer changed, or of which the vocabulary lacks a part.

        The library's offsets are not always right then, so a seam is a word end at which a cut gives the same ids.
        """
        cuts = [0]
        for match_ in _WORD_END.finditer(text):
            place = match_.start()
            if place - cuts[-1] >= _MIN_CHUNK_CHARACTERS and self.seams.lasts(text[place - 1], text[place]):
                cuts.append(place)
        tokens, begin = Tokens(), 0
        while begin < len(text):
            done = len(tokens.ids)
            # If a cut changes the ids, a later one may not.
            for end in [*cuts[bisect_right(cuts, begin) :][:_MAX_CHUNK_TRIES], len(text)]:
                part = self._encode(text[begin:end], start and begin == 0, plain=True).ids
                same = part == ids[done : done + len(part)] and (end < len(text) or done + len(part) == len(ids))
                if same:
                    break
            else:
                part = ids[done:]
            # All unknown tokens have the same id, so next to one equal ids prove nothing.
            if tokens.ids and (not same or part[:1] == [self.unknown]):
                tokens.boundaries[-1] = Boundary.CLOSED
            boundaries: list[int] = [Boundary.CLOSED] * len(part)
            if same and part and part[-1] != self.unknown:
                boundaries[-1] = Boundary.SEAM
            length = len(text[begin:end].encode())
            tokens.add(Tokens(part, [length] * len(part), boundaries, length))
            begin = end
        return tokens

    def _read_literally(self, text: str, start: bool) -> Tokens:
        """Returns the tokens of a text in which the model itself finds control tokens, as Unigram models do.

        The text is cut after the first character of each. A control token of one character becomes single-byte tokens.
        """
        places = {0, len(text)}
        for begin, end in self.spans(text, self.controls):
            places |= {begin, end} if end - begin == 1 else {begin + 1}
        tokens = Tokens()
        for begin, end in pairwise(sorted(places)):
            part, at_start = text[begin:end], start and begin == 0
            if self.control.isdisjoint(self._encode(part, at_start, plain=True).ids):
                tokens.add(self._read(part, at_start, plain=True))
            else:
                tokens.add(self.single_bytes(part.encode()))
        return tokens

    def _encode(self, text: str, start: bool, *, plain: bool) -> Encoding:
        tokenizer: Tokenizer = self._variants[start and self.dummy_prefix, plain]
        try:
            return tokenizer.encode(text) if len(text) < _MIN_BATCH_CHARACTERS else tokenizer.encode_batch([text])[0]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's panics are not an Exception
                raise
            raise TokenizerNotUnderstood(
                f"the tokenizer crashed while encoding a text ({error}): serve this model with another tokenizer.json",
                component="pre_tokenizer",
            ) from error
