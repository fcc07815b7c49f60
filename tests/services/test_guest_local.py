"""Candidates in an engine's own process: the same as a bridge's without a draft, and no fault can harm the engine."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridge.guest_sequence import GuestSequence
from draftbridge.candidates import SequenceStep
from draftbridge.guests.client import LOCAL, Client, open_client
from services.guests import local
from services.guests.budget import Budget, GuestLimits
from services.guests.local import LocalCandidates
from tests.support import tiny
from tests.support.guests import Reciter, client, description, recite, running
from tests.support.waiting import eventually

KIND = "sentencepiece"
REPETITIVE = ("The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore! " * 6).encode()
IDS = list(tiny.vocabulary(KIND).pieces(REPETITIVE).ids)


@pytest.fixture
def guest() -> Iterator[LocalCandidates]:
    found = open_client(LOCAL, description(KIND), tiny.tokenizer_json(KIND))
    assert isinstance(found, LocalCandidates)
    assert not found.connected and found.connect(0) and found.connected
    yield found
    found.close()


def forwards(client: Client, *engines: Reciter) -> list[int]:
    recite(client, *engines)
    assert all(one.ids == list(one.truth) for one in engines)
    return [one.forward_count for one in engines]


def test_what_repeats_is_proposed_as_by_a_bridge(guest: LocalCandidates) -> None:
    cases = [[Reciter(IDS, len(IDS) // 4, 1)], [Reciter(IDS[: 150 + 3 * n], 100, n) for n in range(1, 9)]]
    here = [forwards(guest, *engines) for engines in cases]
    assert here[0][0] < 0.5 * (len(IDS) - len(IDS) // 4)
    assert sum(here[1]) < 0.8 * sum(50 + 3 * n for n in range(1, 9))
    with running() as bridge:
        remote = client(bridge.address, KIND)
        cases = [[Reciter(IDS, len(IDS) // 4, 1)], [Reciter(IDS[: 150 + 3 * n], 100, n) for n in range(1, 9)]]
        there = [forwards(remote, *engines) for engines in cases]
        remote.close()
    # A sequence that takes a moment to open begins a forward later.
    assert all(abs(sum(one) - sum(other)) <= 0.1 * sum(other) for one, other in zip(here, there, strict=True))


def test_an_engine_may_learn_from_its_outputs() -> None:
    """The second text has nothing of itself to repeat, and was generated before."""
    ids = list(range(20, 120))
    forwards_taken = []
    for sources in (["suffix"], ["suffix", "learned"]):
        learner = open_client(LOCAL, description(KIND), tiny.tokenizer_json(KIND), sources=sources)
        forwards_taken.append([forwards(learner, Reciter(ids, 10, number))[0] for number in (1, 2)])
        learner.close()
    assert forwards_taken[0] == [90, 90]
    assert forwards_taken[1][1] < 45


def test_a_forward_of_fixed_width_takes_what_is_there(guest: LocalCandidates) -> None:
    def proposed(ids: list[int], **more: Any) -> int:
        return len(guest.step([SequenceStep(1, ids, **more)], deadline=10.0, engine_seconds=0.01)[1].token_ids)

    assert proposed(IDS[:150]) < proposed(IDS[:151], fixed_width=True)
    assert proposed(IDS[:152], fixed_width=True, max_candidates=3) == 3


def test_an_engine_with_an_event_loop_of_its_own(guest: LocalCandidates) -> None:
    async def engine() -> list[int]:
        return forwards(guest, Reciter(IDS, len(IDS) // 4, 1))

    assert asyncio.run(engine())[0] < 0.5 * (len(IDS) - len(IDS) // 4)


def test_tokens_as_an_array(guest: LocalCandidates) -> None:
    row = np.array(IDS, dtype=np.int32)
    for count in range(80, 90):
        found = guest.step([SequenceStep(1, row[:count])], deadline=10.0, engine_seconds=0.01)
    assert found[1].sources[0] == "suffix" and isinstance(found[1].token_ids[0], int)


def test_a_step_that_gives_way_to_other_work_goes_on(guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.guest._WORKING_NS", 0)
    proposed = 0
    for count in range(80, 84):
        found = guest.step([SequenceStep(1, IDS[:count])], deadline=10.0, engine_seconds=0.01)
        proposed += len(found[1].token_ids)
    assert guest.counts.candidate_count == proposed > 0


def test_a_step_does_not_wait_for_a_long_prompt(guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = threading.Event()

    def slow(*arguments: object) -> object:
        assert indexed.wait(60)
        return GuestSequence(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(local, "GuestSequence", slow)
    monkeypatch.setattr(local, "_MAX_TOKENS_AT_ONCE", 79)
    assert not guest.step([SequenceStep(1, IDS[:80])], deadline=0.002, engine_seconds=0.01), "it would wait for ever"
    indexed.set()
    eventually(lambda: bool(guest.step([SequenceStep(1, IDS[:80])], deadline=0.002, engine_seconds=0.01)))


def test_many_new_sequences_begin_over_several_steps(guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counted(*arguments: object) -> object:
        opened.append(arguments)
        return GuestSequence(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(local, "GuestSequence", counted)
    monkeypatch.setattr(local, "_FRESH", 0.0)
    steps = [SequenceStep(number, IDS[:80]) for number in range(5)]
    guest._token_seconds = 1.0
    for count in range(1, 5):
        guest.step(steps, deadline=0.002, engine_seconds=0.01)
        assert len(opened) == count
    guest._token_seconds = 1e-9
    assert guest.step(steps, deadline=10.0, engine_seconds=0.01) and len(opened) == 5


def test_an_id_that_is_used_again_at_once_is_a_new_sequence(guest: LocalCandidates) -> None:
    guest.step([SequenceStep(1, IDS[:80])], deadline=10.0)
    other = list(reversed(IDS[:40])) * 2
    found = guest.step([SequenceStep(1, other)], ended=[1], deadline=10.0)
    assert found[1].token_ids[0] == other[0]


def test_a_late_answer_is_counted(guest: LocalCandidates) -> None:
    guest.step([SequenceStep(1, IDS)], deadline=60.0)
    assert guest.counts.late_count == 0
    guest.step([SequenceStep(1, IDS)], deadline=0.0)
    assert guest.counts.late_count == 0, "such a step only reports"
    guest.step([SequenceStep(1, IDS)], deadline=1e-9)
    assert guest.counts.late_count == 1


def test_a_deadline_without_end_is_the_longest(guest: LocalCandidates) -> None:
    assert guest.step([SequenceStep(1, IDS)], deadline=float("inf"))


def test_a_sequence_that_is_not_named_for_long_ends(guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SWEEP_STEPS", 3)
    guest._limits = GuestLimits(idle_seconds=0.0)
    guest.step([SequenceStep(1, IDS)], deadline=10.0)
    assert guest._budget.count == 1
    for _ in range(2):
        guest.step([], deadline=10.0)
    assert guest._budget.count == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_each_process_has_candidates_of_its_own_after_a_fork() -> None:
    """In a process of its own, because threads of other tests would not survive the fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forked_guest"], timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_without_file_descriptors_is_no_error_of_the_engine(
    guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0)
    before = guest._loop, guest._process

    def fails() -> asyncio.AbstractEventLoop:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(local.os, "getpid", lambda: -1)  # as in a child
        patch.setattr(local.asyncio, "new_event_loop", fails)
        assert guest.step([SequenceStep(1, IDS)]) == {} and guest.step([SequenceStep(1, IDS)]) == {}
    assert caplog.text.count("a bug in DraftBridge") == 1
    assert (guest._loop, guest._process) == before, "it has not begun with the other process's event loop"
    with monkeypatch.context() as patch:
        patch.setattr(local.os, "getpid", lambda: -1)
        patch.setattr(local, "Vocabulary", fails)
        assert guest.step([SequenceStep(1, IDS)], deadline=10.0), "the tokenizer is not read again"
        guest.close()


def test_a_long_prompt_is_no_reason_to_postpone_others(guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MAX_TOKENS_AT_ONCE", 79)
    guest._token_seconds = 1e-5  # 80 tokens and what belongs to them are expected to take longer than the deadline
    guest.step([SequenceStep(number, IDS[: 80 - number]) for number in range(2)], deadline=0.005)
    assert set(guest._kept) == {0, 1}


def test_the_first_step_connects(caplog: pytest.LogCaptureFixture) -> None:
    guest = LocalCandidates(description(KIND), tiny.tokenizer_json(KIND))
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0)
    guest.close()
    assert not caplog.records, "where all is well, nothing is logged"


def test_unknown_sources_and_unusable_costs_are_no_error_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    guest = LocalCandidates(description(KIND), tiny.tokenizer_json(KIND), ("sufix",))
    assert not guest.connect() and "a selection of" in caplog.text
    guest.close()
    model = description(KIND)
    model.forward_costs.add(token_count=0, forward_ns=5)
    guest = LocalCandidates(model, tiny.tokenizer_json(KIND))
    assert guest.connect()
    guest.close()


def test_it_may_be_closed_while_another_thread_is_in_a_step(guest: LocalCandidates) -> None:
    stepping = threading.Event()

    def engine() -> None:
        for count in range(100, len(IDS)):
            guest.step([SequenceStep(number, IDS[:count]) for number in range(4)], deadline=0.01)
            stepping.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert stepping.wait(60)
    guest.close()
    thread.join(60)
    assert not thread.is_alive() and guest.step([SequenceStep(1, IDS)]) == {}


def test_a_sequence_that_goes_back_begins_anew(guest: LocalCandidates) -> None:
    other = list(reversed(IDS[:40])) * 2
    guest.step([SequenceStep(1, IDS[:80])], deadline=10.0)
    found = guest.step([SequenceStep(1, [*IDS[:10], *other], kept_token_count=10)], deadline=10.0)
    assert found[1].token_ids[0] == other[0], "it continues the tokens that came after the kept ones"


def test_more_sequences_than_memory_allows_are_sent_again(guest: LocalCandidates) -> None:
    guest._budget = Budget(GuestLimits(sequence_count=2))
    engines = [Reciter(IDS, 100, number) for number in range(1, 5)]
    for engine in engines:
        recite(guest, engine)
    assert guest._budget.count == 2
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0) == {}, "it was forgotten"
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0), "it was sent again"


def test_an_engine_that_never_reports_an_end_fills_no_memory(
    guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MAX_FORGOTTEN", 3)
    guest._budget = Budget(GuestLimits(sequence_count=2))
    for number in range(1, 20):
        guest.step([SequenceStep(number, IDS[:80])], deadline=10.0)
    assert len(guest._kept) <= 5 and len(guest._returned) <= 5
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0), "what is forgotten is sent as a whole"


def test_impossible_ids_concern_one_sequence(guest: LocalCandidates, caplog: pytest.LogCaptureFixture) -> None:
    steps = [SequenceStep(1, [*IDS[:80], 1 << 30]), SequenceStep(2, IDS[:80])]
    for _ in range(2):
        found = guest.step(steps, deadline=10.0, engine_seconds=0.01)
    assert 1 not in found and found[2].token_ids
    assert caplog.text.count("outside the tokenizer's vocabulary") == 1


def test_a_draft_needs_a_bridge() -> None:
    for options in ({"draft": "small"}, {"sources": ("draft",)}):
        with pytest.raises(ValueError, match="HOST:PORT"):
            open_client(LOCAL, description(KIND), tiny.tokenizer_json(KIND), **options)  # type: ignore[arg-type]


def test_an_unusable_tokenizer_costs_only_the_candidates(caplog: pytest.LogCaptureFixture) -> None:
    guest = LocalCandidates(description(KIND), b'{"model": {"type": "unheard of"}}')
    assert not guest.connect()
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0) == {}
    guest.close()
    assert "no candidates" in caplog.text


def test_a_bug_is_logged_once(
    guest: LocalCandidates, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(guest, "_update", broken)
    with caplog.at_level(logging.ERROR):
        assert guest.step([SequenceStep(1, IDS)]) == guest.step([SequenceStep(1, IDS)]) == {}
    assert caplog.text.count("Traceback") == 1


def test_after_its_end_it_proposes_nothing(guest: LocalCandidates) -> None:
    assert guest.step([SequenceStep(1, IDS)], deadline=10.0)
    guest.close()
    assert guest._budget.count == 0, "it holds no text any more"
    assert guest.step([SequenceStep(1, [*IDS, 5])], deadline=10.0) == {} and not guest.connect()
    guest.close()
