"""What outlasts the stream of an engine, how streams end with their bridge, and what is read and written of a step."""

from collections.abc import Iterator

import pytest

from bridge.guest_step import Answer
from services.bridge import guests
from tests.support.guests import Bridge, Raw, opening, running, step
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with running() as found:
        yield found


def test_what_was_learned_about_an_engine_stays_when_it_connects_again(bridge: Bridge) -> None:
    learned = []
    for instance in (1, 2):
        stream = Raw(bridge.address, opening(instance=instance)).open()
        learned.append(bridge.servicer._estimates["", "raw", opening().open.model.tokenizer_sha256])
        stream.close()
        eventually(lambda: not bridge.servicer._connections)
    assert learned[0] is learned[1]


def test_streams_end_when_their_bridge_stops(bridge: Bridge) -> None:
    stream = Raw(bridge.address, opening()).open()
    stream.ask(step(1))
    (connection,) = bridge.servicer._connections.values()
    connection.task.get_loop().call_soon_threadsafe(bridge.servicer.end_streams)
    eventually(lambda: not bridge.servicer._connections)
    stream.close()


def test_the_times_of_a_draft_are_forgotten_when_it_has_another_speed(bridge: Bridge) -> None:
    stream = Raw(bridge.address, opening()).open()
    ((estimates, _),) = bridge.servicer._estimates.values()
    estimates.draft("small", ((1, 1_000_000),))
    estimates.draft("large", ((1, 9_000_000),))
    bridge.servicer._zoo.on_other_draft("small")
    assert list(estimates.drafts) == [("large", False)]
    stream.close()
    eventually(lambda: not bridge.servicer._connections)


def test_an_answer_names_what_is_withdrawn_and_unknown() -> None:
    answer = guests._write_answer(Answer(3, [], withdrawn=[7], unknown=[8], note="n"), 5000)
    assert [(one.sequence_id, one.width, one.token_ids[:]) for one in answer.sequences] == [(7, 0, [])]
    assert (answer.step, answer.unknown_sequence_ids[:], answer.elapsed_us, answer.note) == (3, [8], 5, "n")


def test_large_numbers_of_a_step_are_cut() -> None:
    update = guests._read_step(step(1, deadline_us=2**32 - 1, ended_sequence_ids=range(100_000)).step, 9)
    assert update.deadline_ns == 10_000_000_000, "ten seconds"
    assert update.ended == tuple(range(1 << 16))
