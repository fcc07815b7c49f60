"""Tests real processes with gRPC over loopback: what works, how the rest is refused, and what is freed."""

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
from services.cli.processes import Fleet
from services.model.draft.servicer import DraftServicer
from services.model.servicer import ModelServicer
from services.model.target.servicer import TargetServicer
from tests.support.tiny import own_ids, vocabulary
from tests.support.waiting import eventually

PROMPT = "The quick brown fox"


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


def test_the_totals_are_those_of_all_generations(client: Client) -> None:
    before = client.status().speculation
    results = [client.generate(PROMPT, max_tokens=30, speculation=mode) for mode in ("lockstep", "off", "auto")]
    after, did = client.status().speculation, [one.finished.speculation for one in results]
    for name in ("target_pass_count", "num_draft_tokens", "num_accepted_tokens", "generated_byte_count", "verify_ns"):
        assert getattr(after, name) - getattr(before, name) == sum(getattr(one, name) for one in did)
    assert sum(after.num_accepted_tokens_per_position) == after.num_accepted_tokens


def test_every_delta_says_who_proposed_what(client: Client) -> None:
    """The text has two ids, so that it repeats itself. Whether candidates come in time depends on the machine."""
    sources = set()
    for mode in ["off", *["auto"] * 20]:
        options = {"max_tokens": 80, "speculation": mode, "logit_bias": {70: 80.0, 71: 80.0}}
        events = list(client.stream(PROMPT, **options))
        deltas = [event for event in events if isinstance(event, bridge_pb2.GenerateDelta)]
        accepted = [span for delta in deltas for span in delta.spans if span.source]
        assert all(sum(span.byte_count for span in one.spans) == len(one.text.encode()) for one in deltas)
        assert not accepted or mode == "auto"
        statistics = events[-1].speculation
        # The first bytes of a character are held back until the rest of it arrives.
        assert sum(span.byte_count for span in accepted) <= statistics.accepted_byte_count
        assert statistics.verify_ns + statistics.waited_ns + statistics.network_ns <= statistics.elapsed_ns
        assert sum(plan.target_pass_count for plan in statistics.plans) == statistics.target_pass_count - 1
        sources |= {span.source for span in accepted}
        if "suffix" in sources:
            return
    pytest.fail(f"none of the text's own in 20 requests: {sources}")


def test_the_drafts_temperature_changes_no_text(client: Client) -> None:
    options = {"max_tokens": 30, "temperature": 1.0, "seed": 8, "speculation": "lockstep"}
    results = [client.generate(PROMPT, draft_temperature=one, **options) for one in (None, 0.0, 2.0)]
    assert len({one.text for one in results}) == 1
    guessed = {tuple(one.finished.speculation.num_accepted_tokens_per_position) for one in results}
    assert len(guessed) > 1, "it changes what the draft proposes"
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
    # Given ids are translated: control tokens by their role, other tokens by their bytes.
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
    messages = [{"role": "user", "content": "the dog", "name": "<eos>Ann"}]
    alone = client.generate(messages=messages[:1], template_variables={"unknown": [{"name": "f"}]}, max_tokens=8)
    assert alone.text == client.generate(messages=[{"role": "user", "content": "the dog"}], max_tokens=8).text
    with pytest.raises(CallError, match="add_generation_prompt"):
        client.generate(messages=messages, template_variables={"add_generation_prompt": False})
    with pytest.raises(CallError, match="need messages"):
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


async def test_a_half_closed_stream_still_gets_what_it_has_credit_for(tiny_fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(tiny_fleet.target) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)
        await call.write(target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()))
        run = target_pb2.VerifyRun(token_ids=[1, 7, 8], credit=5, patience_us=60_000_000)
        await call.write(target_pb2.VerifyRequest(run=run))
        await call.done_writing()
        assert sum([len(response.token_ids) async for response in call]) == 5


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


@pytest.mark.parametrize(
    ("which", "services"),
    [
        ("bridge", ["draftbridge.v1.BridgeService", "draftbridge.v1.CandidateService"]),
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
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
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
