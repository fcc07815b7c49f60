"""Tests the arithmetic of `benchmarks.rounds`, and the engine that it uses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reciting import RecitingEngine
from benchmarks.rounds import Case, Run, cost
from bridge.text.vocabulary import Vocabulary
from services.engines.engine import Row
from tests.support import tiny

TEXT = "The quick brown fox jumps over the lazy dog; it's asleep. Grüße aus Köln!".encode()


def _run(mode: str, gaps: tuple[int, ...], models_ns: int) -> Run:
    return Run(Case("any", mode), gaps, len(gaps) + 1, 2 * (len(gaps) + 1), models_ns, bridge_ns=0)


def test_a_round_of_lockstep_is_a_gap_and_the_models_are_taken_off() -> None:
    found = cost([_run("lockstep", (1_000_000, 9_000_000), 600_000), _run("lockstep", (2_000_000,), 400_000)])
    assert found.round_count == 3
    assert found.median_ms == 2.0
    assert found.models_ms == pytest.approx(1.0 / 5)
    assert found.own_ms == pytest.approx(2.0 - 1.0 / 5)
    assert found.tokens_per_round == 2.0


def test_where_passes_come_in_bursts_a_round_is_the_mean_of_its_generation() -> None:
    # Most gaps are inside a burst, so that their median would be zero.
    burst = (0, 0, 0, 4_000_000)
    found = cost([_run("off", burst, 0), _run("off", burst, 0), _run("off", (0, 0, 0, 40_000_000), 0)])
    assert found.median_ms == 1.0


@pytest.mark.parametrize("kind", tiny.EXACT_KINDS)
@given(st.integers(1, 30), st.integers(0, 30))
def test_the_engine_recites_from_wherever_a_sequence_ends(kind: str, length: int, keep: int) -> None:
    vocabulary = Vocabulary(tiny.tokenizer_json(kind))
    ids = vocabulary.pieces(TEXT).ids
    engine = RecitingEngine(vocabulary, TEXT)
    engine.forward([Row(0, 0, tuple(ids[:length]), 0)])
    keep = min(keep, length)
    # Logits after the kept tokens, and after each candidate.
    row = Row(0, keep, tuple(ids[keep : length + 2]), max(length - keep - 1, 0))
    chosen: list[int] = [int(line.argmax()) for line in engine.forward([row])[0]]
    for end, id_ in zip(range(keep + row.logits_from + 1, length + 3), chosen, strict=True):
        data = vocabulary.spell(ids[:end])
        assert TEXT.startswith(data + vocabulary.token_bytes(id_)) or len(data) == len(TEXT)


def test_a_draft_is_wrong_as_often_as_it_is_said_to_be() -> None:
    vocabulary = Vocabulary(tiny.tokenizer_json("byte_level"))
    text = TEXT * 40
    always, often = (RecitingEngine(vocabulary, text, acceptance) for acceptance in (1.0, 0.8))
    places = range(len(text) - 100)
    same = sum(always.next_id(place) == often.next_id(place) for place in places)
    assert same / len(places) == pytest.approx(0.8, abs=0.03)
