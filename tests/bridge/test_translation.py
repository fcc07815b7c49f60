"""Tests both directions of translation against encoding the whole text again."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bridge.text.seams import Tokens
from bridge.text.translation import DraftContext, candidates, translate
from bridge.text.vocabulary import Rendering, Vocabulary
from tests.support.tiny import CORPUS, EXACT_KINDS, KINDS, model, own_ids, tokenizer_json, vocabulary

# Pieces of the texts that the tokenizers know, characters that they do not, and periodic text.
PIECES = st.one_of(
    st.sampled_from([word for text in CORPUS for word in text.split(" ")]).map(lambda word: " " + word),
    st.sampled_from([" ", "\n", "\n\n", "    ", "0, ", "|---", "a", "'", "'re", "1", "🎉", "é", "e\u0301", "한", "."]),
    st.text(max_size=5),
)
TEXTS = st.lists(PIECES, max_size=60).map("".join)


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(prompt=TEXTS, text=TEXTS, places=st.lists(st.integers(0, 10_000), max_size=30))
def test_feeding_in_pieces_gives_the_ids_of_the_whole(kind: str, prompt: str, text: str, places: list[int]) -> None:
    words = vocabulary(kind)
    prompt = prompt or "x"  # a request without any text is refused
    context = DraftContext(words, words.prompt(prompt, framed=True))
    data = text.encode()
    for piece in _cut(data, places):
        context.append(piece)
    expected = DraftContext(words, words.prompt(prompt + text, framed=True)).ids
    assert context.ids == expected
    assert context.byte_offset == len(data)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(text=TEXTS)
def test_a_prompt_has_the_ids_that_its_tokenizer_gives(kind: str, text: str) -> None:
    words = vocabulary(kind)
    assert list(words.prompt(text, framed=True).ids) == own_ids(kind, text, framed=True)


def test_a_prompt_is_not_divided_where_its_rest_would_be_other_tokens() -> None:
    """A contraction of several tokens, "'re", ends before letters that the last of them would join: "ee" is a token."""
    words, text = vocabulary("byte_level"), "x'ree\u0301" + " The" * 7
    assert b"ee" in words.tokens
    assert DraftContext(words, words.prompt(text, framed=True)).ids == own_ids("byte_level", text, framed=True)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=100)
@given(prompt=st.text(max_size=10), pieces=st.lists(st.binary(max_size=12), max_size=8))
def test_the_context_spells_every_byte_but_half_a_character(kind: str, prompt: str, pieces: list[bytes]) -> None:
    words = vocabulary(kind)
    prompt = "x" + prompt
    context = DraftContext(words, words.prompt(prompt, framed=True))
    committed = prompt.encode()
    for piece in pieces:
        context.append(piece)
        committed += piece
        spelled = words.spell(context.ids).removeprefix(b" ")  # some tokenizers begin every text with a space
        assert committed.startswith(spelled)
        assert len(committed) - len(spelled) <= 3
        assert context.byte_offset == len(spelled) - len(prompt.encode())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, CORPUS[0]) for kind in EXACT_KINDS),
        *((kind, "東京へようこそ") for kind in ("byte_level", "sentencepiece")),
    ],
)
def test_a_long_text_is_encoded_again_only_at_its_end(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary(kind)
    context = DraftContext(words, words.prompt(text * 100, framed=True))
    seen: list[int] = []
    pieces = words.pieces

    def counting(data: bytes, *, whole: bool = False) -> Tokens:
        seen.append(len(data))
        return pieces(data, whole=whole)

    monkeypatch.setattr(words, "pieces", counting)
    for word in text.split(" ")[:10]:
        context.append(f" {word}".encode())
    assert max(seen) < 120


@pytest.mark.parametrize("kind", EXACT_KINDS)
@given(data=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_candidates_spell_what_was_proposed(kind: str, data: bytes) -> None:
    words = vocabulary(kind)
    spelled = words.spell(candidates(words, data))
    assert data.startswith(spelled)
    assert len(data) - len(spelled) <= 3


@given(data=st.text(max_size=20).map(str.encode))
def test_candidates_are_cut_where_the_tokenizer_cannot_say_the_bytes(data: bytes) -> None:
    words = vocabulary("wordpiece")
    ids = candidates(words, data)
    assert data.startswith(words.spell(ids))


def test_a_candidate_may_begin_inside_a_character() -> None:
    words = vocabulary("byte_level")
    assert words.spell(candidates(words, "東".encode()[1:] + b" x")) == "東".encode()[1:] + b" x"


def test_control_tokens_in_the_draft_are_never_re_encoded() -> None:
    words = vocabulary("sentencepiece")
    prompt = Rendering([1, 3], 2, b"")
    context = DraftContext(words, prompt)
    context.append(b"the dog")
    assert context.ids[:2] == [1, 3]
    assert words.spell(context.ids) == b"the dog"


def test_a_draft_without_any_id_keeps_none() -> None:
    """WordPiece has no token for white space."""
    words = vocabulary("wordpiece")
    context = DraftContext(words, words.prompt(" ", framed=True))
    assert context.append(b" ") == (0, [])


def test_translation_leaves_no_byte_out() -> None:
    source, other = model("byte_level"), model("sentencepiece")
    half = source.vocabulary.pieces("東".encode()[:2]).ids
    whole = "東".encode()
    byte_ids = [source.vocabulary.byte_ids[byte] for byte in whole]
    for ids, spelled in (
        ([*byte_ids, byte_ids[0], 2], whole + whole[:1]),
        (source.vocabulary.pieces(b"the dog").ids + byte_ids[:2], b"the dog" + whole[:2]),
        (half, whole[:2]) if half else ([], b""),
    ):
        translated = translate(ids, source, other)
        assert other.vocabulary.spell(translated) == spelled
        assert (2 in translated) == (2 in ids)


def test_a_long_added_token_is_found_in_whatever_pieces_it_comes() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json("byte_level").decode())
    long = "<a very long added token, more than 32 bytes of it>"
    tokenizer.add_tokens([long])
    words = Vocabulary(tokenizer.to_str().encode())
    text = f"The quick brown fox {long} and over and over again"
    context = DraftContext(words, words.prompt("x", framed=True))
    for character in text:
        context.append(character.encode())
    assert context.ids == tokenizer.encode("x" + text).ids
