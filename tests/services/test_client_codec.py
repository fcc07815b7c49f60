"""What a client of a bridge sends and receives is what the bridge reads and writes, field by field."""

import json
from dataclasses import fields

import pytest

from bridge.errors import InvalidField
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import FinishReason, Logprob
from bridge.request import Request
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.statistics import DraftChoice, PlanStatistics, SourceStatistics, Statistics
from bridge.text.chat import Chat, Message
from bridge.text.stream import Span
from draftbridge.messages import generate_request
from draftbridge.v1 import bridge_pb2
from services.bridge.servicer import _read_request
from services.rpc import client_codec, codec

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
SAMPLING = SamplingParameters(0.5, 3, 0.75, 0.25, 1.5, -0.5, 0.5, {7: -3.0}, 2, (5,), True, GRAMMAR)
SPECULATION = SpeculationParameters(Mode.LOCKSTEP, 3, 0.25, 0.5, ("draft",))
ORDERED = {key: [1.0, 2**53 + 1, -0.0, {"b": None, "a": "😀"}] for key in ("type", "function", "b", "a", "c")}
CHAT = Chat((Message("user", "a", {"tool_calls": [ORDERED]}), Message("user", "b")), {"tools": [ORDERED], "a": 1})
STATISTICS = Statistics(
    target_pass_count=1, num_drafts=2, num_draft_tokens=3, num_accepted_tokens=4, accepted_byte_count=5, verify_ns=6,
    num_accepted_tokens_per_position=[1, 2], bridge_ns=7, waited_ns=8, network_ns=9, near_ties=10, note="note",
    cached_token_count=11, plan_summary="summary", current_plan="plain", drafts=["a", "b"],
    sources={"draft": SourceStatistics("draft", 5, 1, 2, 3, 4, 6)},
    plans={"plain": PlanStatistics("plain", 1, 2, 3, 4.5, 5.5, 6.5)},
    draft_choice=DraftChoice("a", 1.5, "b", 0.5, True, 3.0),
)  # fmt: skip


@pytest.mark.parametrize("input_", ["text", (1, 2), CHAT])
def test_a_request(input_: str | tuple[int, ...] | Chat) -> None:
    request = Request(input_, SAMPLING, 2**64 - 1, 9, ("x", "y"), 2, SPECULATION, "tenant", True)
    given = [name for name in (one.name for one in fields(Request)) if getattr(request, name) in ("", (), False)]
    assert given == [], "every field is tried"
    assert _read_request(client_codec.write_request(request, "model")) == request
    assert _read_request(client_codec.write_request(Request(input_, seed=0), "")) == Request(input_, seed=0)


def test_json_of_a_chat_keeps_the_order_of_keys_and_its_numbers() -> None:
    data = client_codec.write_request(Request(CHAT), "").SerializeToString()
    chat = _read_request(bridge_pb2.GenerateRequest.FromString(data)).input
    assert isinstance(chat, Chat)
    received, given = (json.dumps([one.messages[0].fields, one.variables]) for one in (chat, CHAT))
    assert received == given
    sent = generate_request(messages=[{"content": "a", "role": "user", **ORDERED}], template_variables={"x": ORDERED})
    chat = codec.read_chat(sent.chat)
    assert json.dumps([chat.messages[0].fields, chat.variables["x"]]) == json.dumps([ORDERED, ORDERED])


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_json_that_the_bridge_cannot_use_is_refused_by_its_field(text: str) -> None:
    message = bridge_pb2.ChatMessage(fields_json=text)
    with pytest.raises(InvalidField, match=r"^chat\.messages\[1\]\.fields_json must be the text of a JSON object"):
        codec.read_chat(bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage(), message]))
    with pytest.raises(InvalidField) as caught:
        codec.read_chat(bridge_pb2.Chat(template_variables_json=text))
    assert caught.value.metadata["field"] == "chat.template_variables_json"


def test_what_is_received() -> None:
    assert all(getattr(STATISTICS, one.name) != one.default for one in fields(STATISTICS)), "every field is tried"
    finished = Finished(FinishReason.LENGTH, 1, 2, 3, 4, 5, Mode.OPPORTUNISTIC, STATISTICS)
    assert client_codec.read_finished(codec.write_finished(finished)) == finished
    delta = Delta("a😀", (1, 2), (Logprob(-0.5, ((3, -0.5),)), Logprob(-1.5)), (Span("draft", 5),))
    assert client_codec.read_delta(codec.write_delta(delta)) == delta
    running = client_codec.read_delta(codec.write_delta(Delta("", (), progress=STATISTICS))).progress
    assert running and running.plans == STATISTICS.plans and running.drafts == STATISTICS.drafts
