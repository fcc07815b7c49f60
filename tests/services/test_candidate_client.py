"""The engine's side of CandidateService, against a scripted bridge: it never raises, and never blocks for long."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from bridge.guest_step import Answer
from draftbridge import candidate_stream, candidates
from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc, model_pb2
from services.bridge.guests import _write_answer
from tests.support.ports import free_address
from tests.support.waiting import eventually

MODEL = model_pb2.Model(name="engine", context_length=64, vocabulary_size=1000)


class Scripted(candidate_pb2_grpc.CandidateServiceServicer):
    """A bridge that proposes the next four numbers after a sequence's last token, and keeps what it received."""

    def __init__(self) -> None:
        self.openings: list[candidate_pb2.ProposeOpen] = []
        self.steps: list[candidate_pb2.ProposeStep] = []
        self.tokenizer = b""
        self.wants_tokenizer = False
        self.held: dict[int, list[int]] = {}
        self.answering = threading.Event()
        self.answering.set()
        self.lost = threading.Event()

    def Propose(  # noqa: N802
        self, requests: Iterator[candidate_pb2.ProposeRequest], context: grpc.ServicerContext
    ) -> Iterator[candidate_pb2.ProposeResponse]:
        self.held.clear()
        for request in requests:
            match request.WhichOneof("kind"):
                case "open":
                    self.openings.append(request.open)
                    opened = candidate_pb2.ProposeOpened(wants_tokenizer=self.wants_tokenizer)
                    yield candidate_pb2.ProposeResponse(opened=opened)
                case "tokenizer":
                    self.tokenizer += request.tokenizer.chunk
                    if request.tokenizer.last:
                        yield candidate_pb2.ProposeResponse(opened=candidate_pb2.ProposeOpened())
                case _:
                    self.steps.append(request.step)
                    yield candidate_pb2.ProposeResponse(candidates=self._answer(request.step))
            if self.lost.is_set():
                return

    def _answer(self, step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        answer = candidate_pb2.ProposeCandidates(step=step.step)
        for one in step.sequences:
            held = self.held.setdefault(one.sequence_id, [])
            if len(held) < one.kept_token_count:
                answer.unknown_sequence_ids.append(one.sequence_id)
                continue
            held[one.kept_token_count :] = one.token_ids
            ids = [held[-1] + place for place in range(1, 5)]
            run = candidate_pb2.CandidateRun(source="suffix", token_count=4)
            answer.sequences.add(
                sequence_id=one.sequence_id, base_token_count=len(held), token_ids=ids, width=2, runs=[run]
            )
        assert self.answering.wait(30)
        return answer


@contextmanager
def serving(bridge: Scripted, address: str = "127.0.0.1:0") -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    candidate_pb2_grpc.add_CandidateServiceServicer_to_server(bridge, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        if isinstance(bridge, Scripted):
            bridge.answering.set()
        server.stop(0).wait()


@pytest.fixture
def bridge() -> Scripted:
    return Scripted()


@pytest.fixture
def connected(bridge: Scripted) -> Iterator[CandidateClient]:
    with serving(bridge) as address:
        client = CandidateClient(address, MODEL, b"{}")
        assert client.connect(60)
        yield client
        client.close()


def ask(client: CandidateClient, ids: list[int], deadline: float = 10.0, **more: object) -> tuple[int, ...]:
    found = client.step([SequenceStep(7, ids, **more)], deadline=deadline)  # type: ignore[arg-type]
    return found[7].token_ids if 7 in found else ()


def test_sends_what_is_new_and_returns_the_width(connected: CandidateClient, bridge: Scripted) -> None:
    found = connected.step([SequenceStep(7, [1, 2, 3], generated_token_count=1)], deadline=10)
    assert found[7].token_ids == (4, 5) and found[7].sources == ("suffix", "suffix")
    assert ask(connected, [1, 2, 3, 4, 5, 6]) == (7, 8)
    assert ask(connected, [1, 2, 3, 4, 5, 6, 7], verified_count=1) == (8, 9)
    assert ask(connected, [1, 2, 9], kept_token_count=2) == (10, 11)
    assert ask(connected, [1, 2, 9, 20], max_candidates=1) == (21,)
    first, second, third, fourth, _ = bridge.steps
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
    bridge: Scripted, connected: CandidateClient, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    def wrong(step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        answer = Scripted._answer(bridge, step)
        (one,) = answer.sequences
        if lie == "too many sources":
            one.runs[0].token_count = 1 << 31
        elif lie == "another sequence":
            one.sequence_id = 8
        else:
            one.token_ids[1] = MODEL.vocabulary_size if lie == "an unknown id" else (1 << 32) - 1
        return answer

    bridge._answer = wrong  # type: ignore[method-assign]
    assert [ask(connected, [1, 2, 3, *range(more)]) for more in range(3)] == [()] * 3
    assert connected._stream and not connected._stream.answers
    assert caplog.text.count("run a bridge of this DraftBridge's version") == (lie != "another sequence")


def test_takes_rows_of_arrays(connected: CandidateClient) -> None:
    batch = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    found = connected.step([SequenceStep(row, batch[row]) for row in range(2)], deadline=10)
    assert [found[row].token_ids for row in range(2)] == [(4, 5), (7, 8)]


def test_an_ended_sequence_begins_anew(connected: CandidateClient, bridge: Scripted) -> None:
    ask(connected, [1, 2, 3])
    connected.step([], ended=[7])
    assert ask(connected, [5, 6, 7]) == (8, 9)
    assert bridge.steps[-2].ended_sequence_ids[:] == [7]
    assert bridge.steps[-1].sequences[0].kept_token_count == 0


def test_what_the_bridge_has_dropped_is_forgotten_though_the_engine_ends_nothing(
    connected: CandidateClient, bridge: Scripted
) -> None:
    stream = connected._stream
    assert stream is not None
    stream.max_sequence_count = 2
    for id_ in range(20):
        assert connected.step([SequenceStep(id_, [1, 2])], deadline=10)
    assert list(stream.kept) == [18, 19] and stream.answers.keys() <= {18, 19}
    connected.step([SequenceStep(id_, [1, 2, 3]) for id_ in (19, 5, 18)], deadline=10)
    assert [one.kept_token_count for one in bridge.steps[-1].sequences] == [2, 0, 2], "more in one step stay"
    assert list(stream.kept) == [19, 5, 18]


def test_a_bridge_that_has_forgotten_gets_everything_again(connected: CandidateClient, bridge: Scripted) -> None:
    ask(connected, [1, 2, 3])
    bridge.held.clear()
    assert ask(connected, [1, 2, 3, 4]) == ()
    assert ask(connected, [1, 2, 3, 4, 5]) == (6, 7)


def test_a_forgotten_sequence_is_sent_again_once_for_all_outstanding_answers(
    connected: CandidateClient, bridge: Scripted
) -> None:
    ask(connected, [1, 2, 3])
    bridge.held.clear()
    bridge.answering.clear()
    for last in (4, 5, 6):
        ask(connected, list(range(1, last + 1)), deadline=0)
    answer = candidate_pb2.ProposeCandidates(step=2, unknown_sequence_ids=[7])
    assert connected._stream
    connected._on_candidates(connected._stream, answer)
    ask(connected, list(range(1, 8)), deadline=0)
    bridge.answering.set()  # the answers to the steps 2 to 4 do not know the sequence either
    eventually(lambda: connected.counts.answer_count == 6)
    assert ask(connected, list(range(1, 9))) == (9, 10)
    assert [step.sequences[0].kept_token_count for step in bridge.steps] == [0, 3, 4, 5, 0, 7]


def test_the_tokenizer_is_sent_only_when_asked_for(bridge: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_CHUNK_BYTES", 10)
    bridge.wants_tokenizer = True
    with serving(bridge) as address:
        client = CandidateClient(address, MODEL, b"x" * 35, engine="one")
        assert client.connect(60)
        client.close()
    assert bridge.tokenizer == b"x" * 35
    assert bridge.openings[0].engine == "one" and len(bridge.openings[0].model.tokenizer_sha256) == 64


def test_a_message_has_limited_tokens(
    connected: CandidateClient, bridge: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_stream, "_MAX_STEP_TOKENS", 10)
    steps = [SequenceStep(id_, list(range(1, 7))) for id_ in range(2)] + [SequenceStep(2, list(range(1, 12)))]
    assert set(connected.step(steps, deadline=10)) == {0}
    assert set(connected.step(steps, deadline=10)) == {0, 1}
    assert [len(step.sequences) for step in bridge.steps] == [1, 2]


def test_of_several_long_sequences_those_that_the_deadline_allows_begin(
    connected: CandidateClient, bridge: Scripted
) -> None:
    texts = [[id_, *range(candidate_stream._MAX_SHORT_TOKENS)] for id_ in range(3)] + [[3, 3]]

    def sent(deadline: float, *given: int) -> list[int]:
        count = len(bridge.steps)
        connected.step([SequenceStep(id_, texts[id_]) for id_ in given], deadline=deadline)
        eventually(lambda: len(bridge.steps) > count)
        return [one.sequence_id for one in bridge.steps[-1].sequences]

    assert [sent(0, 0, 1, 2, 3) for _ in range(3)] == [[0, 3], [0, 1, 3], [0, 1, 2, 3]]
    texts += [[9, *text] for text in texts]
    assert sent(60, 4, 5, 6, 7) == [4, 5, 6, 7]


@pytest.mark.parametrize("deadline", [5000.0, float("inf")])
def test_a_long_deadline_is_that_of_the_contract(connected: CandidateClient, bridge: Scripted, deadline: float) -> None:
    assert ask(connected, [1, 2, 3], deadline=deadline) == (4, 5)
    assert 8_000_000 < bridge.steps[0].deadline_us <= 10_000_000


def test_a_late_answer_serves_a_later_step(connected: CandidateClient, bridge: Scripted) -> None:
    bridge.answering.clear()
    assert ask(connected, [1, 2, 3], deadline=0.01) == ()
    bridge.answering.set()
    eventually(lambda: connected.counts.answer_count == 1)
    assert ask(connected, [1, 2, 3, 4], deadline=0, max_candidates=0) == ()
    assert ask(connected, [1, 2, 3, 4], deadline=0, max_candidates=1) == (5,)
    assert ask(connected, [1, 2, 3, 4], deadline=0) == (5, 6)
    # It continues [1, 2, 3], so it has nothing for another continuation.
    eventually(lambda: connected.counts.answer_count == 4)
    assert ask(connected, [1, 2, 3, 9], kept_token_count=3, deadline=0) == ()


@pytest.mark.parametrize("withdrawn", [True, False])
def test_an_answer_in_time_may_withdraw_what_an_earlier_one_offered(
    bridge: Scripted, connected: CandidateClient, withdrawn: bool
) -> None:
    """An answer that does not name the sequence, as when the deadline was too short for it, does not."""
    assert ask(connected, [1, 2, 3]) == (4, 5)

    def without(step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        return _write_answer(Answer(step.step, withdrawn=[7] if withdrawn else []), 0)

    bridge._answer = without  # type: ignore[method-assign]
    assert ask(connected, [1, 2, 3, 4]) == (() if withdrawn else (5, 6))
    assert ask(connected, [1, 2, 3, 4, 5]) == (() if withdrawn else (6, 7))


def test_a_hung_bridge_is_not_waited_for(
    connected: CandidateClient, bridge: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(connected, [1])
    bridge.answering.clear()
    wait_for, waits = connected._changed.wait_for, list[float]()

    def counted(predicate: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        return wait_for(predicate, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(connected._changed, "wait_for", counted)
        for last in range(2, 200):
            ask(connected, list(range(1, last)), deadline=0.05)
    assert len(waits) <= candidates._MAX_MISSED, "it waits for a few of the 198 deadlines only"
    assert max(waits) <= 0.05
    assert connected.counts.late_count == 0, "there was no answer at all"
    time.sleep(0.1)  # longer than any deadline above, so that every answer to these steps is late
    assert len(bridge.steps) < 2 * candidates._MAX_UNANSWERED
    bridge.answering.set()

    def works_again() -> bool:
        return ask(connected, list(range(1, 201)), deadline=0.05) == (201, 202)

    eventually(works_again)
    assert connected.counts.late_count > candidates._MAX_MISSED, "also answers that no step waited for"
    assert bridge.held[7] == list(range(1, 201))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_gets_no_candidates_and_never_hangs() -> None:
    """In a process of its own, because threads of other tests would not survive the fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forked_client"], timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("connect after the fork") == 1


def test_reconnects_and_logs_once(
    bridge: Scripted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(candidates, "_MAX_PAUSE_SECONDS", 0.1)
    with serving(bridge, free_address()) as address:
        client = CandidateClient(address, MODEL, b"{}")
        assert client.connect(60)
        assert ask(client, [1, 2]) == (3, 4)
        serve, tries = client._serve, list[object]()
        monkeypatch.setattr(client, "_serve", lambda stream: tries.append(stream) or serve(stream))
        bridge.lost.set()  # it ends the stream
        ask(client, [1, 2, 3])
        eventually(lambda: tries)
    eventually(lambda: not client.connected)
    assert ask(client, [1, 2, 3]) == ()
    count = len(tries)
    eventually(lambda: len(tries) > count + 1)
    bridge.lost.clear()
    with serving(bridge, address):
        assert client.connect(60)
        assert ask(client, [1, 2, 3, 4]) == (5, 6)
        client.close()
    assert bridge.openings[0].instance == bridge.openings[1].instance
    assert caplog.text.count("no candidates from") == 1, "its stream ended, and then nothing answered"


def test_nothing_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken: Callable[..., object] = lambda *_: 1 / 0  # noqa: E731
    client = CandidateClient("127.0.0.1:1", MODEL, b"{}")
    monkeypatch.setattr(client, "_step", broken)
    assert ask(client, [1]) == () and ask(client, [1]) == ()
    assert caplog.text.count("a bug in draftbridge.candidates") == 1
    client.close()
    nameless = CandidateClient("no address", MODEL, b"{}")
    assert not nameless.connect(0.1)
    assert ask(nameless, [1]) == ()
    nameless.close()


def test_a_refusal_is_logged_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(candidate_pb2_grpc.CandidateServiceServicer):
        def Propose(self, requests: object, context: grpc.ServicerContext) -> object:  # noqa: N802
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "another tokenizer")

    with serving(Refusing()) as address:  # type: ignore[arg-type]
        client = CandidateClient(address, MODEL, b"{}")
        eventually(lambda: client.connect(0.1) or "another tokenizer" in caplog.text)
        assert not client.connected
        client.close()


def test_a_bridge_that_fails_at_each_step_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(candidate_pb2_grpc.CandidateServiceServicer):
        def Propose(  # noqa: N802
            self, requests: Iterator[candidate_pb2.ProposeRequest], context: grpc.ServicerContext
        ) -> Iterator[candidate_pb2.ProposeResponse]:
            next(requests)
            yield candidate_pb2.ProposeResponse(opened=candidate_pb2.ProposeOpened())
            next(requests)
            context.abort(grpc.StatusCode.INTERNAL, "broken")

    monkeypatch.setattr(candidates, "_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(candidates, "_MAX_PAUSE_SECONDS", 0.2)
    caplog.set_level("INFO", "draftbridge")
    with serving(Failing()) as address:  # type: ignore[arg-type]
        client = CandidateClient(address, MODEL, b"{}")
        for _ in range(3):
            assert client.connect(60)
            ask(client, [1])
            eventually(lambda: not client.connected)
        client.close()
    assert len(caplog.records) == 2, "one connection, and one problem"
