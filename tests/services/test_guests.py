"""CandidateService over real streams: engines get candidates in their own ids, and cannot harm the bridge or others."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from bridge.guest_sequence import GuestSequence
from draftbridge.candidates import SequenceStep
from draftbridge.v1 import candidate_pb2, model_pb2
from services.bridge.guests import CandidateServicer
from services.bridge.zoo import Zoo
from services.errors import DraftAway
from services.guests.budget import GuestLimits
from services.metrics import BridgeMetrics
from services.rpc.gate import CALLER
from tests.support import tiny
from tests.support.guests import Bridge, Raw, Reciter, client, description, named, opening, recite, running, step
from tests.support.waiting import eventually

REPETITIVE = ("The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore! " * 6).encode()
# What an engine reports of its forwards: long, so that a draft is worth using also if a busy machine slows it down.
FORWARD_SECONDS = 2.0
FRESH = ("Grüße aus Köln: naïve café, señor, 1234 of them, for $56.78 by the sea shore! He said hello, world.").encode()


def truth(data: bytes, kind: str = "sentencepiece") -> list[int]:
    return list(tiny.vocabulary(kind).pieces(data).ids)


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with running() as found:
        yield found


def test_what_repeats_is_proposed(bridge: Bridge) -> None:
    ids = truth(REPETITIVE)
    engine = Reciter(ids, len(ids) // 4)
    guest = client(bridge.address)
    recite(guest, engine)
    guest.close()
    assert engine.accepted["suffix"] > 0.6 * (len(ids) - engine.prompt_count)
    assert engine.forward_count < 0.5 * (len(ids) - engine.prompt_count)


def test_many_sequences_share_a_forward(bridge: Bridge) -> None:
    ids = truth(REPETITIVE)
    engines = [Reciter(ids[: 150 + 3 * number], 100, number) for number in range(1, 20)]
    guest = client(bridge.address)
    recite(guest, *engines)
    guest.close()
    plain = sum(len(one.truth) - one.prompt_count for one in engines)
    assert sum(one.forward_count for one in engines) < 0.8 * plain


def test_a_draft_of_another_tokenizer_runs_ahead() -> None:
    ids = truth(FRESH)
    with running(draft_text=FRESH) as found:
        guest = client(found.address)
        engine = Reciter(ids, 8)
        recite(guest, engine, forward_seconds=FORWARD_SECONDS)
        guest.close()
    assert engine.accepted.get("draft", 0) > 0.2 * (len(ids) - 8)


def test_a_draft_leaves_a_sequence_that_is_no_longer_named() -> None:
    ids = truth(FRESH)
    with running(GuestLimits(draft_count=1), draft_text=FRESH) as found:
        guest = client(found.address)
        for number in (1, 2, 3):  # each ends when its text does, which the engine does not report
            engine = Reciter(ids, 8, number)
            recite(guest, engine, forward_seconds=FORWARD_SECONDS)
            assert engine.accepted.get("draft", 0) > 0.2 * (len(ids) - 8)
        assert len(found.servicer._drafts._users) == 1
        guest.close()
        eventually(lambda: not found.servicer._drafts._users)


def test_a_draft_that_comes_free_goes_to_a_sequence_without() -> None:
    ids = truth(FRESH)
    with running(GuestLimits(draft_count=1), draft_text=FRESH) as found:
        first, second = client(found.address), client(found.address, engine="another")
        assert first.step([SequenceStep(1, ids[:8])], deadline=10.0) is not None
        eventually(lambda: opened(found, 1))
        other = Reciter(ids[:12], 8, 2)
        recite(second, other, forward_seconds=FORWARD_SECONDS)
        assert not other.accepted.get("draft"), "the first engine's last step named the sequence with the draft"
        first.close()
        eventually(lambda: not found.servicer._drafts._users)
        other = Reciter(ids, len(other.ids), 2)
        recite(second, other, forward_seconds=FORWARD_SECONDS)
        assert other.accepted.get("draft")
        second.close()


def test_a_named_draft_that_is_away_takes_part_once_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str) -> NoReturn:
        raise DraftAway(name, "later:50052", "it does not answer")

    engine = Reciter(truth(FRESH)[:40], 8)
    with running(draft_text=FRESH) as found:
        with monkeypatch.context() as patch:
            patch.setattr(found.servicer._zoo, "draft", away)
            guest = client(found.address, draft="reciting")
            assert guest.step([engine.step()], deadline=10.0) == {}
        recite(guest, engine, forward_seconds=FORWARD_SECONDS)
        guest.close()
    assert engine.accepted.get("draft")


@pytest.fixture
def raw(bridge: Bridge) -> Iterator[Raw]:
    stream = Raw(bridge.address, opening())
    yield stream.open()
    stream.close()
    eventually(lambda: ("", "raw") not in bridge.servicer._connections)


def lengthened(field: str, items: Iterable[object]) -> model_pb2.Model:
    """Returns the description of a model with a list that is longer than that of any."""
    model = description("byte_level")
    getattr(model, field).extend(items)
    return model


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": ""}, "INVALID_FIELD"),
        ({"engine": "a\nb"}, "INVALID_FIELD"),
        ({"model": model_pb2.Model(context_length=1, vocabulary_size=1)}, "INVALID_FIELD"),
        ({"sources": ["oracle"]}, "INVALID_FIELD"),
        ({"model": lengthened("forward_costs", [model_pb2.ForwardCost(token_count=1)] * 65)}, "INVALID_FIELD"),
        ({"model": lengthened("compute_units", map(str, range(4097)))}, "INVALID_FIELD"),
        ({"draft": "nobody"}, "MODEL_NOT_FOUND"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(bridge: Bridge, changes: dict[str, object], reason: str) -> None:
    stream = Raw(bridge.address, opening(**changes))
    assert stream.error()[1] == reason
    stream.close()


def test_a_tokenizer_other_than_named_is_refused(bridge: Bridge) -> None:
    model = description("sentencepiece")
    model.tokenizer_sha256 = "0" * 64
    stream = Raw(bridge.address, opening(model=model))
    assert next(stream.call).opened.wants_tokenizer
    piece = candidate_pb2.ProposeTokenizer(chunk=tiny.tokenizer_json("unigram"), last=True)
    stream.outbox.put(candidate_pb2.ProposeRequest(tokenizer=piece))
    assert stream.error() == (grpc.StatusCode.FAILED_PRECONDITION, "CHECKSUM_MISMATCH")
    stream.close()


def test_another_tokenizer_than_named_costs_the_candidates(bridge: Bridge, caplog: pytest.LogCaptureFixture) -> None:
    """The engine describes the smaller of two vocabularies, and generates in the larger one."""
    size = tiny.vocabulary("byte_level").size
    known = [id_ for id_ in truth(REPETITIVE) if id_ < size][:100]
    liar = client(bridge.address, kind="byte_level", engine="liar")
    engine = Reciter([*known, size, *known * 2], 100)
    recite(liar, engine)
    assert engine.forward_count >= 200, "no candidates after the first id that the vocabulary lacks"
    assert caplog.text.count("describe the engine's own model and tokenizer") == 2, "once here, once in the bridge"
    liar.close()


def test_an_unknown_id_costs_its_sequence_the_candidates(raw: Raw, bridge: Bridge) -> None:
    good = truth(REPETITIVE)[:150]
    answer = raw.ask(step(1, named(1, 0, [5, 2**32 - 1]), named(2, 0, good)))
    assert "outside the tokenizer's vocabulary" in answer.note
    number = 1

    def proposed() -> list[int]:
        nonlocal number
        number += 1
        return [one.sequence_id for one in raw.ask(step(number, named(1, 2, []), named(2, 150, []))).sequences]

    eventually(lambda: proposed() == [2])


def test_a_long_prompt_with_an_unknown_id_costs_its_candidates(raw: Raw) -> None:
    ids = (truth(REPETITIVE) * 10)[:2000]
    assert not raw.ask(step(1, named(1, 0, ids))).note
    assert raw.ask(step(2, named(1, 0, [*ids, tiny.vocabulary("sentencepiece").size]))).note
    assert "context" in raw.ask(step(3, named(2, 0, ids * 3))).note


def test_a_sequence_that_goes_back_further_than_it_was_is_asked_for(raw: Raw) -> None:
    ids = truth(REPETITIVE)
    raw.ask(step(1, named(1, 0, ids[:50])))
    assert raw.ask(step(2, named(1, 60, ids[60:61]))).unknown_sequence_ids[:] == [1]
    assert raw.ask(step(3, named(1, 50, []))).unknown_sequence_ids[:] == [1], "the bridge has dropped the sequence"
    assert raw.ask(step(4, named(1, 0, ids[:150]))).unknown_sequence_ids[:] == []
    # An engine may go back within a sequence.
    assert raw.ask(step(5, named(1, 100, ids[100:140]))).unknown_sequence_ids[:] == []
    number = 5

    def proposed() -> list[int]:
        nonlocal number
        number += 1
        return [id_ for one in raw.ask(step(number, named(1, 140, []))).sequences for id_ in one.token_ids]

    eventually(lambda: proposed()[:3] == ids[140:143])


def test_steps_out_of_order_are_refused(raw: Raw) -> None:
    raw.ask(step(7))
    raw.outbox.put(step(7))
    assert raw.error()[1] == "PROTOCOL_VIOLATION"


def test_two_engines_with_one_name(raw: Raw, bridge: Bridge) -> None:
    second = Raw(bridge.address, opening(instance=2))
    assert second.error() == (grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_NAME_TAKEN")
    second.close()
    assert raw.ask(step(1)).step == 1, "the first engine is not disturbed"
    # The same engine replaces its first connection, even if the bridge still considers that one alive.
    again = Raw(bridge.address, opening(instance=1)).open()
    assert again.ask(step(1)).step == 1
    assert raw.error()[1] == "ENGINE_NAME_TAKEN"
    again.close()


def test_an_engine_that_never_reads_disturbs_nobody(raw: Raw, bridge: Bridge) -> None:
    ids = truth(REPETITIVE)
    raw.outbox.put(step(1, *(named(number, 0, ids[:150]) for number in range(300))))
    for number in range(2, 3000):
        raw.outbox.put(step(number, *(named(one, 150, []) for one in range(300))))
    guest = client(bridge.address)
    engine = Reciter(ids, 60)
    recite(guest, engine)
    guest.close()
    assert engine.accepted["suffix"] > 0.5 * len(ids)


def test_sequences_end_with_their_stream_when_idle_and_at_the_limit() -> None:
    ids = truth(REPETITIVE)[:60]
    with running(GuestLimits(sequence_count=3, idle_seconds=3.0)) as found:
        stream = Raw(found.address, opening()).open()
        held = found.servicer._budget
        assert "first 3 sequences" in stream.ask(step(1, *(named(number, 0, ids) for number in range(9)))).note
        stream.ask(step(2, named(3, 0, ids), named(4, 0, ids)))
        assert held.count == 3
        assert stream.ask(step(3, named(0, 60, []), named(4, 60, []))).unknown_sequence_ids[:] == [0]
        stream.ask(step(4, ended_sequence_ids=[4]))
        assert held.count == 2
        eventually(lambda: held.count == 0)
        stream.ask(step(5, named(8, 0, ids)))
        stream.close()
        eventually(lambda: held.count == 0 and held._bytes == 0)


def test_sequences_that_cannot_be_followed_count_too() -> None:
    with running(GuestLimits(sequence_count=3)) as found:
        stream = Raw(found.address, opening()).open()
        stream.ask(step(1, *(named(number, 0, [2**32 - 1]) for number in range(3))))
        stream.ask(step(2, *(named(number, 0, [2**32 - 1]) for number in range(3, 6))))
        assert found.servicer._budget.count == 3
        stream.close()


def test_a_step_that_ends_its_own_sequences_holds_up_nobody() -> None:
    """New sequences of a step end an older one that the same step continues."""
    ids = truth(REPETITIVE)[:60]
    with running(GuestLimits(sequence_count=2)) as found:
        stream = Raw(found.address, opening()).open()
        stream.ask(step(1, named(1, 0, ids)))
        eventually(lambda: opened(found, 1))
        stream.ask(step(2, named(1, 60, ids[:1]), named(2, 0, ids)))
        stream.ask(step(3, named(3, 0, ids), named(4, 0, ids)))
        stream.ask(step(4, named(5, 0, ids), named(6, 0, ids)))
        assert stream.ask(step(5, named(6, 60, []))).unknown_sequence_ids[:] == []
        assert found.servicer._budget.count == 2
        stream.close()
        eventually(lambda: found.servicer._budget.count == 0)


def test_many_new_sequences_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()

    def waiting(*arguments: Any) -> GuestSequence:
        going_on.wait(120)
        return GuestSequence(*arguments)

    monkeypatch.setattr("services.bridge.guests.GuestSequence", waiting)
    ids = truth(REPETITIVE)[:8]
    with running() as found:
        stream = Raw(found.address, opening()).open()
        stream.ask(step(1, *(named(number, 0, ids) for number in range(40))))
        # The bridge reads another engine's tokenizer in a thread.
        client(found.address, kind="unigram", engine="another").close()
        assert not opened(found, 0)
        going_on.set()
        eventually(lambda: opened(found, 39))
        stream.close()


def opened(bridge: Bridge, id_: int) -> bool:
    held = next((guest.held[one] for guest, one in bridge.servicer._budget._held if one == id_), None)
    return held is not None and held.sequence is not None


def piece(data: bytes, last: bool = True) -> candidate_pb2.ProposeRequest:
    return candidate_pb2.ProposeRequest(tokenizer=candidate_pb2.ProposeTokenizer(chunk=data, last=last))


def test_one_tokenizer_arrives_at_a_time_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bridge.guest_tokenizers.ARRIVAL_SECONDS", 2.0)
    with running() as found:
        slow = Raw(found.address, opening(engine="slow", model=unknown("0" * 64)), piece(b"{", last=False))
        assert next(slow.call).opened.wants_tokenizer
        eventually(lambda: found.servicer._tokenizers._turn.locked())
        honest = Raw(found.address, opening()).open()
        assert slow.error()[1] == "PROTOCOL_VIOLATION"
        assert honest.ask(step(1)).step == 1
        slow.close()
        honest.close()


def unknown(sha256: str) -> model_pb2.Model:
    model = description("sentencepiece")
    model.tokenizer_sha256 = sha256
    return model


def test_tokenizers_share_a_limit_of_memory() -> None:
    data = tiny.tokenizer_json("sentencepiece")
    with running(GuestLimits(memory_bytes=16 * len(data) + 16_000)) as found:
        first = Raw(found.address, opening()).open()
        other = data + b" "
        again = opening(engine="other", model=unknown(hashlib.sha256(other).hexdigest()))
        refused = Raw(found.address, again, piece(other))
        assert refused.error() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKENIZERS_FULL")
        giant = Raw(found.address, opening(engine="giant", model=unknown("0" * 64)), piece(data * 2))
        assert giant.error()[1] == "TOKENIZER_NOT_UNDERSTOOD"
        first.close()
        eventually(lambda: not found.servicer._connections)
        second = Raw(found.address, again, piece(other))
        assert [next(second.call).opened.wants_tokenizer for _ in range(2)] == [True, False]
        for stream in (refused, giant, second):
            stream.close()


def test_keys_do_not_share_the_names_of_engines(tmp_path: Path) -> None:
    keys, tokens = tmp_path / "keys.toml", ("alice-0123456789abcdef", "bob-0123456789abcdef")
    keys.write_text("".join(f'[{token.partition("-")[0]}]\ntoken = "{token}"\n' for token in tokens))
    with running(keys=keys) as found:
        streams = [Raw(found.address, opening(instance=7), token=token).open() for token in tokens]
        for stream in streams:
            assert stream.ask(step(1)).step == 1
            stream.close()
        eventually(lambda: not found.servicer._connections)


async def test_an_engine_with_a_key_that_vanishes_leaves_its_name() -> None:
    servicer = CandidateServicer(Zoo([], []), GuestLimits(), BridgeMetrics())

    async def requests() -> AsyncIterator[candidate_pb2.ProposeRequest]:
        yield opening()

    async def begin() -> AsyncGenerator[candidate_pb2.ProposeResponse, None]:
        CALLER.set("alice")
        answers = servicer.Propose(requests(), None)
        assert (await anext(answers)).opened.wants_tokenizer
        return answers

    answers = await asyncio.create_task(begin())
    assert list(servicer._connections) == [("alice", "raw")]
    await answers.aclose()  # as asyncio does with a call that was cancelled while it sent an answer: in another task
    assert not servicer._connections
