"""The matches of bytes are those that a slow search finds."""

import random
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model.draft import suffix_index
from services.model.draft.suffix_index import MAX_MATCH_BYTES, MAX_PROPOSAL_BYTES, MIN_MATCH_BYTES, SuffixMatcher


def common(text: bytes, place: int) -> int:
    length = 0
    while length < min(place, MAX_MATCH_BYTES) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


FEW_LETTERS = st.text("ab", max_size=90).map(str.encode)


@settings(max_examples=300)
@given(parts=st.lists(FEW_LETTERS, max_size=5), ahead=FEW_LETTERS)
def test_a_match_is_the_longest_of_the_latest_places(parts: list[bytes], ahead: bytes) -> None:
    """Places in what may come are left out, because they are not known yet. A tie goes to the latest place."""
    matcher, known = SuffixMatcher(), b"".join(parts)
    for part in parts:
        matcher.append(part)
    text = known + ahead
    found = [(common(text, place), place) for place in range(MIN_MATCH_BYTES, len(known))]
    latest = [(length, place) for length, place in reversed(found) if length >= MIN_MATCH_BYTES][:8]
    match = matcher.match(ahead)
    if not latest:
        assert match is None
        return
    length, place = max(latest)
    assert match is not None
    assert match.length == length
    assert match.data == (text[place:] * MAX_PROPOSAL_BYTES)[:MAX_PROPOSAL_BYTES], "at the text's end, it repeats"


def test_four_bytes_are_enough_and_three_are_not() -> None:
    match = SuffixMatcher(b"abcd-1 abcd").match()
    assert match is not None and match.length == 4 and match.data.startswith(b"-1 abcd")
    assert SuffixMatcher(b"abc-1 abc").match() is None


def tables(matcher: SuffixMatcher) -> tuple[bytes, list[int], list[int]]:
    return bytes(matcher._text), list(matcher._last), list(matcher._before)


@given(parts=st.lists(st.binary(max_size=40) | FEW_LETTERS, max_size=8))
def test_many_places_at_once_are_the_same_as_one_by_one(parts: list[bytes]) -> None:
    matchers = []
    for least, most in ((1 << 30, 1), (1, 1 << 30), (2, 7)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(suffix_index, "_MIN_BLOCK_PLACES", least)
            patch.setattr(suffix_index, "_MAX_BLOCK_PLACES", most)
            matchers.append(SuffixMatcher())
            for part in parts:
                matchers[-1].append(part)
    assert tables(matchers[0]) == tables(matchers[1]) == tables(matchers[2])


@given(text=st.text("abc", max_size=60).map(str.encode), length=st.integers(0, 60))
def test_what_is_cut_off_was_never_there(text: bytes, length: int) -> None:
    matcher = SuffixMatcher(text)
    matcher.cut(length)
    assert tables(matcher) == tables(SuffixMatcher(text[:length]))
    matcher.append(text[length:])
    assert tables(matcher) == tables(SuffixMatcher(text))


def test_of_a_long_text_the_end_is_kept() -> None:
    matcher, text = SuffixMatcher(limit=10_000), b""  # rounded down to 8192
    for number in range(1500):
        line, before = f"line {number} is here\n".encode(), len(matcher._text)
        text += line
        matcher.append(line)
        kept = bytes(matcher._text)
        assert text.endswith(kept)
        assert len(kept) == (before + len(line) if before + len(line) <= 8192 else 4096)
        assert len(matcher._before) == len(kept) and len(matcher._last) <= 8192
    matcher.append(b"line 1495")
    match = matcher.match()
    assert match is not None and match.data.startswith(b" is here\nline 1496")


@pytest.mark.parametrize("count", [0, 100, 5000, 65_600, 262_300, 300_000])
@pytest.mark.parametrize("in_parts", [False, True])
def test_memory_is_as_documented(count: int, in_parts: bool) -> None:
    data = random.Random(0).randbytes(count)
    matcher = SuffixMatcher(b"" if in_parts else data)
    for start in range(0, count * in_parts, 100):
        matcher.append(data[start : start + 100])
    held = sum(map(sys.getsizeof, (matcher._text, matcher._last, matcher._before)))
    assert held <= 20 * 1024 + 15 * count


def test_a_byte_costs_the_same_however_long_the_text_is() -> None:
    """This holds even if all places look alike."""
    for text in (bytes(200_000), bytes(range(256)) * 800):
        drafter = SuffixMatcher(text)
        started = time.thread_time()
        for _ in range(1000):
            drafter.append(b"x")
            drafter.match()
        assert time.thread_time() - started < 0.5
