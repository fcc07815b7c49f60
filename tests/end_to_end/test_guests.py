"""An engine and a bridge as processes: a bridge that hangs or is killed costs candidates, and they return."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from draftbridge import Client
from draftbridge.candidate_stream import MAX_MISSED
from draftbridge.candidates import CandidateClient, SequenceStep
from services.cli.processes import Fleet, launched
from tests.support import tiny
from tests.support.guests import Reciter, client, description, recite
from tests.support.ports import free_address
from tests.support.waiting import eventually, held

TEXT = ("The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore! " * 8).encode()
IDS = list(tiny.vocabulary("sentencepiece").pieces(TEXT).ids)
DEADLINE, GRACE_SECONDS = 0.05, 60


def has_candidates(guest: CandidateClient) -> bool:
    return bool(guest.step([SequenceStep(1, IDS[:150])], deadline=10.0))


def waits(guest: CandidateClient, count: int) -> int:
    """Returns how many of some steps wait for an answer. None of them waits longer than its deadline."""
    wait_for, limits = guest._changed.wait_for, list[float]()

    def counted(predicate: Callable[[], bool], seconds: float) -> bool:
        limits.append(seconds)
        return wait_for(predicate, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guest._changed, "wait_for", counted)
        for length in range(150, 150 + count):
            guest.step([SequenceStep(1, IDS[:length])], deadline=DEADLINE)
    assert all(one <= DEADLINE for one in limits)
    return len(limits)


@pytest.fixture
def guest() -> Iterator[CandidateClient]:
    found: list[CandidateClient] = []
    options = ("--until-stdin-closes", "--listen", free_address(), "--grace", str(GRACE_SECONDS))
    with launched("bridge", "bridge", *options) as (address, process):
        found.append(CandidateClient(address, description("sentencepiece"), tiny.tokenizer_json("sentencepiece")))
        assert found[0].connect(60)
        eventually(lambda: has_candidates(found[0]))
        found[0].process, found[0].address = process, address  # type: ignore[attr-defined]
        yield found[0]
    found[0].close()


def test_a_bridge_that_hangs_costs_a_few_deadlines(guest: CandidateClient) -> None:
    pid = guest.process.pid  # type: ignore[attr-defined]
    with held(pid):
        assert waits(guest, 60) <= MAX_MISSED + 2, "after a few misses it is hardly waited for"
    eventually(lambda: has_candidates(guest))


def test_a_bridge_that_is_killed_and_started_again(guest: CandidateClient, caplog: pytest.LogCaptureFixture) -> None:
    process, address = guest.process, guest.address  # type: ignore[attr-defined]
    process.kill()
    process.wait(60)
    assert waits(guest, 20) <= MAX_MISSED + 1
    eventually(lambda: not guest.connected)
    assert guest.step([SequenceStep(1, IDS[:160])]) == {}
    with launched("bridge", "bridge", "--until-stdin-closes", "--listen", address):
        eventually(lambda: has_candidates(guest))
        # Before this bridge ends as well, which is a new problem.
        logged = [
            one.getMessage() for one in caplog.records if one.name == "draftbridge" and one.levelname == "WARNING"
        ]
    assert 0 < len(logged) == len(set(logged)), "each problem is logged once"


def test_a_bridge_stops_at_once_though_an_engine_is_connected(guest: CandidateClient) -> None:
    process, started = guest.process, time.monotonic()  # type: ignore[attr-defined]
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0
    assert time.monotonic() - started < GRACE_SECONDS, "the stream does not use up the grace period"


def test_a_bridge_serves_guests_and_requests_at_once(tiny_fleet: Fleet) -> None:
    """Uses the draft of the fleet, which has another tokenizer."""
    alone = client(tiny_fleet.bridge, sources=["draft"])
    engine = Reciter(IDS[:60], 20)
    recite(alone, engine, forward_seconds=0.05)
    with Client(tiny_fleet.bridge) as requests:
        assert requests.generate("The quick brown", max_tokens=8).token_ids
    alone.close()
    assert engine.ids == IDS[:60]
    repeating = client(tiny_fleet.bridge, engine="another")
    engine = Reciter(IDS, 100)
    recite(repeating, engine)
    repeating.close()
    assert engine.accepted["suffix"] > 50
