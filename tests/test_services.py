"""Real processes, real gRPC over loopback: what works, what is refused and how, and what is freed."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from draftbridge import AsyncClient, CallError, Client
from draftbridge.v1 import (
    bridge_pb2,
    bridge_pb2_grpc,
    draft_pb2,
    draft_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from services.bridge.servicer import BridgeServicer
from services.draft.servicer import DraftServicer
from services.model.servicer import ModelServicer
from services.processes import Fleet
from services.status import DOMAIN
from services.target.servicer import TargetServicer
from tests.tiny import own_ids, vocabulary
from tests.waiting import eventually

PROMPT = "The quick brown fox"


@pytest.fixture
def client(tiny_fleet: Fleet):
    with Client(tiny_fleet.bridge) as client:
        yield client


PENALTIES = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {10: 1.5},
    "min_tokens": 30, "stop_token_ids": [40, 41, 42, 43], "ignore_eos": True,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, PENALTIES, {"top_k": 0, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_every_mode_gives_the_same_text(client: Client, temperature: float, options: dict) -> None:
    results = {
        mode: client.generate(PROMPT, max_tokens=40, speculation=mode, temperature=temperature, seed=3, **options)
        for mode in ("off", "lockstep", "opportunistic", "auto")
    }
    assert len({(one.text, one.token_ids) for one in results.values()}) == 1
    assert results["lockstep"].finished.speculation.num_drafts > 0
    assert results["off"].started.draft == ""
    assert results["lockstep"].started.draft == "tiny-draft"


def test_the_drafts_temperature_changes_no_text(client: Client) -> None:
    options = {"max_tokens": 30, "temperature": 1.0, "seed": 8, "speculation": "lockstep"}
    results = [client.generate(PROMPT, draft_temperature=one, **options) for one in (None, 0.0, 2.0)]
    assert len({one.text for one in results}) == 1
    guessed = {tuple(one.finished.speculation.num_accepted_tokens_per_position) for one in results}
    assert len(guessed) > 1, "it changes what the draft says"
    with pytest.raises(CallError, match="draft_temperature must be between 0 and 100"):
        client.generate(PROMPT, draft_temperature=-1.0)


def test_without_a_seed_one_is_drawn_and_reported(client: Client) -> None:
    first = client.generate(PROMPT, max_tokens=20, temperature=1.0)
    again = client.generate(PROMPT, max_tokens=20, temperature=1.0, seed=first.started.seed)
    other = client.generate(PROMPT, max_tokens=20, temperature=1.0)
    assert first.text == again.text
    assert first.text != other.text


def test_ids_and_chats_are_taken_too(client: Client) -> None:
    by_text = client.generate(PROMPT, max_tokens=12)
    ids = own_ids("sentencepiece", PROMPT, framed=True)
    assert client.generate(token_ids=ids, max_tokens=12).token_ids == by_text.token_ids
    chat = client.generate(messages=[{"role": "user", "content": "hello <eos>"}], max_tokens=12)
    assert chat.started.prompt_token_count > 5


def test_logprobs_are_reported_for_each_token(client: Client) -> None:
    deltas = [
        event
        for event in client.stream(PROMPT, max_tokens=10, logprobs=3)
        if isinstance(event, bridge_pb2.GenerateDelta)
    ]
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
        for id_, one in zip(delta.token_ids, delta.logprobs, strict=True):
            assert one.top_logprobs[0].token_id == id_  # greedy
            assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)
            assert len(one.top_logprobs) == 3


def test_a_stop_string_ends_the_text(client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=40).text
    stop = whole[10:12]
    result = client.generate(PROMPT, max_tokens=40, stop=[stop])
    assert result.text == whole[: whole.index(stop)]
    assert result.finished.finish_reason == sampling_pb2.FINISH_REASON_STOP


def test_models_pairs_status_and_translate(client: Client) -> None:
    models = {model.name: model for model in client.models()}
    assert set(models) == {"tiny-target", "tiny-draft"}
    assert models["tiny-target"].vocabulary_size == vocabulary("sentencepiece").size + 8
    assert models["tiny-target"].dtype == "float32"
    assert [(pair.target, pair.draft, pair.same_tokenizer) for pair in client.pairs()] == [
        ("tiny-target", "tiny-draft", False)
    ]
    status = client.status()
    assert all(endpoint.reachable for endpoint in status.endpoints)
    answer = client.translate("the dog 🎉", source="tiny-target", target="tiny-draft")
    for tokens in (answer.source_tokens, answer.target_tokens):
        assert b"".join(token.data for token in tokens) == "the dog 🎉".encode()
        assert [token.byte_offset for token in tokens] == [
            sum(len(one.data) for one in tokens[:index]) for index in range(len(tokens))
        ]
    # Ids in: control tokens go by their role, what has bytes by its bytes.
    ids = [1, *(token.token_id for token in answer.source_tokens), 2]
    back = client.translate(token_ids=ids, source="tiny-target", target="tiny-draft")
    assert [token.token_id for token in back.target_tokens] == [
        1, *(token.token_id for token in answer.target_tokens), 2
    ]  # fmt: skip
    assert [len(token.data) for token in back.source_tokens][:: len(ids) - 1] == [0, 0]


def test_a_prompt_that_comes_again_is_found_in_both_prefix_caches(client: Client) -> None:
    def hits() -> dict[str, int]:
        return {one.tokenizer_sha256: one.hit_byte_count for one in client.status().prefix_caches}

    system = "The quick brown fox jumps over the lazy dog. " * 6
    client.generate(system, max_tokens=2)
    before = hits()
    client.generate(system + "She sells", max_tokens=2)
    grown = {sha256: count - before[sha256] for sha256, count in hits().items()}
    assert len(grown) == 2
    assert all(count > len(system) // 2 for count in grown.values())


def test_a_chat_takes_what_its_template_knows_besides(client: Client) -> None:
    messages = [{"role": "user", "content": "the dog", "name": "<eos>Ann", "tool_calls": [{"n": 1}]}]
    alone = client.generate(messages=messages[:1], template_variables={"tools": [{"name": "f"}]}, max_tokens=8)
    assert alone.text == client.generate(messages=[{"role": "user", "content": "the dog"}], max_tokens=8).text
    with pytest.raises(CallError, match="add_generation_prompt"):
        client.generate(messages=messages, template_variables={"add_generation_prompt": False})
    with pytest.raises(CallError, match="go with messages"):
        client.generate("x", template_variables={"tools": []})
    with pytest.raises(CallError, match="surrogates"):
        client.generate("a\ud800b")


async def test_the_asynchronous_client_does_the_same(tiny_fleet: Fleet) -> None:
    async with AsyncClient(tiny_fleet.bridge) as client:
        results = await asyncio.gather(*(client.generate(PROMPT, max_tokens=15) for _ in range(3)))
        assert len({one.text for one in results}) == 1
        assert len(await client.models()) == 2
        with pytest.raises(CallError):
            await client.generate("")


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
            list(call(data, timeout=10))
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
    from google.rpc import error_details_pb2, status_pb2

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
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=10)
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
        (tiny_fleet.draft, lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=10)),
        (tiny_fleet.target, lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=10)),
    ):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(channel).read()
        error = CallError.from_rpc(caught.value, "")
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ROLE_NOT_SERVED")
    with Client(tiny_fleet.draft) as client, pytest.raises(CallError, match="is no bridge"):
        client.generate("x")


async def test_a_half_closed_stream_still_gets_what_it_has_credit_for(tiny_fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(tiny_fleet.target) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=10)
        await call.write(target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()))
        run = target_pb2.VerifyRun(token_ids=[1, 7, 8], credit=5, patience_us=60_000_000)
        await call.write(target_pb2.VerifyRequest(run=run))
        await call.done_writing()
        assert sum([len(response.token_ids) async for response in call]) == 5


async def test_a_draft_of_another_tokenizer_than_expected_is_refused(tiny_fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(tiny_fleet.draft) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=10)
        opening = draft_pb2.DraftOpen(model="tiny-draft", tokenizer_sha256="0" * 64)
        await call.write(draft_pb2.DraftRequest(open=opening))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert CallError.from_rpc(caught.value, "").reason == "MODEL_CHANGED"


def test_the_client_is_forgiving_where_it_can_be_and_clear_where_not(tiny_fleet: Fleet) -> None:
    with Client(tiny_fleet.bridge) as client:
        whole = client.generate(PROMPT, max_tokens=40).text
        stop = whole[10:13]
        assert client.generate(PROMPT, max_tokens=40, stop=stop).text == whole[: whole.index(stop)]
        for wrong in ({"prompt": "x", "token_ids": [5]}, {}, {"prompt": "x", "speculation": None}, {"prompt": 5}):
            with pytest.raises(CallError):
                client.generate(**wrong)
        with pytest.raises(CallError):
            client.translate(source="tiny-target", target="tiny-draft")
        with pytest.raises(CallError) as caught:
            client.generate("x", target="a" * 20_000)
        assert caught.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(CallError, match="HOST:PORT"):
        Client("")


async def test_a_dropped_stream_frees_its_slot(tiny_fleet: Fleet) -> None:
    """The target has three slots; thirty generations are cut off, and one more still finds a place."""
    async with AsyncClient(tiny_fleet.bridge) as client:
        for _ in range(30):
            async for event in client.stream(PROMPT, max_tokens=200):
                if isinstance(event, bridge_pb2.GenerateDelta):
                    break
        assert (await client.generate(PROMPT, max_tokens=5)).text

        def settled() -> bool:
            with Client(tiny_fleet.bridge) as asking:
                return asking.status().active_count == 0

        await asyncio.to_thread(eventually, settled)


async def test_more_sessions_than_slots_are_told_to_come_again(tiny_fleet: Fleet) -> None:
    opening = target_pb2.VerifyRequest(open=target_pb2.VerifyOpen())
    running = target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[1, 7], credit=1))
    async with grpc.aio.insecure_channel(tiny_fleet.target) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        calls = [stub.Verify() for _ in range(4)]
        codes = []
        for call in calls:
            await call.write(opening)
            await call.write(running)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                codes.append((error.code(), CallError.from_rpc(error, "").reason))
        assert codes == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOTS_EXHAUSTED")]
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("which", "services"),
    [
        ("bridge", ["draftbridge.v1.BridgeService"]),
        ("target", ["draftbridge.v1.ModelService", "draftbridge.v1.TargetService"]),
        ("draft", ["draftbridge.v1.DraftService", "draftbridge.v1.ModelService"]),
    ],
)
def test_every_server_has_health_and_reflection(tiny_fleet: Fleet, which: str, services: list[str]) -> None:
    with grpc.insecure_channel(getattr(tiny_fleet, which)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        listed = [name for name in database.get_services() if name.startswith("draftbridge")]
        assert sorted(listed) == services
        file: descriptor_pb2.FileDescriptorProto = database.FindFileContainingSymbol(services[0])
        assert file.package == "draftbridge.v1"
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", *services):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_method_of_the_contract_is_implemented() -> None:
    implementations = [
        (BridgeServicer, bridge_pb2_grpc.BridgeServiceServicer, bridge_pb2),
        (ModelServicer, model_pb2_grpc.ModelServiceServicer, model_pb2),
        (DraftServicer, draft_pb2_grpc.DraftServiceServicer, draft_pb2),
        (TargetServicer, target_pb2_grpc.TargetServiceServicer, target_pb2),
    ]
    for servicer, base, module in implementations:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert getattr(servicer, method.name) is not getattr(base, method.name), method.full_name
