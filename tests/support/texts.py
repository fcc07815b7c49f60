"""Hypothesis strategies for texts that are hard for tokenizers."""

from itertools import pairwise

from hypothesis import strategies as st

from tests.support.tiny import CORPUS, SPECIALS

# Texts that have revealed errors: runs that a pattern matches as a whole, characters that a normalizer joins or
# reorders, white space of other scripts, characters of several code points, characters of several bytes.
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\x85", "\u00a0", "\u2028", "\u3000", "\u3000\u3000"]
CONTROLS = ["\x00", "\x1b", "\x7f", "\u202e", "\u200b", "\u200d", "\ufdd0", "\ufffd", "\ufeff"]
NUMBERS = ["0, ", "1", "1234567", "٣٤", "½", "²"]
LETTERS = ["a", "A", "AB", "Ab", "aB", "ß", "ſ", "İ", "ﬁ", "Å", "K", "_x", "中A", "かな", "カナ", "東京", "한", "가"]
MARKS = ["é", "e\u0301", "\u0301", "q\u0323\u0307", "q\u0307\u0323", "\u1100\u1161", "\u1161\u11a8", "ก็", "क्षि"]
RIGHT_TO_LEFT = ["שלום", "\u05d0\u05b8", "مرحبا"]
SYMBOLS = ["🎉", "👩‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "。", "、", "|---", "...", " ...", "--", "! ", "?!", "/", "\\"]
CONTRACTIONS = ["'", "'re", "'S", "''", "``", "n't", " the", " and"]
WRITTEN = ["▁", "Ġ", "##a", "</w>", "<0x41>", " fox jumps", "<think>", "é🎉"]
HARD = [*SPACES, *CONTROLS, *NUMBERS, *LETTERS, *MARKS, *RIGHT_TO_LEFT, *SYMBOLS, *CONTRACTIONS, *WRITTEN]
PIECES = st.one_of(
    st.sampled_from([word for text in CORPUS for word in text.split(" ")]).map(lambda word: " " + word),
    st.sampled_from(HARD),
    st.sampled_from(HARD),
    st.text(max_size=5),
    st.tuples(st.sampled_from(HARD), st.integers(2, 60)).map(lambda pair: pair[0] * pair[1]),
)
TEXTS = st.lists(PIECES, max_size=40).map("".join)
# Texts that also contain control tokens and other added tokens of any family.
MARKUP = [*SPECIALS, "<unk>", "<mask>", "<|end|>", "<|im end|>", "[INST]", "<think>", "</think>", "<s>", "<|im_start|>"]
MARKED_TEXTS = st.lists(st.one_of(PIECES, PIECES, st.sampled_from(MARKUP)), max_size=40).map("".join)
PLACES = st.lists(st.integers(0, 100_000), max_size=30)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cuts `data` into pieces at any byte offsets."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]
