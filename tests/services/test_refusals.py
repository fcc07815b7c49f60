"""Tests the code, the reason and the remedy of each refusal."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from draftbridge import CallError, Client
from draftbridge.v1 import (
    bridge_pb2,
    draft_pb2,
    draft_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from services.cli.processes import Fleet
from services.rpc.status import DOMAIN

REFUSALS = [
    ({"prompt": ""}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"messages": []}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"token_ids": []}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"prompt": "a b " * 300}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    ({"prompt": "x", "max_tokens": 1000}, "INVALID_ARGUMENT", "MAX_TOKENS_TOO_LARGE"),
    ({"prompt": "x", "max_tokens": 0}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"token_ids": [1, 99_999]}, "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
    ({"token_ids": [1, 458]}, "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),  # a padding row of the matrix
    ({"prompt": "x", "temperature": -1.0}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "temperature": float("nan")}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "top_p": 0.0}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "min_p": 1.5}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "stop": [""]}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "stop": ["a"] * 65}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "logit_bias": {100_000: 1.0}}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "logit_bias": {5: float("nan")}}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "stop_token_ids": [100_000]}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "repetition_penalty": 0.0}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "top_k": -1}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "seed": 2**64}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "num_assistant_tokens": 0}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "speculation": "sideways"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": "x", "target": "nobody"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
    ({"prompt": "x", "draft": "nobody"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
    ({"prompt": "lone \ud800 surrogate"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("options", "code", "reason"), REFUSALS, ids=lambda value: str(value)[:40])
def test_wrong_requests_are_refused_with_code_reason_and_remedy(
    client: Client, options: dict, code: str, reason: str
) -> None:
    with pytest.raises(CallError) as caught:
        client.generate(**options)
    assert (caught.value.code.name, caught.value.reason) == (code, reason)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_k": -1}, "top_k must be between 0 and 4294967295, got -1"),
        ({"seed": 2**64}, "seed must be between 0 and 18446744073709551615"),
        ({"seed": -1}, "seed must be between 0"),
        ({"min_tokens": -1}, "min_tokens must be between 0"),
        ({"max_tokens": -5}, "max_tokens must be between 0"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias must hold ids between 0"),
        ({"temperature": -1.0}, "sampling.temperature must be between 0 and 100"),
        ({"top_p": 0.0}, "sampling.top_p must be above 0 and at most 1"),
        ({"logit_bias": {3: 1e39}}, r"sampling.logit_bias\[3\] must be between -1e9 and 1e4"),
        ({"repetition_penalty": 1e-46}, "sampling.repetition_penalty must be between 0.001 and 100"),
        ({"stop": ["x"] * 65}, "stop must be at most 64 strings"),
        ({"stop": [""]}, "stop must be made of non-empty strings"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_by_name_and_range(client: Client, options: dict, text: str) -> None:
    with pytest.raises(CallError, match=text):
        client.generate("x", **options)


def test_a_prompt_that_is_too_long_says_both_numbers(client: Client) -> None:
    with pytest.raises(CallError) as caught:
        client.generate("a b " * 300)
    assert caught.value.metadata["context_length"] == "256"
    assert caught.value.metadata["prompt_token_count"] in str(caught.value)
    assert "256" in str(caught.value)


def _raw(address: str, method: str, data: bytes) -> grpc.RpcError:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(method, request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data, timeout=60))
    return caught.value


def test_text_that_is_no_utf8_and_values_without_a_name_are_refused(tiny_fleet: Fleet) -> None:
    generate = "/draftbridge.v1.BridgeService/Generate"
    error = CallError.from_rpc(_raw(tiny_fleet.bridge, generate, b"\x0a\x02\xff\xfe"), "")
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION")
    assert "UTF-8" in str(error)
    request = bridge_pb2.GenerateRequest(prompt="x", speculation=bridge_pb2.Speculation(mode=77))
    error = CallError.from_rpc(_raw(tiny_fleet.bridge, generate, request.SerializeToString()), "")
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "speculation.mode")
    request = bridge_pb2.GenerateRequest(prompt="x", sampling=sampling_pb2.SamplingParameters(repetition_penalty=-1.2))
    error = CallError.from_rpc(_raw(tiny_fleet.bridge, generate, request.SerializeToString()), "")
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "sampling.repetition_penalty")


def test_errors_carry_a_google_rpc_status(tiny_fleet: Fleet) -> None:
    error = _raw(tiny_fleet.bridge, "/draftbridge.v1.BridgeService/Generate", b"")
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("EMPTY_PROMPT", DOMAIN)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == error.details()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "PROTOCOL_VIOLATION"),
        ([target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[1], credit=1))], "PROTOCOL_VIOLATION"),
        ([target_pb2.VerifyRequest(open=target_pb2.VerifyOpen())] * 2, "PROTOCOL_VIOLATION"),
        ([target_pb2.VerifyRequest(open=target_pb2.VerifyOpen(model="another"))], "MODEL_NOT_FOUND"),
        (
            [
                target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()),
                target_pb2.VerifyRequest(run=target_pb2.VerifyRun(base_token_count=3, token_ids=[1], credit=1)),
            ],
            "BASE_MISMATCH",
        ),
        (
            [
                target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()),
                target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70_000], credit=1)),
            ],
            "TOKEN_OUT_OF_RANGE",
        ),
    ],
)
async def test_a_target_refuses_wrong_streams(tiny_fleet: Fleet, messages: list, reason: str) -> None:
    async with grpc.aio.insecure_channel(tiny_fleet.target) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)
        for message in messages:
            await call.write(message)
        if not messages:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert CallError.from_rpc(caught.value, "").reason == reason


async def test_a_role_that_is_not_served_says_so(tiny_fleet: Fleet) -> None:
    for address, method in (
        (tiny_fleet.draft, lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)),
        (tiny_fleet.target, lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=60)),
    ):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(channel).read()
        error = CallError.from_rpc(caught.value, "")
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ROLE_NOT_SERVED")
    with Client(tiny_fleet.draft) as client, pytest.raises(CallError, match="is not a bridge"):
        client.generate("x")


async def test_a_draft_of_another_tokenizer_than_expected_is_refused(tiny_fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(tiny_fleet.draft) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=60)
        opening = draft_pb2.DraftOpen(model="tiny-draft", tokenizer_sha256="0" * 64)
        await call.write(draft_pb2.DraftRequest(open=opening))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert CallError.from_rpc(caught.value, "").reason == "MODEL_CHANGED"


async def test_more_sessions_than_slots_are_told_to_come_again(tiny_fleet: Fleet) -> None:
    opening = target_pb2.VerifyRequest(open=target_pb2.VerifyOpen())
    running = target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[1, 7], credit=1))
    async with grpc.aio.insecure_channel(tiny_fleet.target) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        calls = [stub.Verify() for _ in range(6)]
        for call in calls:
            await call.write(opening)
            await call.write(running)
            if call in calls[:3]:
                await call.read()
        reading = {asyncio.ensure_future(call.read()): call for call in calls[3:]}
        done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        (refused,) = done
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            refused.result()
        error = CallError.from_rpc(caught.value, "")
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOTS_EXHAUSTED")
        trailing = dict(caught.value.trailing_metadata())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.seconds == 1
        # The two calls that wait run when slots become free.
        for call in calls[:2]:
            call.cancel()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert [len(answer.token_ids) for answer in answers] == [1, 1]
        for call in calls:
            call.cancel()
