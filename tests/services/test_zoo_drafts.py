"""Tests which draft of a zoo serves a request, and which one replaces a draft that fails or does not pay off."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest

from bridge.errors import PromptTooLong, Unreachable
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction
from bridge.ports import Pass
from bridge.request import Request
from bridge.sources.source import DRAFT, Offer, Outcome
from bridge.text.chat import Chat, Message
from services.bridge.backend import Opened
from services.bridge.connection import State
from services.bridge.endpoint import Endpoint
from services.bridge.pairing import Assignment, Wish
from services.bridge.pauses import Pauses
from services.config import Role
from services.errors import ModelNotFound
from tests.support.ports import free_address
from tests.support.waiting import eventually
from tests.support.zoo import (
    SAMPLING,
    LyingDraft,
    bridge,
    cheap,
    hurry,
    misbehaving,
    renamed,
    serving,
    text_of,
    trained,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def test_a_draft_that_proposes_ids_it_does_not_have_is_replaced_and_refused_from_then_on() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        honest = await stack.enter_async_context(serving(trained("gemma", "honest"), role=Role.DRAFT))
        liar = await stack.enter_async_context(misbehaving(trained("llama-3", "liar"), LyingDraft))
        gateway = await stack.enter_async_context(bridge([target], [liar, honest]))
        expected, _ = await text_of(gateway, "", Wish(), Mode.OFF, 60)
        text, event = await text_of(gateway, "", Wish(("liar", "honest")), max_tokens=60)
        assert text == expected
        assert event.statistics.drafts == ["liar", "honest"]
        assert "another draft replaced it" in event.statistics.note
        assert gateway.zoo.connections[1].state is State.REFUSED
        (pair, other) = gateway.pairing.states("")
        assert "outside its vocabulary" in pair.refusal and not other.refusal
        assert (await text_of(gateway, "", Wish(("liar", "honest"))))[1].statistics.drafts == ["honest"]


async def test_a_draft_that_dies_in_the_middle_of_a_text_is_replaced() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        first = AsyncExitStack()
        dying = await first.enter_async_context(serving(trained("gemma", "dying"), role=Role.DRAFT))
        second = await stack.enter_async_context(serving(trained("llama-3", "second"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [dying, second]))
        gateway.pairing.pauses, lost = Pauses(lambda: 0), gateway.zoo.draft("dying")
        assert lost
        expected, _ = await text_of(gateway, "", Wish(), Mode.OFF, 300)
        speculation = SpeculationParameters(mode=Mode.LOCKSTEP, num_assistant_tokens=3)
        request = Request("The ", sampling=SAMPLING, seed=1, max_tokens=300, speculation=speculation)
        text = ""
        async with aclosing(gateway.generate(request, "", wish=Wish(("dying", "second")))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    if len(text) > 20:
                        await first.aclose()
        assert text == expected
        assert isinstance(event, Finished)
        assert event.statistics.drafts == ["dying", "second"]
        assert gateway.pairing.pauses.holds(gateway.zoo.target(""), lost), "though it had proposed before"


async def test_a_draft_that_never_pays_gives_way_to_one_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.sources.source_set._UNUSED_PASSES", 8)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        slow_model = trained("gemma", "slow")
        slow = replace(slow_model, model=replace(slow_model.model, forward_costs=((1, 900_000_000), (8, 900_000_000))))
        fast = cheap(trained("llama-3", "quick"))
        drafts = [await stack.enter_async_context(serving(one, role=Role.DRAFT)) for one in (slow, fast)]
        gateway = await stack.enter_async_context(bridge([target], drafts))
        expected, _ = await text_of(gateway, "", Wish(), Mode.OFF, 120)
        request, text = Request("The ", sampling=SAMPLING, seed=1, max_tokens=120), ""
        async with aclosing(gateway.generate(request, "", wish=Wish(("slow", "quick")))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    if "quick" not in [one.draft for one in gateway.running]:
                        await asyncio.sleep(0.02)  # opening it may take longer than the text
        assert text == expected
        assert isinstance(event, Finished) and event.statistics.drafts == ["slow", "quick"]


async def test_a_draft_goes_on_in_the_books_if_the_one_that_was_to_replace_it_refuses_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.sources.source_set._UNUSED_PASSES", 8)
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + plain
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2", chat_template=plain)))
        slow_model = trained("gemma", "slow", chat_template=plain)
        slow = replace(slow_model, model=replace(slow_model.model, forward_costs=((1, 900_000_000), (8, 900_000_000))))
        picky = cheap(trained("llama-3", "picky", chat_template=refusing))
        drafts = [await stack.enter_async_context(serving(one, role=Role.DRAFT)) for one in (slow, picky)]
        gateway = await stack.enter_async_context(bridge([target], drafts))
        gateway.pairing.pauses = Pauses(lambda: 0)
        chat = Chat((Message("system", "Tell."), Message("user", "The ")))
        speculation = SpeculationParameters(sources=(DRAFT,))
        request = Request(chat, sampling=SAMPLING, seed=1, max_tokens=500, speculation=speculation)
        shown, refused, on_failure = set(), [], Assignment._on_failure

        def record(self: Assignment, draft: Endpoint, *details: Any) -> Endpoint | None:
            refused.append(draft.model.name)
            return on_failure(self, draft, *details)

        monkeypatch.setattr(Assignment, "_on_failure", record)
        wish = Wish(("slow", "picky"), workload="tales")
        model, slow_draft, picky_draft = gateway.zoo.target(""), gateway.zoo.draft("slow"), gateway.zoo.draft("picky")
        assert slow_draft and picky_draft
        async with aclosing(gateway.generate(request, "", wish=wish)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    shown |= {one.draft for one in gateway.running}
                    if not refused:
                        await asyncio.sleep(0.005)  # until it has refused, which may take longer than the text
        assert isinstance(event, Finished) and event.statistics.drafts == ["slow"]
        assert shown == {"slow"}
        records = {one.draft.model.name: one.record for one in gateway.pairing.states("tales")}
        assert (records["slow"].request_count, records["picky"].request_count) == (1, 0)
        assert records["slow"].pass_count > 100
        assert refused == ["picky"]
        assert not any(gateway.pairing.pauses.holds(model, one) for one in (slow_draft, picky_draft))


async def test_wishes_that_cannot_be_fulfilled_are_refused_by_field() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        gateway = await stack.enter_async_context(bridge([target], []))
        wishes = (
            (Wish(workload="x" * 65), "workload"),
            (Wish(workload="two\nlines"), "workload"),
            (Wish(("a",) * 65), "drafts"),
        )
        for wish, name in wishes:
            with pytest.raises(Exception, match=name):
                await text_of(gateway, "", wish)
        with pytest.raises(ModelNotFound):
            await text_of(gateway, "", Wish(("nobody", "none")))


@pytest.mark.parametrize("names", [("small",), ("small", "other")])
async def test_a_draft_that_is_lost_while_the_prompt_is_encoded_is_replaced(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        drafts = [
            await stack.enter_async_context(serving(renamed(trained("gemma"), name), role=Role.DRAFT)) for name in names
        ]
        gateway = await stack.enter_async_context(bridge([target], drafts))
        expected, _ = await text_of(gateway, "", Wish(), Mode.OFF)
        replicas = Assignment.replicas
        monkeypatch.setattr(
            Assignment, "replicas", lambda self, one: [] if one.model.name == "small" else replicas(self, one)
        )
        text, event = await text_of(gateway, "", Wish(draft="small") if len(names) == 1 else Wish(names))
        assert text == expected
        assert event.statistics.drafts == list(names[1:])
        assert "small was lost" in event.statistics.note


async def test_an_unknown_name_in_a_list_of_drafts_is_skipped() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2")))
        draft = await stack.enter_async_context(serving(renamed(trained("gemma"), "small"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([target], [draft]))
        _, event = await text_of(gateway, "", Wish(("nobody", "small")))
        assert event.statistics.drafts == ["small"]


async def test_the_choice_is_learned_and_told() -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(trained("gpt-2", pass_seconds=0.004)))
        models = [renamed(cheap(trained(name)), f"draft-{name}") for name in ("gemma", "llama-3")]
        drafts = [await stack.enter_async_context(serving(one, role=Role.DRAFT)) for one in models]
        gateway = await stack.enter_async_context(bridge([target], drafts))
        used = []
        for _ in range(8):
            _, event = await text_of(gateway, "", Wish(workload="tales"), Mode.AUTO, 40)
            choice = event.statistics.draft_choice
            assert choice and choice.draft == event.statistics.drafts[0]
            assert choice.bytes_per_second > 0 and choice.second_best_bytes_per_second > 0
            used.append(choice.draft)
        assert set(used) == {"draft-gemma", "draft-llama-3"}, "both were tried"
        # On a busy machine, the planner may have had no use for either.
        await text_of(gateway, "", Wish(workload="tales"), Mode.LOCKSTEP, 40)
        pairs = list(gateway.pairing.states("tales"))
        assert all(pair.record.request_count > 0 for pair in pairs)
        assert not any(pair.record.request_count for pair in gateway.pairing.states("code"))
        assert any(pair.record.candidate_count > 0 for pair in pairs)


async def test_a_draft_that_refuses_a_chat_is_replaced_and_chosen_for_others() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with AsyncExitStack() as stack:
        models = [
            trained("gpt-2", chat_template=plain),
            trained("gemma", "picky", chat_template=refusing + plain),
            trained("llama-3", "other", chat_template=plain),
        ]
        target, picky, other = [await stack.enter_async_context(serving(one)) for one in models]
        gateway = await stack.enter_async_context(bridge([target], [picky, other]))
        gateway.pairing.pauses = Pauses(lambda: 0)
        chat = Chat((Message("system", "Tell."), Message("user", "The ")))
        request = Request(chat, sampling=SAMPLING, seed=1, max_tokens=8)
        for wish, drafts in ((Wish(("picky", "other")), ["other"]), (Wish(draft="picky"), [])):
            async with aclosing(gateway.generate(request, "", wish=wish)) as events:
                found = [event async for event in events]
            assert isinstance(found[0], Opened) and isinstance(found[-1], Finished)
            assert found[-1].statistics.drafts == drafts
            assert found[0].draft == next(iter(drafts), "")
            assert found[-1].statistics.note
        target, refused = gateway.zoo.target(""), gateway.zoo.draft("picky")
        assert refused and not gateway.pairing.pauses.holds(target, refused)


async def test_a_draft_that_takes_no_part_is_not_reported_as_chosen_nor_missed() -> None:
    async with AsyncExitStack() as stack:
        refusing = "{{ raise_exception('no chats') }}"
        models = trained("gpt-2"), trained("gemma", "picky", chat_template=refusing)
        target, picky = [await stack.enter_async_context(serving(one)) for one in models]
        beside = await stack.enter_async_context(bridge([target], [picky]))
        alone = await stack.enter_async_context(bridge([target], [free_address()]))
        chat = Chat((Message("user", "The "),))
        without = SpeculationParameters(sources=("suffix",))
        for gateway, input_, speculation in (
            (beside, chat, SpeculationParameters()),
            (beside, "The ", without),
            (alone, "The ", without),
        ):
            request = Request(input_, sampling=SAMPLING, seed=1, max_tokens=4, speculation=speculation)
            async with aclosing(gateway.generate(request)) as events:
                *_, finished = [event async for event in events]
            assert isinstance(finished, Finished)
            assert not finished.statistics.drafts and finished.statistics.draft_choice is None
            assert bool(finished.statistics.note) == (input_ is chat)


async def test_a_list_whose_drafts_cannot_be_used_costs_the_draft_and_names_the_reasons() -> None:
    async with AsyncExitStack() as stack:
        both = await stack.enter_async_context(serving(trained("gpt-2", "m")))
        away = AsyncExitStack()
        gone = await away.enter_async_context(serving(trained("gemma", "gone"), role=Role.DRAFT))
        gateway = await stack.enter_async_context(bridge([both], [both, gone]))
        await away.aclose()
        await asyncio.to_thread(eventually, lambda: gateway.zoo.connections[2].state is State.AWAY)
        for names, reason in ((("gone",), gone), (("m",), "only replica")):
            _, event = await text_of(gateway, "", Wish(names))
            assert not event.statistics.drafts and reason in event.statistics.note
        _, event = await text_of(gateway, "", Wish(("gone", "m")))
        assert gone in event.statistics.note and "only replica" in event.statistics.note


async def test_a_mode_that_uses_only_a_draft_notes_that_none_is_configured() -> None:
    async with serving(trained("gpt-2")) as target, bridge([target], []) as gateway:
        for mode in Mode:
            _, event = await text_of(gateway, "", Wish(), mode)
            noted = "this bridge has none" in event.statistics.note
            assert noted == (mode in (Mode.LOCKSTEP, Mode.OPPORTUNISTIC))


async def test_a_draft_that_was_lost_pauses() -> None:
    async with AsyncExitStack() as stack:
        models = [trained("gpt-2", "t"), trained("gemma", "bad"), trained("llama-3", "good")]
        served = [await stack.enter_async_context(serving(one)) for one in models]
        gateway = await stack.enter_async_context(bridge(served[:1], served[1:]))
        now = [0]
        pauses = gateway.pairing.pauses = Pauses(lambda: now[0])
        target, bad = gateway.zoo.target(""), gateway.zoo.draft("bad")
        assert bad
        request = Request("The ", max_tokens=8)

        def order() -> list[str]:
            assignment = gateway.pairing.assign(target, request, Wish())
            return [one.model.name for one in assignment.others]

        def best() -> list[str]:
            return [one.draft.model.name for one in gateway.pairing.states("") if one.is_best]

        assert order() == ["bad", "good"] and best() == ["bad"]
        pauses.failed(target, bad)
        assert order() == ["good", "bad"] and best() == ["good"]
        now[0] = 1_100_000_000
        assert not pauses.holds(target, bad)
        pauses.failed(target, bad)
        now[0] += 1_900_000_000
        assert pauses.holds(target, bad), "twice in a row: twice as long"
        pauses.worked(target, bad)
        assert not pauses.holds(target, bad)
        for error, paused in ((PromptTooLong(9, 8, "bad"), False), (Unreachable("bad", "it was restarted"), True)):
            assignment = gateway.pairing.assign(target, request, Wish())
            assignment.next(None)
            assignment.next(error)
            assert pauses.holds(target, bad) == paused, "prompts of other requests may be shorter"


async def test_each_draft_of_a_request_is_judged_by_its_own_passes_without_those_of_prompt_lookup() -> None:
    async with AsyncExitStack() as stack:
        models = [trained("gpt-2", "t"), trained("gemma", "first"), trained("llama-3", "second")]
        served = [await stack.enter_async_context(serving(one)) for one in models]
        gateway = await stack.enter_async_context(bridge(served[:1], served[1:]))
        pairing = gateway.pairing
        target = gateway.zoo.target("")
        assignment = pairing.assign(target, Request("The ", max_tokens=8), Wish(workload="tales"))
        first = assignment.next(None)
        assignment.take_over()
        statistics = assignment.statistics

        def observe(count: int, tokens: int, source: str, *tried: str) -> None:
            outcome = Outcome(Pass(0, (5,) * tokens, 0, 0), Offer((5,) * len(tried), tried), (b"a",) * tokens, 1000)
            for _ in range(count):
                statistics.observe(outcome, Plan(source or "plain", Prediction(1.0, 1e3), source=source, plain_ns=1e3))

        observe(64, 1, "")
        observe(10, 10, "suffix", "suffix")
        observe(10, 10, "", "suffix")
        second = assignment.next(Unreachable("x", "it did not answer"))
        assert first and second and second is not first
        assignment.take_over()
        observe(30, 2, DRAFT, DRAFT)
        observe(10, 10, DRAFT, "suffix")
        _, event = await text_of(gateway, "", Wish(), Mode.OFF)
        assignment.finished(event)
        found = {one.draft.model.name: one.record for one in pairing.states("tales")}
        assert all(one.request_count == 1 for one in found.values())
        gains = {name: one.token_count / one.plain_passes for name, one in found.items()}
        assert gains == {first.model.name: 1.0, second.model.name: 2.0}
        speed = pairing.plain_bytes_per_second(target)
        assignment.finished(replace(event, generated_byte_count=100 * event.generated_token_count))
        assert pairing.plain_bytes_per_second(target) > speed > 0, "the target's tokens are longer than was known"
