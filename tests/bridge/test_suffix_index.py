"""Candidates from the text itself are those that a slow search finds, and never change the text."""

import asyncio
import random
import sys
import time
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources import suffix_index as suffix
from bridge.sources.suffix_index import MAX_MATCH_BYTES, MIN_MATCH_BYTES, SuffixMatcher, max_memory_bytes
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle


def common(text: bytes, place: int) -> int:
    length = 0
    while length < min(place, MAX_MATCH_BYTES) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


@settings(max_examples=500)
@given(parts=st.lists(st.text("ab", max_size=12).map(str.encode), max_size=8))
def test_a_match_is_the_longest_of_the_latest_places(parts: list[bytes]) -> None:
    drafter = SuffixMatcher(b"".join(parts[:1]))
    for part in parts[1:]:
        drafter.append(part)
    text = b"".join(parts)
    lengths = [common(text, place) for place in range(MIN_MATCH_BYTES, len(text))]
    latest = [length for length in reversed(lengths) if length >= MIN_MATCH_BYTES][:8]
    match = drafter.match()
    assert (match.length if match else 0) == max(latest, default=0)


@given(text=st.binary(max_size=200), data=st.data())
def test_it_proposes_what_followed_there(text: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    match = SuffixMatcher(text + text[:start]).match()
    if start >= 2 * MIN_MATCH_BYTES:
        assert match is not None
        assert match.length >= MIN_MATCH_BYTES
    if match:
        whole = text + text[:start]
        place = whole.find(whole[-match.length :] + match.data[:1])
        assert 0 <= place < len(whole) - match.length or match.data[:1] == whole[-1:]


@given(parts=st.lists(st.text("ab", max_size=40).map(str.encode), min_size=2, max_size=2))
def test_a_match_behind_what_may_come_is_that_of_a_text_where_it_came(parts: list[bytes]) -> None:
    """Places that end in later text are left out, as they are not known yet."""
    known, ahead = parts
    match = SuffixMatcher(known).match(ahead)
    text = known + ahead
    lengths = [common(text, place) for place in range(MIN_MATCH_BYTES, len(known))]
    latest = [length for length in reversed(lengths) if length >= MIN_MATCH_BYTES][:8]
    assert (match.length if match else 0) == max(latest, default=0)
    if match:
        places = [place for place in range(MIN_MATCH_BYTES, len(known)) if common(text, place) == match.length]
        whole = [(text[place:] * 256)[:256] for place in places]
        assert match.data in whole


def test_a_repetition_goes_on() -> None:
    match = SuffixMatcher(b"one two, one two, one two, one").match()
    assert match is not None
    assert match.data.startswith(b" two, one two, one two, one two")


def test_memory_is_bounded_and_what_was_said_last_is_kept() -> None:
    drafter = SuffixMatcher(limit=8192)
    for number in range(3000):
        drafter.append(f"line {number} is here\n".encode())
        assert len(drafter._text) == len(drafter._before) <= 8192
        assert len(drafter._last) <= 8192
    drafter.append(b"line 2995")
    match = drafter.match()
    assert match is not None
    assert match.data.startswith(b" is here\nline 2996")


@pytest.mark.parametrize("count", [0, 100, 5000, 65_600, 262_300, 300_000])
@pytest.mark.parametrize("parted", [False, True])
def test_memory_is_as_said(count: int, parted: bool) -> None:
    chance = random.Random(0)
    drafter = SuffixMatcher(b"" if parted else chance.randbytes(count // 2))
    while drafter.length < count:
        drafter.append(chance.randbytes(min(5 + 95 * (not parted), count - drafter.length)))
        if parted:
            drafter.start_text()
    parts = (drafter._text, drafter._last, drafter._before, drafter._starts)
    assert sum(sys.getsizeof(part) for part in parts) <= max_memory_bytes(count)


def tables(drafter: SuffixMatcher) -> tuple[bytes, list[int], list[int]]:
    return bytes(drafter._text), list(drafter._last), list(drafter._before)


@given(parts=st.lists(st.binary(max_size=40) | st.text("ab", max_size=40).map(str.encode), max_size=8))
def test_many_places_at_once_are_the_same_as_one_by_one(parts: list[bytes]) -> None:
    drafters = []
    for many, block in ((1 << 30, 1), (1, 1 << 30), (2, 7)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(suffix, "_MIN_BLOCK_PLACES", many)
            patch.setattr(suffix, "_MAX_BLOCK_PLACES", block)
            drafters.append(SuffixMatcher())
            for part in parts:
                drafters[-1].append(part)
    assert len({str(tables(drafter)) for drafter in drafters}) == 1


@given(text=st.text("abc", max_size=60).map(str.encode), data=st.data())
def test_what_is_taken_back_was_never_there(text: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(text)))
    drafter = SuffixMatcher(text)
    drafter.cut(length)
    assert tables(drafter) == tables(SuffixMatcher(text[:length]))
    drafter.append(text[length:])
    assert tables(drafter) == tables(SuffixMatcher(text))


@settings(max_examples=500)
@given(parts=st.lists(st.text("ab", max_size=12).map(str.encode), max_size=8), end=st.text("ab", max_size=12))
def test_texts_that_are_parted_have_no_match_and_no_data_in_common(parts: list[bytes], end: str) -> None:
    drafter, asked = SuffixMatcher(), end.encode()
    for part in parts:
        drafter.start_text()
        drafter.append(part)
    match = drafter.match_of(asked)
    begins = [0, *accumulate(map(len, parts))]
    # Of all places of all texts but the very end, the latest that have a match in the whole of them; as far as it is
    # in the same text.
    text = b"".join(parts)
    places = [place for place in reversed(range(len(text))) if text[max(place - 4, 0) : place] == asked[-4:]][:8]
    best: tuple[int, bytes] = (MIN_MATCH_BYTES - 1, b"")
    for place in places:
        part, begin = next(
            (part, begin) for part, begin in zip(parts, begins, strict=False) if begin <= place < begin + len(part)
        )
        length = max(
            length
            for length in range(min(place - begin, len(asked)) + 1)
            if text[place - length : place] == asked[len(asked) - length :]
        )
        if length > best[0]:
            best = length, part[place - begin :]
    assert (match and (match.length, match.data)) == (
        best if best[0] >= MIN_MATCH_BYTES and len(asked) >= MIN_MATCH_BYTES else None
    )


def test_a_byte_costs_the_same_however_long_the_text_is() -> None:
    """This holds even if all places look alike."""
    for text in (bytes(200_000), bytes(range(256)) * 800):
        drafter = SuffixMatcher(text)
        started = time.thread_time()
        for _ in range(1000):
            drafter.append(b"x")
            drafter.match()
        assert time.thread_time() - started < 0.5


def test_a_text_that_repeats_itself_is_said_in_fewer_passes_and_stays_the_same() -> None:
    """Only two ids are allowed, so that the random target repeats itself; the suffix match is the only source."""
    target = tiny.model("byte_level")
    engine = tiny.HashEngine(target)
    bias = {id_: 50.0 for id_ in (70, 71)}
    for temperature in (0.0, 0.7):
        expected = oracle(target, engine, temperature, 150, logit_bias=bias)
        request = Request(
            PROMPT,
            sampling=SamplingParameters(temperature=temperature, logit_bias=bias),
            seed=0,
            max_tokens=150,
            speculation=SpeculationParameters(Mode.AUTO),
        )
        text, ids, finished = asyncio.run(answer(target, engine, None, None, request, temperature, logit_bias=bias))
        assert ids == expected
        assert text == target.vocabulary.spell(expected).decode(errors="replace")
        assert finished.mode is Mode.AUTO
        statistics = finished.statistics
        assert 0 < did(statistics, "suffix").num_accepted_tokens == statistics.num_accepted_tokens
        assert did(statistics, "suffix").num_draft_tokens == statistics.num_draft_tokens
        assert statistics.target_pass_count < 150
