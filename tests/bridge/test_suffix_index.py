"""Candidates from the text itself are those that a slow search finds, and never change the text."""

import asyncio
import time

from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.suffix_index import MAX_MATCH_BYTES, SuffixMatcher
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle


def common(text: bytes, place: int) -> int:
    length = 0
    while length < min(place, MAX_MATCH_BYTES) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


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
