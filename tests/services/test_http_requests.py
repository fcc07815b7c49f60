"""Every field of a request to the HTTP door reaches the bridge's request under its own name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.text.chat import Chat, Message
from services.bridge.pairing import Wish
from services.http.errors import InvalidBody, invalid_body
from services.http.requests import ChatCompletionRequest, CompletionRequest, read_body

FIELDS = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {"5": -1.5},
    "min_tokens": 2,
    "stop_token_ids": [8],
    "ignore_eos": True,
    "stop": ["x", "y"],
    "seed": 6,
    "n": 2,
    "stream": True,
    "draftbridge": {
        "mode": "lockstep",
        "drafts": ["small", "large"],
        "workload": "tales",
        "sources": ["draft"],
        "num_assistant_tokens": 4,
        "assistant_confidence_threshold": 0.25,
        "draft_temperature": 0.75,
        "tenant": "somebody",
        "progress": True,
        "regex": "a*",
    },
}
SAMPLING = SamplingParameters(
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias={5: -1.5},
    min_tokens=2,
    stop_token_ids=(8,),
    ignore_eos=True,
    grammar=Grammar(GrammarKind.REGEX, "a*"),
)
REQUEST = Request(
    "The",
    SAMPLING,
    seed=6,
    stop=("x", "y"),
    speculation=SpeculationParameters(
        mode=Mode.LOCKSTEP,
        num_assistant_tokens=4,
        assistant_confidence_threshold=0.25,
        draft_temperature=0.75,
        sources=("draft",),
    ),
    tenant="somebody",
    reports_progress=True,
)


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "The", **fields}))


def test_all_fields_of_a_completion() -> None:
    body = completion(**FIELDS, max_tokens=20, logprobs=3)
    expected = replace(REQUEST, max_tokens=20, logprobs=3)
    assert body.requests() == [expected, replace(expected, seed=7)]
    assert body.extension.wish == Wish(("small", "large"), "tales", "")


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_all_fields_of_a_chat(limit: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], limit: 20, "logprobs": True, "top_logprobs": 3}
    body = ChatCompletionRequest.model_validate_json(json.dumps(FIELDS | fields))
    expected = replace(REQUEST, input=Chat((Message("user", "Hi"),), {}), max_tokens=20, logprobs=3)
    assert body.requests() == [expected, replace(expected, seed=7)]


def chat(*messages: dict[str, object], **fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps({"messages": messages} | fields))


def test_what_openai_s_package_adds_to_its_answers_goes_no_further() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    sent = {"role": "assistant", "content": "", "tool_calls": [call]}
    parsed = {**call, "index": 0, "function": {**call["function"], "parsed_arguments": {"a": [None]}}}  # type: ignore[dict-item]
    added = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": {"a": 1}}
    (expected,), (found,) = (
        chat(sent, seed=1).requests(),
        chat({**sent, "tool_calls": [parsed], **added}, seed=1).requests(),
    )
    assert found == expected


def test_what_asks_for_nothing_is_accepted_and_goes_no_further() -> None:
    part, tool = {"type": "text", "text": "Hi"}, {"type": "function", "function": {"name": "look"}}
    message = {"role": "user", "content": [part]}
    (expected,) = chat(message, seed=1, tools=[tool], draftbridge={}).requests()
    null = {"functions": None, "reasoning_effort": None, "x": None}
    hints = {"id": "m1", "created": 5, "created_at": "now", "timestamp": 5, "metadata": {"a": [1]}, "cache_control": {}}
    (found,) = chat(
        {**message, "content": [{**part, **null, "cache_control": {"type": "ephemeral"}}], **null, **hints},
        seed=1,
        tools=[{**tool, **null, "function": {"name": "look", **null}}],
        draftbridge=null,
        user="a", safety_identifier="a", prompt_cache_key="a", metadata={"a": "b"}, **null,
    ).requests()  # fmt: skip
    assert found == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"functions": []}, "functions"),
        ({"draftbridge": {"x": None, "y": False}}, "draftbridge.y"),
        ({"messages": [{"role": "user", "content": "Hi", "x": None, "reasoning": "y"}]}, "messages[0].reasoning"),
        ({"tools": [{"type": "function", "function": {"name": "a", "y": 0}}]}, "tools[0].function.y"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}, "y": ""}}, "tool_choice.y"),
    ],
)
def test_an_unknown_field_that_is_not_null_is_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        chat({"role": "user", "content": "Hi"}, **fields)
    assert str(invalid_body(caught.value)) == f"{name} is not a supported parameter: leave it out"


def test_what_is_left_out_has_openai_s_defaults() -> None:
    body = completion(seed=1)
    assert body.requests() == [Request("The", SamplingParameters(temperature=1.0), seed=1, max_tokens=16)]
    assert body.extension.wish == Wish()
    assert completion().requests()[0].seed != completion().requests()[0].seed


def test_several_prompts_have_n_choices_each_and_one_may_be_ids() -> None:
    body = completion(prompt=["a", "b"], n=2, best_of=2, seed=(1 << 64) - 1)
    found = [(one.input, one.seed) for one in body.requests()]
    assert found == [("a", (1 << 64) - 1), ("a", 0), ("b", (1 << 64) - 1), ("b", 0)]
    assert body.choice_count == 4
    for prompt, inputs in (([3, 4], [(3, 4)]), ([[3, 4], [5]], [(3, 4), (5,)])):
        assert [one.input for one in completion(prompt=prompt, best_of=1).requests()] == inputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5, "prompt": ["a", 5]}, "stop must be a valid string or a valid array, got 5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five must be a valid integer, got 'five'"),
        ({"x" * 1000: 1}, f"{'x' * 100} is not a supported parameter: leave it out"),
    ],
    ids=["the first of two", "a key", "a long name"],
)
def test_a_bad_body_is_refused_in_one_sentence(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        completion(**fields)
    assert str(invalid_body(caught.value)) == message


CALL = {"id": "", "type": "function", "function": {"name": "", "arguments": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a"}] * 20_000},
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 5_000}]},
        {"messages": [], "chat_template_kwargs": {"a": [1] * 40_000}},
        {"prompt": [[1]] * 20_000},
        {"prompt": ["a"] * 40_000},
        {"prompt": [1] * 1_200_000},
    ],
    ids=["messages", "calls", "numbers", "lists", "texts", "ids"],
)
def test_a_body_that_would_take_long_is_refused_before_it_is_parsed(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = CompletionRequest if "prompt" in fields else ChatCompletionRequest
    monkeypatch.setattr(kind, "model_validate_json", None)
    with pytest.raises(InvalidBody, match="at most 32768 are read: send fewer messages, tools or prompts"):
        read_body(kind, json.dumps(fields).encode())


def test_long_prose_and_long_prompts_of_ids_are_read() -> None:
    prose = 'She wrote "[first, second]", closed the file, and left. ' * 40_000  # commas and brackets in texts are free
    ids = [123_456] * 131_072
    for prompt in (prose, ids):
        body = read_body(CompletionRequest, json.dumps({"prompt": prompt}).encode())
        assert body.prompt == (prompt if prompt is prose else tuple(ids))
