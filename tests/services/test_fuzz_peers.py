"""Random and mutated messages from targets and drafts: never a crash, a hang, INTERNAL, a leak or a wrong text."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DraftBridgeError
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from draftbridge.v1 import draft_pb2, target_pb2
from services.bridge.gateway import Gateway
from tests.support.fuzzing import DEADLINE_SECONDS, House, cases, leaves_nothing
from tests.support.messages import encoded
from tests.support.waiting import eventually

# A client leaves a request to a silent target after this time.
SILENT_SECONDS = 0.1
PROMPT = (70, 71, 72)
# Passes that may follow one another, so that many lies come after the truth.
PASSES = [
    target_pb2.VerifyResponse(base_token_count=len(PROMPT), token_ids=[70]),
    target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[70]),
    target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 2, token_ids=[70]),
    target_pb2.VerifyResponse(base_token_count=len(PROMPT), token_ids=[70], finish_reason=1),
    target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[70], finish_reason=1),
    target_pb2.VerifyResponse(
        base_token_count=len(PROMPT), token_ids=[70, 71], accepted_token_count=1, candidate_token_count=1, offer_id=1
    ),
]
PROPOSALS = [
    draft_pb2.DraftResponse(epoch=1, token_ids=[80], confidence=[0.9]),
    draft_pb2.DraftResponse(epoch=1, token_ids=[81, 82, 83]),
    draft_pb2.DraftResponse(epoch=2, token_ids=[80], done=True),
]


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with closing(House()) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(house: House) -> Iterator[None]:
    with leaves_nothing(house):
        yield


async def text_of(gateway: Gateway, mode: Mode, seconds: float = DEADLINE_SECONDS / 2) -> str:
    """Returns the text of a request. Raises the request's error, and `TimeoutError` for a request that hangs."""
    request = Request(PROMPT, max_tokens=10, seed=1, speculation=SpeculationParameters(mode=mode))
    text, finished = "", False
    async with asyncio.timeout(seconds), aclosing(gateway.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
            finished = isinstance(event, Finished)
    assert finished
    return text


@cases(0.1)
@given(
    messages=st.lists(encoded(target_pb2.VerifyResponse.DESCRIPTOR, PASSES), max_size=4),
    stays=st.sampled_from([False] * 9 + [True]),
    mode=st.sampled_from([Mode.OFF, Mode.LOCKSTEP, Mode.AUTO]),
)
def test_a_lying_target(house: House, messages: list[bytes], stays: bool, mode: Mode) -> None:
    house.liar.messages, house.liar.stays = messages, stays
    stream_count, outcome = house.liar.stream_count, "the text"
    try:
        house.call(text_of(house.false_target, mode, SILENT_SECONDS if stays else DEADLINE_SECONDS / 2))
    except DraftBridgeError as error:
        outcome = error.reason
    except TimeoutError:
        outcome = "silence"  # a client leaves while the target is silent
    allowed = {"the text", "TARGET_FAULT", "silence" if stays else "SERVICE_UNREACHABLE"}
    assert outcome in (allowed if messages else allowed - {"the text", "TARGET_FAULT"})
    # A client that leaves a silent target may do so before its stream has reached it.
    assert outcome == "silence" or house.liar.stream_count > stream_count, "the target that lies served the request"
    eventually(lambda: house.quiet)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.LOCKSTEP, Mode.AUTO])
@pytest.mark.parametrize(
    "lie",
    [
        target_pb2.VerifyResponse(base_token_count=len(PROMPT), token_ids=[71]),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 2, token_ids=[71]),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[71] * 10),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[2**31]),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[71], accepted_token_count=1),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[71], offer_id=9),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[71], waited_ns=2**63),
        target_pb2.VerifyResponse(base_token_count=len(PROMPT) + 1, token_ids=[71], finish_reason=2),
    ],
    ids=["repeated", "gap", "no token", "more than the credit", "unknown id", "accepted", "offer", "time", "length"],
)
def test_a_lie_of_a_target_after_the_truth_is_its_fault(
    house: House, lie: target_pb2.VerifyResponse, mode: Mode
) -> None:
    house.liar.messages, house.liar.stays = [PASSES[0].SerializeToString(), lie.SerializeToString()], False
    with pytest.raises(DraftBridgeError) as caught:
        house.call(text_of(house.false_target, mode))
    assert caught.value.reason == "TARGET_FAULT", caught.value


def test_a_target_that_keeps_to_the_protocol_is_believed(house: House) -> None:
    messages = [PASSES[0], PASSES[4]]
    house.liar.messages, house.liar.stays = [one.SerializeToString() for one in messages], False
    # The token that ends the text is not part of it.
    text = house.target.model.vocabulary.token_bytes(70).decode()
    assert house.call(text_of(house.false_target, Mode.OFF)) == text


@cases(0.1)
@given(
    messages=st.lists(encoded(draft_pb2.DraftResponse.DESCRIPTOR, PROPOSALS), max_size=4),
    stays=st.booleans(),
    mode=st.sampled_from([Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO]),
)
def test_a_lying_draft(house: House, messages: list[bytes], stays: bool, mode: Mode) -> None:
    house.liar.messages, house.liar.stays = messages, stays
    if not hasattr(house, "right"):
        house.right = house.call(text_of(house.gateway, Mode.OFF))  # type: ignore[attr-defined]
    assert house.call(text_of(house.false_draft, mode)) == house.right  # type: ignore[attr-defined]
    eventually(lambda: house.quiet)
