"""What prompt lookup proposes is what a slow search finds, its confidence is measured, and the text is the same."""

import asyncio
import random
import sys
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.source_set import SourceSet
from bridge.sources.suffix import SuffixSource
from bridge.sources.token_lookup import MAX_PROPOSED_TOKENS, TokenLookup, confidence
from bridge.tape import Tape
from bridge.text.translation import candidates
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle
from tests.support.depth import examples

MODEL = tiny.model("byte_level")
WORDS = MODEL.vocabulary
IDS = st.lists(st.integers(0, 3), max_size=24)


def length_at(ids: list[int], place: int) -> int:
    """Returns how many tokens before a place are the last ones of the text."""
    length = 0
    while length < min(place, 16) and ids[place - 1 - length] == ids[-1 - length]:
        length += 1
    return length


def slow_proposal(ids: list[int], place: int) -> list[int]:
    whole = list(ids)
    while len(whole) < len(ids) + MAX_PROPOSED_TOKENS:
        whole.append(whole[place + len(whole) - len(ids)])
    return whole[len(ids) :]


@settings(max_examples=500)
@given(parts=st.lists(IDS, min_size=1, max_size=6))
def test_it_proposes_what_followed_the_longest_match(parts: list[list[int]]) -> None:
    whole = list(parts[0])
    lookup = TokenLookup(whole)
    ids, confidences = lookup.match()
    for part in parts[1:]:
        whole += part
        ids, confidences = lookup.match()
    lengths = {place: length_at(whole, place) for place in range(1, len(whole))}
    matching = [place for place in reversed(lengths) if lengths[place]]
    assert len(confidences) == len(ids) == (MAX_PROPOSED_TOKENS if matching else 0)
    assert all(0.0 < one < 1.0 for one in confidences)
    if matching:
        # The latest places are always found, and those that have matched for long are not forgotten.
        least = max(lengths[place] for place in matching[:8])
        assert ids in [slow_proposal(whole, place) for place in matching if lengths[place] >= least]


@given(first=IDS, second=IDS, times=st.sampled_from([1, 30]))
def test_a_text_at_once_is_the_same_as_one_by_one(first: list[int], second: list[int], times: int) -> None:
    second = second * times
    ids, more = list(first), list(first)
    whole, grown, once = TokenLookup(first + second), TokenLookup(ids), TokenLookup(more)
    for id_ in second:
        ids.append(id_)
        grown.match()
    more += second
    for other in (grown, once):
        assert bool(whole.match()[0]) is bool(other.match()[0])
        assert (whole._last, whole._before) == (other._last, other._before)


def test_a_long_match_at_the_end_of_a_prompt_is_found() -> None:
    """Its last token also occurs in many other places, later than the match."""
    passage = list(range(100, 120))
    others = [[2000 + place, 119, 3000 + place] for place in range(9)]
    ids, confidences = TokenLookup([*passage, 7, *chain(*others), *passage]).match()
    assert ids[0] == 7 and confidences[0] >= confidence(16, 1, 9)
    alone = TokenLookup([*passage, 7, *passage]).match()
    assert len(alone[0]) == len(alone[1]) == MAX_PROPOSED_TOKENS


def test_a_long_copy_is_not_lost_among_many_places() -> None:
    """The last token of each line is the same, and the copied passage is far back."""
    chance = random.Random(1)
    lines = [[chance.randrange(10, 10_000), 1] for _ in range(200)]
    copied = lines[3:40]
    ids = list(chain(*lines))
    lookup = TokenLookup(ids)
    for line, following in pairwise(copied):
        ids += line
        assert lookup.match()[0][:2] == following


def test_what_agrees_is_more_certain_than_what_does_not() -> None:
    ids, once = TokenLookup([1, 2, 3, 9, 1, 2]).match()
    ids_of_three, thrice = TokenLookup([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2]).match()
    ids_of_split, split = TokenLookup([1, 2, 4, 9, 1, 2, 5, 8, 1, 2, 3, 7, 1, 2]).match()
    assert ids[0] == ids_of_three[0] == ids_of_split[0] == 3
    assert split[0] < once[0] < thrice[0]
    assert once[:2] == [confidence(2), confidence(3)]
    assert thrice[:2] == [confidence(2, 3, 3), confidence(3, 1, 3)]
    assert split[:2] == [confidence(2, 1, 3), confidence(3)]
    assert once[1] > once[0], "a token that is right makes the match longer"


@given(matched=st.integers(1, 40), places=st.integers(1, 16), data=st.data())
def test_confidence_is_a_chance_that_grows_with_the_match(matched: int, places: int, data: st.DataObject) -> None:
    agreeing = data.draw(st.integers(1, places))
    assert 0.0 < confidence(matched, agreeing, places) <= confidence(matched + 1, agreeing, places) < 1.0
    assert confidence(matched, agreeing, places) <= confidence(matched, places, places)


@pytest.mark.parametrize("distinct", [50_000, 300])
def test_memory_is_as_documented(distinct: int) -> None:
    chance = random.Random(0)
    ids: list[int] = []
    lookup = TokenLookup(ids)
    ids += [chance.randrange(distinct) for _ in range(50_000)]
    lookup.match()
    places = sum(map(sys.getsizeof, lookup._last.values()))
    parts = sys.getsizeof(lookup._before) + sys.getsizeof(lookup._last)
    assert 1 * len(ids) < places + parts <= 112 * len(ids)


def ids_of(text: str) -> list[int]:
    return candidates(WORDS, text.encode())


def test_the_candidates_are_the_tokens_of_the_text_itself() -> None:
    """Encoding the bytes that they spell could give others."""
    prompt = [*WORDS.single_bytes(b"the quick fox").ids, *ids_of(". "), *WORDS.single_bytes(b"the").ids]
    (offer,) = SourceSet([SuffixSource(Tape(WORDS, prompt))], MODEL, None).offers()
    following = WORDS.single_bytes(b" quick fox").ids
    assert list(offer.token_ids[: len(following)]) == list(following)
    assert offer.evidence[0] == pytest.approx(confidence(3))


@settings(max_examples=examples(600))
@given(ids=IDS, after=st.lists(st.integers(0, 3), min_size=1, max_size=20), least=st.integers(1, 4))
def test_what_follows_tokens_that_are_not_committed(ids: list[int], after: list[int], least: int) -> None:
    lookup, whole = TokenLookup(ids), ids + after
    found, confidences = lookup.match(after=after, min_token_count=least)
    # Places before the end of the committed tokens, the latest ones of the last token.
    lengths = {place: length_at(whole, place) for place in range(len(ids), 0, -1)}
    matching = [place for place in lengths if lengths[place]][:8]
    longest = max((lengths[place] for place in matching), default=0)
    assert len(confidences) == len(found) == (MAX_PROPOSED_TOKENS if longest >= least else 0)
    if found:
        assert found in [slow_proposal(whole, place) for place in matching if lengths[place] == longest]
        assert confidences[-1] == confidence(longest + MAX_PROPOSED_TOKENS - 1, 1, 1) or len(matching) > 1
    again = TokenLookup(ids)
    assert lookup.match() == again.match(), "they leave nothing in the tables"


def test_another_sources_bytes_are_continued_if_two_tokens_match() -> None:
    source = SuffixSource(Tape(WORDS, ids_of("the small house. the small ")))
    after = source.propose(b"house")
    assert after is not None and after.data.startswith(b". the small")
    assert after.cut and after.confidences[0] < after.confidences[-1]
    assert SuffixSource(Tape(WORDS, ids_of("xx hose yy."))).propose(b"h") is None
    assert SuffixSource(Tape(WORDS, ids_of("nothing twice"))).propose() is None


@pytest.mark.parametrize("after", [b"\xc3", b"caf\xc3"])
def test_bytes_that_end_inside_a_character_are_not_continued(after: bytes) -> None:
    """They have no tokens yet, and what follows their last token would repeat the first byte of the character."""
    source = SuffixSource(Tape(WORDS, ids_of("the café is small. the café is small. then the ")))
    assert source.propose(after) is None
    found = source.propose("café".encode())
    assert found is not None and found.data.startswith(b" is small")


def test_a_text_that_repeats_itself_takes_fewer_passes_and_stays_the_same() -> None:
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
