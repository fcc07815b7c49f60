"""A message of 16 MiB, which a bridge accepts, costs its event loop no more than its parsing."""

import gc
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

import pytest

from bridge.errors import InvalidField
from draftbridge.v1 import bridge_pb2, candidate_pb2, sampling_pb2
from services.bridge.guests import _read_step
from services.bridge.servicer import _check_counts
from services.rpc import codec

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
