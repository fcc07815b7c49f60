"""A token's bytes do not depend on its position, and any text can be encoded and spelled again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from tests.support import families
from tests.support.tiny import EXACT_KINDS, KINDS, own_ids, tokenizer_json, vocabulary

HARD_TEXTS = [
    "",
    " ",
    "a , b .  it 's n't",
    "naïve café Ã© é",
    "🎉👩‍👩‍👧 東京 한국어 שלום",
    "a\r\nb\tc\x00d",
    "0, 0, 0, 0, 0, 0",
    "|---|---|---|\n\n\n\n",
    "e\u0301 \u202e x",
    " leading and trailing ",
    "<eos> is text here, <bos> too",
]


@pytest.mark.parametrize("kind", EXACT_KINDS)
@given(data=st.one_of(st.sampled_from([text.encode() for text in HARD_TEXTS]), st.binary(), st.text().map(str.encode)))
def test_any_bytes_are_spelled_exactly_up_to_half_a_character(kind: str, data: bytes) -> None:
    pieces = vocabulary(kind).pieces(data)
    assert vocabulary(kind).spell(pieces.ids) == data[: pieces.consumed]
    # Only the beginning of a character may be left over, and a character has at most four bytes.
    assert len(data) - pieces.consumed <= 3
    assert not set(pieces.ids) & vocabulary(kind).special


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40))
def test_bytes_are_those_of_the_tokenizers_own_decoder(kind: str, text: str) -> None:
    words = vocabulary(kind)
    ids = own_ids(kind, "x" + text, framed=False)
    expected = words.decode(ids).encode()
    if kind == "wordpiece":
        return  # its decoder removes spaces before punctuation: see the test below
    assert words.spell(ids).decode(errors="replace").encode().lstrip(b" ") == expected.lstrip(b" ")


def test_wordpiece_words_begin_with_a_space_and_continuations_do_not() -> None:
    words = vocabulary("wordpiece")
    assert words.spell(own_ids("wordpiece", "the end.", framed=False)) == b" the end ."


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_have_no_bytes_and_are_known_by_name(kind: str) -> None:
    words = vocabulary(kind)
    assert words.control_id("<eos>") == 2
    assert words.token_bytes(2) == b""
    assert words.control_id("the") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerNotUnderstood, match=r"tokenizer\.json"):
        Vocabulary(content)


def test_a_decoder_that_no_table_can_be_made_of_is_refused_by_name() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    spec["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(TokenizerNotUnderstood, match="CTC"):
        Vocabulary(json.dumps(spec).encode())


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_spelled_control_tokens_stay_text_however_many(kind: str) -> None:
    text = "<eos>" * 3000 + "<<bos>bos><turn>"
    pieces = vocabulary(kind).pieces(text.encode())
    assert vocabulary(kind).spell(pieces.ids) == text.encode()


def test_a_written_control_token_that_the_model_itself_finds_costs_no_other_token() -> None:
    """A Unigram model has control tokens among its pieces. The text around them is encoded as usual."""
    spec = json.loads(tokenizer_json("unigram"))
    added = {**spec["added_tokens"][-1], "id": len(spec["model"]["vocab"]), "content": "☃"}
    spec["model"]["vocab"].append(["☃", -1.0])
    spec["added_tokens"].append(added)
    words = Vocabulary(json.dumps(spec).encode())
    before, after = words.pieces(b"the dog").ids, words.pieces(b" the dog").ids
    for written, between in (("☃", words.single_bytes("☃".encode()).ids), ("<eos>", words.pieces(b"<").ids)):
        rest = words.pieces(b"eos> the dog").ids if len(written) > 1 else after
        assert words.pieces(f"the dog{written} the dog".encode()).ids == [*before, *between, *rest]


def test_a_tokenizer_with_a_giant_token_is_refused() -> None:
    """A draft may propose 64 of them, and nobody counts the bytes before they are translated."""
    spec = json.loads(tokenizer_json("byte_level"))
    spec["model"]["vocab"]["z" * 4097] = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    with pytest.raises(TokenizerNotUnderstood, match="it has a token of 4097 bytes, and at most 4096"):
        Vocabulary(json.dumps(spec).encode())


def test_dropout_of_a_training_run_is_left_out() -> None:
    spec = json.loads(tokenizer_json("byte_level"))
    spec["model"]["dropout"] = 0.9
    words = Vocabulary(json.dumps(spec).encode())
    text = b"The quick brown fox jumps over the lazy dog"
    assert words.pieces(text).ids == families.vocabulary("gpt-2").pieces(text).ids
