"""Tests which requests are refused, how many tokens one may generate, and prompts that only the target can take."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from bridge.errors import EmptyPrompt, InvalidField, MaxTokensTooLarge, PromptTooLong, TokenOutOfRange
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TENANT_LENGTH, Request, check, token_room
from bridge.sampling.sampler import SamplingParameters
from bridge.text.chat import Chat, Message
from bridge.text.models import SpecialIds
from services.model.draft.session import DraftSession
from tests.support import tiny
from tests.support.alone import answer

MODEL = tiny.model("byte_level", context_length=10)


def test_prompt_and_text_fill_the_context_exactly() -> None:
    prompt = [70] * 6
    assert token_room(Request("a"), MODEL, prompt) == 4
    assert token_room(Request("a", max_tokens=4), MODEL, prompt) == 4
    with pytest.raises(MaxTokensTooLarge):
        token_room(Request("a", max_tokens=5), MODEL, prompt)
    assert token_room(Request("a"), MODEL, [70] * 9) == 1
    with pytest.raises(PromptTooLong):
        token_room(Request("a"), MODEL, [70] * 10)


def test_the_range_of_ids_is_that_of_the_model() -> None:
    with pytest.raises(TokenOutOfRange, match="use ids from 0 to 99"):
        token_room(Request("a"), replace(MODEL, vocabulary_size=100), [150])


def test_stop_strings_are_short() -> None:
    check(Request("a", stop=("x" * (MAX_STOP_LENGTH - 1), "y")))
    with pytest.raises(InvalidField, match=r"^stop must be at most 4,096 characters in all strings together, got 4097"):
        check(Request("a", stop=("x" * MAX_STOP_LENGTH, "y")))


# For each field, the largest request that is allowed and one that is not.
LIMITS = {
    "max_tokens": (Request("a", max_tokens=1), Request("a", max_tokens=0)),
    "sampling.min_tokens": (
        Request("a", SamplingParameters(min_tokens=5), max_tokens=5),
        Request("a", SamplingParameters(min_tokens=6), max_tokens=5),
    ),
    "stop": (Request("a", stop=("x",) * MAX_STOP_STRINGS), Request("a", stop=("x",) * (MAX_STOP_STRINGS + 1))),
    "logprobs": (Request("a", logprobs=100), Request("a", logprobs=101)),
    "speculation.num_assistant_tokens": tuple(
        Request("a", speculation=SpeculationParameters(num_assistant_tokens=count)) for count in (64, 65)
    ),
    "speculation.draft_temperature": tuple(
        Request("a", speculation=SpeculationParameters(draft_temperature=value)) for value in (100.0, 100.5)
    ),
    "speculation.assistant_confidence_threshold": tuple(
        Request("a", speculation=SpeculationParameters(assistant_confidence_threshold=value)) for value in (1.0, 1.5)
    ),
    # Two servers may have put the name of a key before it.
    "tenant": (
        Request("a", tenant="/".join(("k" * 64, "k" * 64, "x" * MAX_TENANT_LENGTH))),
        Request("a", tenant="x" * (MAX_TENANT_LENGTH + 2 * 65 + 1)),
    ),
}


@pytest.mark.parametrize("field", LIMITS)
def test_a_field_beyond_its_limit_is_refused_by_name(field: str) -> None:
    allowed, refused = LIMITS[field]
    check(allowed)
    with pytest.raises(InvalidField, match=f"^{field} must be "):
        check(refused)


@pytest.mark.parametrize(
    ("input_", "size"),
    [
        ("aé", 3),
        ((1, 2, 3), 12),
        (Chat((Message("user", "hé"),)), 4 + 3 + len("[{}, {}]")),
        (Chat((Message("user", "hé", {"name": "ж"}),), {"k": 1}), 4 + 3 + len('[{"k": 1}, {"name": "xx"}]')),
    ],
)
def test_a_prompt_has_the_size_of_all_that_is_encoded(input_: str | Chat | tuple[int, ...], size: int) -> None:
    assert Request(input_).input_byte_count == size


def test_the_size_of_a_chat_is_computed_once_for_all_requests_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Request(Chat((Message("user", "hi"),), {"tools": ["a" * 100]}))
    assert base.input_byte_count > 100
    monkeypatch.setattr("json.dumps", None)
    assert replace(base, seed=1).input_byte_count == base.input_byte_count


@pytest.mark.parametrize("input_", ["a\ud800", Chat((Message("user", "\udfffb"),))])
async def test_lone_surrogates_are_refused(input_: str | Chat) -> None:
    target = tiny.model("byte_level")
    with pytest.raises(InvalidField, match="lone surrogate"):
        await answer(target, tiny.HashEngine(target), None, None, Request(input_), 0.0)


async def test_a_prompt_without_tokens_is_empty() -> None:
    target = tiny.model("wordpiece")
    with pytest.raises(EmptyPrompt):
        await answer(target, tiny.HashEngine(target), None, None, Request(" "), 0.0)


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.OPPORTUNISTIC])
@pytest.mark.parametrize(
    ("draft_kind", "input_", "template"),
    [
        ("wordpiece", " ", ""),  # nothing that this draft has a token for
        ("wordpiece", "\n\n", ""),
        ("byte_level", (1,), ""),  # only a control token of the target
        ("byte_level", Chat((Message("user", "hi"),)), "{{ raise_exception('only systems') }}"),
    ],
)
async def test_what_only_the_target_can_take_is_generated_all_the_same(
    mode: Mode, draft_kind: str, input_: object, template: str
) -> None:
    target = tiny.model("sentencepiece")
    draft = replace(tiny.model(draft_kind), chat_template=template, special_ids=SpecialIds(eos=(2,)))
    engine = tiny.HashEngine(target)
    request = Request(input_, max_tokens=30, speculation=SpeculationParameters(mode))  # type: ignore[arg-type]
    alone = await answer(target, engine, None, None, request, 0.0)
    scheduler = tiny.scheduler(tiny.HashEngine(draft))
    async with asyncio.timeout(60):
        with closing(DraftSession(draft, scheduler, tiny.sampler(draft))) as session:
            together = await answer(target, engine, session, draft, request, 0.0)
    scheduler.close()
    assert together[:2] == alone[:2]
    assert together[2].statistics.waited_ns < 4e9, "the target does not wait for a draft that has nothing"
    assert ("could not take" in together[2].statistics.note) == bool(template)
