"""The engine's side of CandidateService, against a scripted bridge: what it sends, and which candidates it uses."""

import numpy as np
import pytest

from bridge.guest_step import Answer
from draftbridge import candidate_stream, candidates
from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import candidate_pb2
from services.bridge.guests import _write_answer
from tests.support.counting_bridge import MODEL, Counting, ask, serving
from tests.support.waiting import eventually


def test_sends_what_is_new_and_returns_the_width(connected: CandidateClient, counting: Counting) -> None:
    found = connected.step([SequenceStep(7, [1, 2, 3], generated_token_count=1)], deadline=10)
    assert found[7].token_ids == (4, 5) and found[7].sources == ("suffix", "suffix")
    assert ask(connected, [1, 2, 3, 4, 5, 6]) == (7, 8)
    assert ask(connected, [1, 2, 3, 4, 5, 6, 7], verified_count=1) == (8, 9)
    assert ask(connected, [1, 2, 9], kept_token_count=2) == (10, 11)
    assert ask(connected, [1, 2, 9, 20], max_candidates=1) == (21,)
    assert ask(connected, [1, 2, 9, 20], fixed_width=True) == (21, 22, 23, 24)
    assert ask(connected, [1, 2, 9, 20, 21], fixed_width=True, max_candidates=3) == (22, 23, 24)
    first, second, third, fourth, *_, last = counting.steps
    assert last.sequences[0].candidate_count == 4
    assert (first.sequences[0].kept_token_count, first.sequences[0].generated_token_count) == (0, 1)
    one = second.sequences[0]
    assert (one.kept_token_count, one.token_ids[:]) == (3, [4, 5, 6])
    assert (one.candidate_step, one.candidate_count) == (first.step, 2)
    one = third.sequences[0]
    assert (one.candidate_step, one.candidate_count) == (second.step, 1)
    one = fourth.sequences[0]
    assert (one.kept_token_count, one.token_ids[:], one.candidate_count) == (2, [9], 0)


@pytest.mark.parametrize("lie", ["an unknown id", "a huge id", "too many sources", "another sequence"])
def test_candidates_that_could_harm_an_engine_are_left_out(
    counting: Counting, connected: CandidateClient, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    def wrong(step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        answer = Counting._answer(counting, step)
        (one,) = answer.sequences
        if lie == "too many sources":
            one.runs[0].token_count = 1 << 31
        elif lie == "another sequence":
            one.sequence_id = 8
        else:
            one.token_ids[1] = MODEL.vocabulary_size if lie == "an unknown id" else (1 << 32) - 1
        return answer

    counting._answer = wrong  # type: ignore[method-assign]
    assert [ask(connected, [1, 2, 3, *range(more)]) for more in range(3)] == [()] * 3
    assert connected._stream and not connected._stream.answers
    assert caplog.text.count("run a bridge of this DraftBridge's version") == (lie != "another sequence")


def test_takes_rows_of_arrays(connected: CandidateClient) -> None:
    batch = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    found = connected.step([SequenceStep(row, batch[row]) for row in range(2)], deadline=10)
    assert [found[row].token_ids for row in range(2)] == [(4, 5), (7, 8)]


def test_an_ended_sequence_begins_anew(connected: CandidateClient, counting: Counting) -> None:
    ask(connected, [1, 2, 3])
    connected.step([], ended=[7])
    assert ask(connected, [5, 6, 7]) == (8, 9)
    assert counting.steps[-2].ended_sequence_ids[:] == [7]
    assert counting.steps[-1].sequences[0].kept_token_count == 0


def test_what_the_bridge_has_dropped_is_forgotten_though_the_engine_ends_nothing(
    connected: CandidateClient, counting: Counting
) -> None:
    stream = connected._stream
    assert stream is not None
    stream.max_sequence_count = 2
    for id_ in range(20):
        assert connected.step([SequenceStep(id_, [1, 2])], deadline=10)
    assert list(stream.kept) == [18, 19] and stream.answers.keys() <= {18, 19}
    connected.step([SequenceStep(id_, [1, 2, 3]) for id_ in (19, 5, 18)], deadline=10)
    assert [one.kept_token_count for one in counting.steps[-1].sequences] == [2, 0, 2], "more in one step stay"
    assert list(stream.kept) == [19, 5, 18]


def test_a_bridge_that_has_forgotten_gets_everything_again(connected: CandidateClient, counting: Counting) -> None:
    ask(connected, [1, 2, 3])
    counting.held.clear()
    assert ask(connected, [1, 2, 3, 4]) == ()
    assert ask(connected, [1, 2, 3, 4, 5]) == (6, 7)


def test_a_forgotten_sequence_is_sent_again_once_for_all_outstanding_answers(
    connected: CandidateClient, counting: Counting
) -> None:
    ask(connected, [1, 2, 3])
    counting.held.clear()
    counting.answering.clear()
    for last in (4, 5, 6):
        ask(connected, list(range(1, last + 1)), deadline=0)
    answer = candidate_pb2.ProposeCandidates(step=2, unknown_sequence_ids=[7])
    assert connected._stream
    connected._on_candidates(connected._stream, answer)
    ask(connected, list(range(1, 8)), deadline=0)
    counting.answering.set()  # the answers to the steps 2 to 4 do not know the sequence either
    eventually(lambda: connected.counts.answer_count == 6)
    assert ask(connected, list(range(1, 9))) == (9, 10)
    assert [step.sequences[0].kept_token_count for step in counting.steps] == [0, 3, 4, 5, 0, 7]


def test_the_tokenizer_is_sent_only_when_asked_for(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_CHUNK_BYTES", 10)
    counting.wants_tokenizer = True
    with serving(counting) as address:
        client = CandidateClient(address, MODEL, b"x" * 35, engine="one")
        assert client.connect(60)
        client.close()
    assert counting.tokenizer == b"x" * 35
    assert counting.openings[0].engine == "one" and len(counting.openings[0].model.tokenizer_sha256) == 64


def test_a_message_has_limited_tokens(
    connected: CandidateClient, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_stream, "_MAX_STEP_TOKENS", 10)
    steps = [SequenceStep(id_, list(range(1, 7))) for id_ in range(2)] + [SequenceStep(2, list(range(1, 12)))]
    assert set(connected.step(steps, deadline=10)) == {0}
    assert set(connected.step(steps, deadline=10)) == {0, 1}
    assert [len(step.sequences) for step in counting.steps] == [1, 2]


def test_of_several_long_sequences_those_that_the_deadline_allows_begin(
    connected: CandidateClient, counting: Counting
) -> None:
    texts = [[id_, *range(candidate_stream._MAX_SHORT_TOKENS)] for id_ in range(3)] + [[3, 3]]

    def sent(deadline: float, *given: int) -> list[int]:
        count = len(counting.steps)
        connected.step([SequenceStep(id_, texts[id_]) for id_ in given], deadline=deadline)
        eventually(lambda: len(counting.steps) > count)
        return [one.sequence_id for one in counting.steps[-1].sequences]

    assert [sent(0, 0, 1, 2, 3) for _ in range(3)] == [[0, 3], [0, 1, 3], [0, 1, 2, 3]]
    texts += [[9, *text] for text in texts]
    assert sent(60, 4, 5, 6, 7) == [4, 5, 6, 7]


@pytest.mark.parametrize("deadline", [5000.0, float("inf")])
def test_a_long_deadline_is_that_of_the_contract(
    connected: CandidateClient, counting: Counting, deadline: float
) -> None:
    assert ask(connected, [1, 2, 3], deadline=deadline) == (4, 5)
    assert 8_000_000 < counting.steps[0].deadline_us <= 10_000_000


def test_a_late_answer_serves_a_later_step(connected: CandidateClient, counting: Counting) -> None:
    counting.answering.clear()
    assert ask(connected, [1, 2, 3], deadline=0.01) == ()
    counting.answering.set()
    eventually(lambda: connected.counts.answer_count == 1)
    assert ask(connected, [1, 2, 3, 4], deadline=0, max_candidates=0) == ()
    assert ask(connected, [1, 2, 3, 4], deadline=0, max_candidates=1) == (5,)
    assert ask(connected, [1, 2, 3, 4], deadline=0) == (5, 6)
    # It continues [1, 2, 3], so it has nothing for another continuation.
    eventually(lambda: connected.counts.answer_count == 4)
    assert ask(connected, [1, 2, 3, 9], kept_token_count=3, deadline=0) == ()


@pytest.mark.parametrize("withdrawn", [True, False])
def test_an_answer_in_time_may_withdraw_what_an_earlier_one_offered(
    counting: Counting, connected: CandidateClient, withdrawn: bool
) -> None:
    """An answer that does not name the sequence, as when the deadline was too short for it, does not."""
    assert ask(connected, [1, 2, 3]) == (4, 5)

    def without(step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        return _write_answer(Answer(step.step, withdrawn=[7] if withdrawn else []), 0)

    counting._answer = without  # type: ignore[method-assign]
    assert ask(connected, [1, 2, 3, 4]) == (() if withdrawn else (5, 6))
    assert ask(connected, [1, 2, 3, 4, 5]) == (() if withdrawn else (6, 7))
