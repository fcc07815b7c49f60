"""An engine's side of CandidateService never raises and never blocks for long, and connects again by itself."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from draftbridge import candidate_stream, candidates
from draftbridge.candidates import CandidateClient
from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc
from tests.support.counting_bridge import MODEL, Counting, ask, serving
from tests.support.ports import free_address
from tests.support.waiting import eventually


def test_a_hung_bridge_is_not_waited_for(
    connected: CandidateClient, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(connected, [1])
    counting.answering.clear()
    wait_for, waits = connected._changed.wait_for, list[float]()

    def counted(predicate: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        return wait_for(predicate, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(connected._changed, "wait_for", counted)
        for last in range(2, 200):
            ask(connected, list(range(1, last)), deadline=0.05)
    assert len(waits) <= candidate_stream.MAX_MISSED + 2, "it waits for a few of the 198 deadlines only"
    assert max(waits) <= 0.05
    assert connected.counts.late_count == 0, "there was no answer at all"
    time.sleep(0.1)  # longer than any deadline above, so that every answer to these steps is late
    assert len(counting.steps) < 2 * candidates._MAX_UNANSWERED
    counting.answering.set()

    def works_again() -> bool:
        return ask(connected, list(range(1, 201)), deadline=0.05) == (201, 202)

    eventually(works_again)
    assert connected.counts.late_count > candidate_stream.MAX_MISSED, "also answers that no step waited for"
    assert counting.held[7] == list(range(1, 201))


def test_a_bridge_that_is_slow_only_while_the_engine_computes_is_waited_for_again(
    connected: CandidateClient, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for, take, waits, waiting = connected._changed.wait_for, connected._on_candidates, list[bool](), False

    def waited(predicate: Callable[[], bool], seconds: float) -> bool:
        nonlocal waiting
        waiting = waits[-1] = True
        found = wait_for(predicate, seconds)
        waiting = False
        return found

    def late(stream: candidate_stream.EngineStream, message: candidate_pb2.ProposeCandidates) -> None:
        if not waiting:
            stream.sent[message.step] = stream.sent[message.step]._replace(until=1e-9)
        take(stream, message)

    monkeypatch.setattr(connected._changed, "wait_for", waited)
    monkeypatch.setattr(connected, "_on_candidates", late)
    counting.answering.clear()
    for last in range(3, 3 + candidate_stream.MAX_MISSED):
        waits.append(False)
        ask(connected, list(range(last)), deadline=0.02)
    counting.answering.set()
    eventually(lambda: connected.counts.answer_count == candidate_stream.MAX_MISSED)
    for last in range(10, 10 + candidate_stream.UNWAITED_STEPS + 2):
        waits.append(False)
        found = ask(connected, list(range(last)))
        assert found == ((last, last + 1) if waits[-1] else found)
    missed = [True] * candidate_stream.MAX_MISSED
    assert waits == [*missed, *[False] * (candidate_stream.UNWAITED_STEPS - 1), True, True, True]


@pytest.mark.parametrize(("awaited", "late"), [(True, False), (True, True), (False, False), (False, True)])
def test_what_messages_take_is_learned_from_answers_that_an_engine_waits_for(awaited: bool, late: bool) -> None:
    """While it computes, its own threads keep the answer waiting. Deadlines count from when the step began."""
    client, stream = CandidateClient("127.0.0.1:1", MODEL, b"{}"), candidate_stream.EngineStream()
    before, now = client._overhead_seconds, time.monotonic()
    client._patience.note(in_time=False)
    until = now - 1e-6 if late else now + 100
    stream.sent[1] = candidate_stream.SentStep(until - 4 * before if late else now - 4 * before, until, awaited)
    client._on_candidates(stream, candidate_pb2.ProposeCandidates(step=1))
    assert client._patience.missed_count == late and client.counts.late_count == late
    if awaited:
        assert client._overhead_seconds == pytest.approx(1.3 * before, rel=0.1)
        stream.sent[2] = candidate_stream.SentStep(now - before, now - before / 2, awaited)
        learned = client._overhead_seconds
        client._on_candidates(stream, candidate_pb2.ProposeCandidates(step=2))
        assert client._overhead_seconds == learned, "a late answer may have taken longer, not less"
    else:
        assert client._overhead_seconds == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_gets_no_candidates_and_never_hangs() -> None:
    """In a process of its own, because threads of other tests would not survive the fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forked_client"], timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("connect after the fork") == 1


def test_reconnects_and_logs_once(
    counting: Counting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(candidates, "_MAX_PAUSE_SECONDS", 0.1)
    with serving(counting, free_address()) as address:
        client = CandidateClient(address, MODEL, b"{}")
        assert client.connect(60)
        assert ask(client, [1, 2]) == (3, 4)
        serve, tries = client._serve, list[object]()
        monkeypatch.setattr(client, "_serve", lambda stream: tries.append(stream) or serve(stream))
        counting.lost.set()  # it ends the stream
        ask(client, [1, 2, 3])
        eventually(lambda: tries)
    eventually(lambda: not client.connected)
    assert ask(client, [1, 2, 3]) == ()
    count = len(tries)
    eventually(lambda: len(tries) > count + 1)
    counting.lost.clear()
    with serving(counting, address):
        assert client.connect(60)
        assert ask(client, [1, 2, 3, 4]) == (5, 6)
        client.close()
    assert counting.openings[0].instance == counting.openings[1].instance
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


@pytest.mark.parametrize("refused", [False, True])
def test_it_connects_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Longer ones after a refusal, which may last."""
    pauses = list[float]()

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is not client._thread:
                return super().wait(timeout)
            pauses.append(timeout or 0.0)
            if len(pauses) == 12:
                self.set()
            return self.is_set()

    def fails(stream: candidate_stream.EngineStream) -> None:
        if refused:
            raise ValueError("wrong credentials")

    client = CandidateClient("127.0.0.1:1", MODEL, b"{}")
    monkeypatch.setattr(client, "_closed", Recorded())
    monkeypatch.setattr(client, "_serve", fails)
    assert not client.connect(0)
    eventually(lambda: len(pauses) == 12)
    longest = candidates._MAX_REFUSED_PAUSE_SECONDS if refused else candidates._MAX_PAUSE_SECONDS
    assert pauses == [min(candidates._PAUSE_SECONDS * 2**place, longest) for place in range(12)]
