"""Random and mutated messages, in any order, to every method: never a crash, a hang, INTERNAL or a leak."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftbridge.v1 import bridge_pb2, candidate_pb2, draft_pb2, model_pb2, target_pb2
from services.model.servicer import describe
from tests.support.fuzzing import DEADLINE_SECONDS, House, cases, leaves_nothing
from tests.support.messages import encoded
from tests.support.waiting import eventually

# Responses after which a call is cancelled.
ENOUGH = 12
PROMPT = "The quick brown"
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

GENERATE = [
    bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=9),
    bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=9, speculation=bridge_pb2.Speculation(mode=3)),
    bridge_pb2.GenerateRequest(
        chat=bridge_pb2.Chat(messages=[bridge_pb2.ChatMessage(role="user", content="the dog")]), max_tokens=5
    ),
    bridge_pb2.GenerateRequest(token_ids=bridge_pb2.TokenIds(token_ids=[70, 71, 72]), max_tokens=5),
]
TRANSLATE = [
    bridge_pb2.TranslateRequest(text="the dog", source="target", target="draft"),
    bridge_pb2.TranslateRequest(token_ids=bridge_pb2.TokenIds(token_ids=[70, 71]), source="draft", target="target"),
]
VERIFY = [
    target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()),
    target_pb2.VerifyRequest(open=target_pb2.VerifyOpen(logprobs=2)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70, 71, 72], credit=5)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70], credit=2, patience_us=10**12)),
    target_pb2.VerifyRequest(run=target_pb2.VerifyRun(base_token_count=2, token_ids=[80], credit=3)),
    target_pb2.VerifyRequest(
        candidates=target_pb2.VerifyCandidates(offer_id=1, base_token_count=3, token_ids=[70, 71], width=4)
    ),
    target_pb2.VerifyRequest(grant=target_pb2.VerifyGrant(credit=2)),
]
DRAFT = [
    draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()),
    draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=1, token_ids=[70, 71], credit=4)),
    draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=2, keep_token_count=1, token_ids=[72], credit=2)),
    draft_pb2.DraftRequest(grant=draft_pb2.DraftGrant(epoch=1, credit=3)),
]
PROPOSE = [
    candidate_pb2.ProposeRequest(
        step=candidate_pb2.ProposeStep(
            step=step,
            sequences=[candidate_pb2.ProposeSequence(sequence_id=1, token_ids=[70, 71], generated_token_count=1)],
            deadline_us=deadline_us,
        )
    )
    for step, deadline_us in ((1, 0), (2, 1000))
] + [
    candidate_pb2.ProposeRequest(
        step=candidate_pb2.ProposeStep(
            step=3,
            sequences=[candidate_pb2.ProposeSequence(sequence_id=1, kept_token_count=2, token_ids=[72, 73])],
            ended_sequence_ids=[2],
        )
    ),
    candidate_pb2.ProposeRequest(tokenizer=candidate_pb2.ProposeTokenizer(chunk=b"{}", last=True)),
]


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with closing(House()) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(house: House) -> Iterator[None]:
    with leaves_nothing(house):
        yield


def check(house: House, call: Any, *, cancels: bool) -> None:
    """Reads a call's responses, and checks that it ends with an allowed status."""
    if cancels:
        call.cancel()
    try:
        for number, _ in enumerate(call):
            if number == ENOUGH:
                call.cancel()
    except grpc.RpcError:
        code, detail = call.code(), call.details()
        ours = {grpc.StatusCode.CANCELLED} if cancels or detail == "Locally cancelled by application!" else set()
        assert code in REFUSALS | ours, (code, detail)
    eventually(lambda: house.quiet)


def streams(descriptor: Any, valid: list[Any]) -> st.SearchStrategy[list[bytes]]:
    """Returns sequences of messages; most of them begin as a stream must."""
    opening = st.sampled_from([[], [valid[0].SerializeToString()], [valid[0].SerializeToString()] * 2])
    rest = st.lists(encoded(descriptor, valid), max_size=5)
    return st.tuples(opening | st.just([valid[0].SerializeToString()]), rest).map(lambda both: both[0] + both[1])


@cases(0.25)
@given(messages=streams(target_pb2.VerifyRequest.DESCRIPTOR, VERIFY), cancels=st.sampled_from([False] * 9 + [True]))
def test_verify(house: House, messages: list[bytes], cancels: bool) -> None:
    method = house.channels["target"].stream_stream("/draftbridge.v1.TargetService/Verify")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(messages=streams(draft_pb2.DraftRequest.DESCRIPTOR, DRAFT), cancels=st.sampled_from([False] * 9 + [True]))
def test_draft(house: House, messages: list[bytes], cancels: bool) -> None:
    method = house.channels["draft"].stream_stream("/draftbridge.v1.DraftService/Draft")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(data=encoded(bridge_pb2.GenerateRequest.DESCRIPTOR, GENERATE), cancels=st.sampled_from([False] * 9 + [True]))
def test_generate(house: House, data: bytes, cancels: bool) -> None:
    method = house.channels["bridge"].unary_stream("/draftbridge.v1.BridgeService/Generate")
    check(house, method(data, timeout=DEADLINE_SECONDS), cancels=cancels)


@cases(0.15)
@given(data=st.data(), cancels=st.sampled_from([False] * 9 + [True]))
def test_propose(house: House, data: st.DataObject, cancels: bool) -> None:
    model = describe(house.target, model_pb2.ROLE_TARGET)
    opening = candidate_pb2.ProposeRequest(open=candidate_pb2.ProposeOpen(engine="guest", model=model))
    messages = data.draw(streams(candidate_pb2.ProposeRequest.DESCRIPTOR, [opening, *PROPOSE]))
    method = house.channels["bridge"].stream_stream("/draftbridge.v1.CandidateService/Propose")
    check(house, method(iter(messages), timeout=DEADLINE_SECONDS), cancels=cancels)


UNARY = [
    ("bridge", "BridgeService/Translate", encoded(bridge_pb2.TranslateRequest.DESCRIPTOR, TRANSLATE)),
    ("bridge", "BridgeService/GetStatus", st.binary(max_size=8)),
    ("bridge", "BridgeService/ListModels", st.binary(max_size=8)),
    ("bridge", "BridgeService/ListPairs", st.binary(max_size=8)),
    ("target", "ModelService/GetModel", st.binary(max_size=8)),
    ("draft", "ModelService/GetTokenizer", st.binary(max_size=8)),
]


@cases(0.1)
@given(data=st.data(), which=st.sampled_from([UNARY[0]] * 5 + UNARY))
def test_other_methods(house: House, data: st.DataObject, which: Any) -> None:
    server, name, requests = which
    method = house.channels[server].unary_stream(f"/draftbridge.v1.{name}")
    check(house, method(data.draw(requests), timeout=DEADLINE_SECONDS), cancels=False)
