"""Tests stop strings and half characters, wherever the text is cut."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.request import MAX_STOP_LENGTH
from bridge.text.stream import Span, TextStream

ALPHABET = st.sampled_from(["a", "b", "ab", "é", "東", "🎉"])


@settings(max_examples=300)
@given(
    data=st.one_of(st.lists(ALPHABET, max_size=30).map(lambda parts: "".join(parts).encode()), st.binary(max_size=30)),
    stop=st.lists(st.lists(ALPHABET, min_size=1, max_size=3).map("".join), max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_pieces_give_the_text_before_the_stop_that_is_complete_first(
    data: bytes, stop: list[str], cuts: list[int]
) -> None:
    whole = data.decode(errors="replace")
    ends = sorted((whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole)
    expected = whole[: ends[0][1]] if ends else whole
    stream, sent, position, index = TextStream(stop), "", 0, 0
    while position < len(data) and not stream.stopped:
        size = cuts[index % len(cuts)]
        piece = stream.push(data[position : position + size])
        assert sum(span.byte_count for span in stream.spans(piece)) == len(piece.encode())
        sent += piece
        assert expected.startswith(sent)
        position, index = position + size, index + 1
    if not stream.stopped:
        sent += stream.push(b"", final=True)
    assert sent == expected
    assert stream.stopped == bool(ends)


def test_text_that_might_be_a_stop_is_held_only_as_long_as_it_might() -> None:
    stream = TextStream(["###"])
    assert stream.push(b"a#") == "a"
    assert stream.push(b"#") == ""
    assert stream.push(b"b") == "##b"
    assert stream.push(b"c###d") == "c"
    assert stream.stopped


def test_long_stop_strings_that_nearly_match_take_no_time() -> None:
    """Nothing else runs meanwhile."""
    for stop in (
        ["a" * (MAX_STOP_LENGTH - 1) + "b"],
        ["a" * (MAX_STOP_LENGTH // 64 - 1) + chr(256 + n) for n in range(64)],
    ):
        stream, run = TextStream(stop), b"a" * (len(stop[0]) - 1)
        assert stream.push(run) == ""
        started = time.thread_time()
        assert stream.push(b"z") == run.decode() + "z"
        assert time.thread_time() - started < 0.05, "it takes 2 ms; with longer strings it took seconds"


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(st.text("abc", max_size=5), max_size=12))
def test_what_is_sent_is_what_a_search_from_the_beginning_would_send(stop: list[str], pieces: list[str]) -> None:
    stream, text, sent = TextStream(stop), "", ""
    for place, piece in enumerate(pieces):
        text += piece
        sent += stream.push(piece.encode(), final=place == len(pieces) - 1)
        ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
        assert stream.stopped is bool(ends)
        if ends:
            assert sent == text[: min(ends)[1]]
            return
        held = max((n for one in stop for n in range(len(one)) if text.endswith(one[:n])), default=0)
        assert sent == (text if place == len(pieces) - 1 else text[: len(text) - held])


def test_many_long_stop_strings_of_which_one_is_always_begun_take_no_time() -> None:
    stop = ["a" * 2048 + "b", *("a" * place + "b" + "a" * (30 - place) for place in range(63))]
    stream = TextStream(stop)
    stream.push(b"a" * 2048)
    started = time.thread_time()
    for _ in range(25):
        assert stream.push(b"aaaa") == "aaaa"
    assert time.thread_time() - started < 0.05, "it takes 4 ms; it took 180"


def test_characters_are_never_sent_in_halves() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]
    assert stream.push("東".encode()[:2]) == ""
    assert stream.push(b"", final=True) == "\ufffd"


def test_of_two_stops_in_one_piece_the_one_that_is_complete_first_counts() -> None:
    """Here it is the one that begins later."""
    stream = TextStream(["abc", "b"])
    assert stream.push(b"xabcd") == "xa"


def test_each_byte_of_text_has_the_source_that_proposed_it() -> None:
    """Also those that were held back, as half a character or as the beginning of a stop string."""
    stream = TextStream(["##"])
    text = stream.push("aé".encode()[:2], "draft")
    assert stream.spans(text) == (Span("draft", 1),)
    text = stream.push("é".encode()[1:] + b"b#", "suffix")
    assert stream.spans(text) == (Span("draft", 1), Span("suffix", 2))
    text = stream.push(b"c\xff")
    assert stream.spans(text) == (Span("suffix", 1), Span("", 4)), "a replacement character is longer than its byte"


def test_what_replaces_invalid_bytes_has_their_source() -> None:
    stream = TextStream(["##"])
    text = stream.push("東".encode()[:2], "draft") + stream.push(b"ab", "suffix") + stream.push(b"\xff#", "draft")
    assert text == "\ufffdab\ufffd"
    assert stream.spans(text) == (Span("draft", 3), Span("suffix", 2), Span("draft", 3))
    text = stream.push("é".encode()[:1], "suffix") + stream.push(b"", final=True)
    assert text == "#\ufffd"
    assert stream.spans(text) == (Span("draft", 1), Span("suffix", 3))
