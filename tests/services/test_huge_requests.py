"""A message of 16 MiB, which a bridge accepts, costs its event loop no more than its parsing."""

import gc
import json
import threading
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

import pytest

from bridge.errors import InvalidField
from bridge.sampling.sampler import SamplingParameters
from bridge.text.json_objects import count_marks
from draftbridge.v1 import bridge_pb2, candidate_pb2, sampling_pb2
from services.bridge.guests import _read_step
from services.bridge.servicer import _check_counts
from services.rpc import codec, limits
from tests.support import tiny

MIB = 1 << 20


@pytest.fixture(autouse=True)
def without_the_heap_of_other_tests() -> Iterator[None]:
    """New objects cause garbage collections, whose time grows with what a process holds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def lists(count: int = 5 * MIB) -> bridge_pb2.GenerateRequest:
    variables = f'{{"x": [{"[]," * count}[]]}}'
    return bridge_pb2.GenerateRequest(chat=bridge_pb2.Chat(template_variables_json=variables))


def messages() -> bridge_pb2.GenerateRequest:
    one = bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage()]).SerializeToString()
    return bridge_pb2.GenerateRequest(chat=bridge_pb2.Chat.FromString(one * MIB))


def sampled(**fields: Any) -> bridge_pb2.GenerateRequest:
    return bridge_pb2.GenerateRequest(prompt="x", sampling=sampling_pb2.SamplingParameters(**fields))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lists, "the prompt"),
        (messages, "chat.messages"),
        (lambda: bridge_pb2.GenerateRequest(token_ids=bridge_pb2.TokenIds(token_ids=b"F" * (8 * MIB))), "the prompt"),
        (lambda: bridge_pb2.GenerateRequest(prompt="x", stop=[""] * MIB), "stop"),
        (lambda: bridge_pb2.GenerateRequest(prompt="x", drafts=[""] * MIB), "drafts"),
        (lambda: sampled(logit_bias=dict.fromkeys(range(MIB), 1.0)), "sampling.logit_bias"),
        (lambda: sampled(stop_token_ids=b"F" * (8 * MIB)), "sampling.stop_token_ids"),
        (lambda: sampled(choice=sampling_pb2.Choice(texts=[""] * MIB)), "sampling.choice"),
    ],
    ids=["lists", "messages", "ids", "stop", "drafts", "logit_bias", "stop_token_ids", "choice"],
)
def test_what_would_take_long_to_convert_is_refused_by_its_size(
    build: Callable[[], bridge_pb2.GenerateRequest], field: str
) -> None:
    data = build().SerializeToString()
    started = thread_time()
    request = bridge_pb2.GenerateRequest.FromString(data)
    parsed = thread_time()
    with pytest.raises(InvalidField) as caught:
        _check_counts(request, 4 * MIB, 262_144)
    assert thread_time() - parsed < (parsed - started) + 0.02
    assert caught.value.metadata["field"] == field


def test_json_with_more_values_than_a_chat_may_have_is_not_parsed() -> None:
    chat = lists(MIB).chat
    started = thread_time()
    with pytest.raises(InvalidField, match=r"^the prompt must be a chat with at most 65536 commas"):
        codec.read_chat(chat)
    assert thread_time() - started < 0.05
    text = {"arguments": "a, b, c, [d] " * 20_000}
    assert codec.read_chat(bridge_pb2.Chat(template_variables_json=json.dumps(text))).variables == text


def test_the_json_of_many_short_messages_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count for each message took four times as long."""
    counted = list[bytes]()

    def count(data: bytes) -> tuple[int, int]:
        counted.append(data)
        return count_marks(data)

    monkeypatch.setattr(codec, "count_marks", count)
    chat = bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage()] * 10_000)
    monkeypatch.setattr(codec, "read_object", lambda *_: pytest.fail("a message without JSON was parsed"))
    assert len(codec.read_chat(chat).messages) == 10_000
    assert len(counted) == 1


def test_a_step_is_cut_to_what_the_bridge_can_hold() -> None:
    one = candidate_pb2.ProposeStep(sequences=[candidate_pb2.ProposeSequence(sequence_id=1)]).SerializeToString()
    data = one * MIB + candidate_pb2.ProposeStep(ended_sequence_ids=b"F" * MIB).SerializeToString()
    started = thread_time()
    step = candidate_pb2.ProposeStep.FromString(data)
    parsed = thread_time()
    update = _read_step(step, 4096)
    assert thread_time() - parsed < (parsed - started) + 0.05
    assert (len(update.sequences), len(update.ended)) == (4096, 1 << 16)
    long = candidate_pb2.ProposeSequence(token_ids=b"F" * (700_000))
    assert len(_read_step(candidate_pb2.ProposeStep(sequences=[long, long]), 4096).sequences) == 1


def test_biases_for_a_whole_vocabulary_are_checked_quickly() -> None:
    message = sampled(logit_bias=dict.fromkeys(range(260_000), 1.0)).sampling
    times = []
    for _ in range(3):
        started = thread_time()
        parameters = codec.read_sampling(message)
        converted = thread_time()
        parameters.checked()
        times.append((converted - started, thread_time() - converted))
    conversion, check = map(min, zip(*times, strict=True))
    assert check < 0.25 * conversion  # a tenth; a loop over the biases took half


async def test_biases_for_a_whole_vocabulary_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = codec.read_sampling, []

    def noted(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
        threads.append(threading.current_thread())
        return read(message)

    monkeypatch.setattr(codec, "read_sampling", noted)
    monkeypatch.setattr(limits, "_MAX_INLINE_IDS", 5)
    for count in (5, 6):
        message = sampled(logit_bias=dict.fromkeys(range(count), 1.0)).sampling
        parameters = await limits.read_sampling(message, tiny.model("byte_level"))
        assert parameters.logit_bias == dict.fromkeys(range(count), 1.0)
    here, elsewhere = threads
    assert here is threading.current_thread() is not elsewhere
