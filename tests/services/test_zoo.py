"""Tests a zoo of unrelated models: every pair is exact, models come, go and change, and refusals name the reason."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import DraftBridgeError, InvalidField, Unreachable, UnusableModel
from bridge.planning.planner import Mode
from bridge.request import Request
from bridge.text.models import Model
from draftbridge.v1 import bridge_pb2, model_pb2, sampling_pb2
from services.bridge.connection import State
from services.bridge.endpoint import Endpoint, key_of
from services.bridge.pairing import Pairing, Wish
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.config import Role
from services.errors import DraftAway, ModelChanged, PairRefused
from tests.support import families
from tests.support.ports import free_address
from tests.support.waiting import eventually
from tests.support.zoo import FAMILIES, bridge, cheap, hurry, serving, text_of, trained


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def test_all_ordered_pairs_of_eight_models_are_exact() -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(trained(name))) for name in FAMILIES]
        suffix = await stack.enter_async_context(serving("suffix"))
        gateway = await stack.enter_async_context(bridge(served, [*served, suffix]))
        accepted = 0
        for target in FAMILIES:
            alone, _ = await text_of(gateway, target, Wish(), Mode.OFF)
            for draft in (*FAMILIES, "suffix"):
                if draft == target:
                    with pytest.raises(PairRefused, match="only replica"):
                        await text_of(gateway, target, Wish(draft=draft))
                    continue
                text, event = await text_of(gateway, target, Wish(draft=draft))
                assert text == alone, (target, draft)
                assert event.statistics.drafts == [draft]
                assert event.statistics.sources["draft"].proposed_token_count or draft == "suffix"
                accepted += event.statistics.num_accepted_tokens
        assert accepted > 100, "the models know one corpus, so they must agree often"
        servicer = BridgeServicer(gateway)
        models = await servicer.ListModels(bridge_pb2.ListModelsRequest(), None)  # type: ignore[arg-type]
        assert len(models.services) == 15
        assert {one.state for one in models.services} == {bridge_pb2.ServiceState.STATE_AVAILABLE}
        assert all(one.model.name and one.round_trip_ns for one in models.services)
        assert all(one.measured_costs for one in models.services if one.role == model_pb2.ROLE_TARGET)
        pairs = (await servicer.ListPairs(bridge_pb2.ListPairsRequest(), None)).pairs  # type: ignore[arg-type]
        assert len(pairs) == 7 * 8
        assert [pair.target for pair in pairs if pair.refusal] == [pair.draft for pair in pairs if pair.refusal]
        assert sum(bool(pair.refusal) for pair in pairs) == 7
        assert sum(pair.is_best for pair in pairs) == 7
        assert all(pair.expected_gain >= 1 and pair.expected_bytes_per_second > 0 for pair in pairs)


async def test_a_model_that_restarts_with_another_revision_or_tokenizer_is_read_again() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        first = AsyncExitStack()
        draft = await first.enter_async_context(serving(trained("gemma", "draft"), free_address()))
        gateway = await stack.enter_async_context(bridge([target], [draft]))
        expected, _ = await text_of(gateway, "", Wish(), Mode.OFF)
        assert (await text_of(gateway, "", Wish()))[0] == expected
        one = gateway.zoo.connections[1]
        before = one.endpoint
        assert before

        await first.aclose()
        await asyncio.to_thread(eventually, lambda: one.state is State.AWAY)
        assert next(gateway.pairing.states("")).refusal
        text, event = await text_of(gateway, "", Wish())
        assert text == expected and draft in event.statistics.note
        with pytest.raises(DraftAway):
            await text_of(gateway, "", Wish(draft="draft"))

        again = AsyncExitStack()
        await again.enter_async_context(serving(trained("gemma", "draft"), draft))
        await asyncio.to_thread(eventually, lambda: one.state is State.AVAILABLE)
        assert one.endpoint and one.endpoint.estimates is before.estimates, "what was learned about it is kept"
        await again.aclose()
        await asyncio.to_thread(eventually, lambda: one.state is State.AWAY)
        again = AsyncExitStack()
        await again.enter_async_context(serving(cheap(trained("gemma", "draft")), draft))
        await asyncio.to_thread(eventually, lambda: one.state is State.AVAILABLE)
        assert one.endpoint and one.endpoint.model.forward_costs[0] == (1, 10_000), "its times are of its last start"
        learned = [key for key, _ in gateway.zoo.target("").estimates.drafts]
        assert one.endpoint.estimates is not before.estimates and key_of(before) not in learned, "it has another speed"
        await again.aclose()
        await stack.enter_async_context(serving(trained("llama-3", "draft", "2"), draft))
        await asyncio.to_thread(eventually, lambda: bool(one.endpoint and one.endpoint.description.revision == "2"))
        assert one.endpoint and one.endpoint.estimates is not before.estimates
        text, event = await text_of(gateway, "", Wish())
        assert text == expected and event.statistics.drafts == ["draft"]
        assert event.statistics.sources["draft"].proposed_token_count


async def test_what_was_learned_about_a_draft_stays_when_it_gets_another_replica() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        first = await stack.enter_async_context(serving(trained("gemma", "draft")))
        async with serving(trained("gemma", "draft"), free_address()) as second:
            pass
        gateway = await stack.enter_async_context(bridge([target], [first, second]))
        await text_of(gateway, "", Wish())
        ((key, _),) = gateway.zoo.target("").estimates.drafts
        assert key == key_of(gateway.zoo.endpoints[1]), "one with another engine is known apart"
        learned = gateway.zoo.target("").estimates.draft(key)
        await stack.enter_async_context(serving(trained("gemma", "draft"), second))
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[2].state is State.AVAILABLE)
        assert gateway.zoo.target("").estimates.draft(key) is learned


async def test_tokens_of_a_model_that_is_away_can_be_spelled() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        target = await first.enter_async_context(serving(trained("gpt-2", "t")))
        gateway = await stack.enter_async_context(bridge([target], []))
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        assert b"".join(data for _, data in (await gateway.segment("away", ["t"]))[0]) == b"away"


async def test_a_draft_does_not_spell_the_tokens_of_a_target_of_the_same_name_that_is_away() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        target = await first.enter_async_context(serving(trained("gpt-2", "m")))
        draft = await stack.enter_async_context(serving(trained("llama-3", "m")))
        gateway = await stack.enter_async_context(bridge([target], [draft]))
        known = gateway.zoo.model("m")
        assert known is gateway.zoo.target("m").model
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        assert gateway.zoo.model("m") is known


async def test_what_has_more_tokens_than_one_answer_is_not_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bridge.servicer._MAX_SPANS", 1000)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        suffix = await stack.enter_async_context(serving("suffix"))
        gateway = await stack.enter_async_context(bridge([target], [suffix]))
        words = gateway.zoo.model("gpt-2").vocabulary
        longest = max(range(words.size), key=lambda id_: len(words.token_bytes(id_)))
        gateway.prompt_limit_bytes = 5000
        for source, given, problem in (
            ("suffix", {"text": "the " * 251}, "text must be at most 1000 tokens of suffix, got at least 1004"),
            ("gpt-2", {"text": "the " * 251}, "text must be at most 1000 tokens of suffix"),
            ("suffix", {"token_ids": {"token_ids": [70] * 1001}}, "token_ids must be at most 1000 tokens of suffix"),
            ("gpt-2", {"token_ids": {"token_ids": [longest] * 900}}, "token_ids must be at most 5000 bytes long"),
        ):
            target = "gpt-2" if source == "suffix" else "suffix"
            request = bridge_pb2.TranslateRequest(source=source, target=target, **given)  # type: ignore[arg-type]
            with pytest.raises(InvalidField, match=problem):
                await BridgeServicer(gateway).Translate(request, None)  # type: ignore[arg-type]


async def test_lists_of_ids_are_no_mistake_of_the_client_while_the_target_is_away() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        target = await first.enter_async_context(serving(trained("gpt-2")))
        gateway = await stack.enter_async_context(bridge([target], []))
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        sampling = sampling_pb2.SamplingParameters(stop_token_ids=[5, 6], logit_bias={7: 1.0})
        request = bridge_pb2.GenerateRequest(prompt="x", sampling=sampling)
        with pytest.raises(Unreachable):
            [_ async for _ in BridgeServicer(gateway).Generate(request, None)]  # type: ignore[arg-type]


async def test_of_two_models_with_one_name_the_first_is_used_and_the_other_refused_by_name() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        a = await first.enter_async_context(serving(trained("gpt-2", "twin")))
        b = await stack.enter_async_context(serving(trained("gemma", "twin")))
        c = await stack.enter_async_context(serving(trained("gpt-2", "twin", "2")))
        gateway = await stack.enter_async_context(bridge([a, b, c], []))
        endpoints = await gateway.zoo.check()
        assert [one.reachable for one in endpoints] == [True, False, False]
        assert "two models are named twin" in endpoints[1].problem and "tokenizer" in endpoints[1].problem
        assert "revision" in endpoints[2].problem and "--name" in endpoints[2].problem
        target = gateway.zoo.target("twin")
        assert [one.address for one in gateway.zoo.replicas(target)] == [a]
        text, _ = await text_of(gateway, "twin", Wish(), Mode.OFF)
        assert text
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        for name in ("twin", ""):
            with pytest.raises(Unreachable, match=a):
                await text_of(gateway, name, Wish(), Mode.OFF)


async def test_a_model_that_has_no_right_to_its_name_does_not_take_it_from_replicas_of_the_one_that_has() -> None:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(serving(trained("gpt-2", "twin")))
        b = await stack.enter_async_context(serving(trained("gemma", "twin")))
        c = await stack.enter_async_context(serving(trained("gpt-2", "twin")))
        gateway = await stack.enter_async_context(bridge([a, b, c], []))
        assert [one.reachable for one in await gateway.zoo.check()] == [True, False, True]
        assert [one.address for one in gateway.zoo.replicas(gateway.zoo.target("twin"))] == [a, c]


class Counted:
    """A connected service. `read_count`: how often the model of any of them was read."""

    read_count = 0

    def __init__(self, number: int, role: Any) -> None:
        words = families.vocabulary("gpt-2")
        name = "draft" if role == model_pb2.ROLE_DRAFT else "target"
        model = Model(name, 512, words.size, words, forward_costs=((1, 1_000_000),))
        described = model_pb2.Model(name=name, instance_id=f"{name}{number}")
        self.address, self.role, self.problem, self.refused = f"{name}:{number}", role, "", None
        self._endpoint = Endpoint(self.address, role, None, described, model)  # type: ignore[arg-type]

    @property
    def known(self) -> Endpoint:
        Counted.read_count += 1
        return self._endpoint

    endpoint = known

    def on_error(self, error: DraftBridgeError) -> None:
        """As for a service that accepts the bridge's token."""


class Turning(Counted):
    """A service that connects after some looks at it, or goes away."""

    def __init__(self, look_count: int, *, connects: bool) -> None:
        super().__init__(0, model_pb2.ROLE_TARGET)
        self._look_count, self._connects = look_count, connects

    @property
    def known(self) -> Endpoint | None:
        return None if self._connects and not self._turned() else self._endpoint

    @property
    def endpoint(self) -> Endpoint | None:
        return self._endpoint if self._turned() == self._connects else None

    def _turned(self) -> bool:
        self._look_count -= 1
        return self._look_count < 0


@pytest.mark.parametrize("connects", [True, False])
@pytest.mark.parametrize("look_count", range(5))
def test_a_service_that_connects_or_goes_away_meanwhile_spoils_no_scrape(look_count: int, connects: bool) -> None:
    """Metrics look at services in another thread than the one that connects them."""
    zoo = Zoo([], [])
    zoo._entries = [SimpleNamespace(connections=[Turning(look_count, connects=connects)])]  # type: ignore[list-item]
    assert [one.model.name for one in zoo.endpoints] in ([], ["target"])


async def test_the_work_for_a_request_grows_no_faster_than_the_zoo() -> None:
    reads = []
    for count in (10, 40):
        zoo = Zoo([], [])
        roles = (model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT)
        services = [Counted(number, role) for role in roles for number in range(count)]
        zoo._entries = [SimpleNamespace(connections=services)]  # type: ignore[list-item]
        pairing, Counted.read_count = Pairing(zoo), 0
        assignment = pairing.assign(zoo.target(""), Request("Hello"), Wish())
        first = assignment.next(None)
        assert first and first.model.name == "draft"
        reads.append(Counted.read_count)
    assert reads[1] <= 5 * reads[0], reads


async def test_an_error_changes_only_the_service_that_caused_it() -> None:
    """Another one may serve the same model, or in its other role at the same address."""
    target, draft = model_pb2.ROLE_TARGET, model_pb2.ROLE_DRAFT
    services = [Counted(number, role) for role in (target, draft) for number in range(2)]
    replica, cause = services[-2:]
    services[0].address = cause.address
    handled: list[Counted] = []
    for one in services:
        one.on_change = one.refuse = lambda problem, one=one: handled.append(one)  # type: ignore[attr-defined]
    zoo = Zoo([], [])
    zoo._entries = [SimpleNamespace(connections=services)]  # type: ignore[list-item]
    zoo.on_error(cause.known, Unreachable(cause.address, "UNAVAILABLE"))
    assert handled == [], "it may still serve the same model"
    zoo.on_error(cause.known, ModelChanged("draft"))
    zoo.refuse(cause.known, "it broke the contract")
    assert handled == [cause, cause] and replica.known.identity == cause.known.identity


async def test_a_model_that_lies_about_its_vocabulary_is_refused() -> None:
    liar = trained("gemma", "liar")
    no_columns = replace(liar, model=replace(liar.model, vocabulary_size=0))
    ids = replace(liar.model.special_ids, eos=(4_000_000_000,))
    wrong_ids = replace(liar, model=replace(liar.model, special_ids=ids))
    many_ends = replace(liar, model=replace(liar.model, special_ids=replace(ids, eos=(1,) * 2000)))
    many_costs = replace(liar, model=replace(liar.model, forward_costs=tuple((one, one) for one in range(1, 100))))
    for wrong in (no_columns, wrong_ids, many_ends, many_costs):
        async with serving(wrong) as address:
            zoo = Zoo([address], [])
            with pytest.raises(UnusableModel, match=r"liar .* cannot be true"):
                await zoo.connect()
            await zoo.close()
            async with serving(trained("gpt-2")) as honest, bridge([address, honest], []) as gateway:
                assert gateway.zoo.connections[0].state is not State.AVAILABLE
                assert "cannot be true" in gateway.zoo.connections[0].problem
                assert (await text_of(gateway, "", Wish(), Mode.OFF))[0]


async def test_a_bridge_does_not_wait_for_further_targets_if_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bridge.zoo.CHECK_SECONDS", 0.1)
    async with serving(trained("gpt-2", "here")) as address, asyncio.timeout(50):
        zoo = Zoo([free_address(), address], [], timeout=60)
        await zoo.connect()
        assert [one.state for one in zoo.connections] == [State.CONNECTING, State.AVAILABLE]
        assert zoo.target("").model.name == "here"
        await zoo.close()


async def test_a_service_that_leaves_while_it_is_asked_does_not_spoil_the_status() -> None:
    async with serving(trained("gpt-2")) as address, bridge([address], []) as gateway:
        (one,), entries = gateway.zoo.connections, gateway.zoo._entries
        gateway.zoo._entries = []
        assert gateway.zoo.conflict(one) == ""
        gateway.zoo._entries = entries


async def test_a_description_that_comes_late_does_not_withdraw_the_service_that_was_connected_meanwhile() -> None:
    async with serving(trained("gpt-2", "new")) as address, bridge([address], []) as gateway:
        (one,) = gateway.zoo.connections
        new = one.known
        assert new
        one.known = replace(new, description=model_pb2.Model(name="old"))

        async def describe(*_: object, **__: object) -> tuple[model_pb2.Model, int]:
            one.known = new
            return new.description, 1

        gateway.zoo.reader.describe = describe  # type: ignore[method-assign]
        assert await one.check() == ""
        assert one.endpoint is new


async def test_no_other_model_takes_the_place_of_a_target_that_is_away() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        a = await first.enter_async_context(serving(trained("gpt-2", "a"), role=Role.TARGET))
        b = await stack.enter_async_context(serving(trained("gemma", "b"), role=Role.TARGET))
        gateway = await stack.enter_async_context(bridge([a, b], []))
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        for name in ("", "a"):
            assert gateway.zoo.target(name).model.name == "a"
            with pytest.raises(Unreachable):
                await text_of(gateway, name, Wish(), Mode.OFF)
        assert (await text_of(gateway, "b", Wish(), Mode.OFF))[0]


async def test_one_server_at_two_addresses_is_still_the_only_replica() -> None:
    async with serving(trained("gpt-2", "m")) as address:
        named = address.replace("127.0.0.1", "localhost")
        for targets, draft in (([address], named), ([address, named], address)):
            async with bridge(targets, [draft]) as gateway:
                with pytest.raises(PairRefused, match="only replica"):
                    await text_of(gateway, "", Wish(draft="m"))


async def test_a_target_that_is_away_keeps_its_pairs_with_the_reason() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        target = await first.enter_async_context(serving(trained("gpt-2", "t"), role=Role.TARGET))
        draft = await stack.enter_async_context(serving(trained("gemma", "d"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [draft]))
        await first.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[0].state is State.AWAY)
        (pair,) = gateway.pairing.states("")
        assert target in pair.refusal and not pair.is_best
