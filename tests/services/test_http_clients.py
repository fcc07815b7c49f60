"""Tests the HTTP door with the `openai` package, synchronously and asynchronously."""

import asyncio
import inspect
from typing import Any

import openai
import pytest

from draftbridge import AsyncClient, Client
from services.cli.processes import Fleet
from services.http.requests import ChatCompletionRequest, CompletionRequest

PROMPT = "The quick brown"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Say something."}]},
]
SAMPLING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": {"7": -3},
    "seed": 11,
    "stop": ["zzzz", "yyyy"],
    "user": "somebody",
}
OURS = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
EXTENSION = {"mode": "lockstep", "draft": "tiny-draft", "sources": ["draft"], "num_assistant_tokens": 3}
EXTRA = {**OURS, "draftbridge": EXTENSION}


@pytest.fixture
def api(tiny_fleet: Fleet):  # type: ignore[no-untyped-def]
    with openai.OpenAI(base_url=f"{tiny_fleet.http}/v1", api_key="unused", max_retries=0) as api:
        yield api


def expected(client: Client, **options: Any) -> str:
    """Returns what the gRPC door generates with the parameters above."""
    sampling = {name: value for name, value in SAMPLING.items() if name not in ("user", "logit_bias")}
    return client.generate(logit_bias={7: -3}, **sampling, **OURS, **options).text


def test_completions_with_every_parameter(api: openai.OpenAI, client: Client) -> None:
    answer = api.completions.create(
        model="tiny-target", prompt=PROMPT, max_tokens=20, n=1, best_of=1, echo=False, logprobs=3, stream=False,
        extra_body=EXTRA, **SAMPLING,
    )  # fmt: skip
    assert answer.choices[0].text == expected(client, prompt=PROMPT, max_tokens=20)
    assert answer.object == "text_completion" and answer.model == "tiny-target" and answer.id.startswith("cmpl-")
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and len(logprobs.tokens) <= 20
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    (statistics,) = answer.usage.model_extra["draftbridge"]  # type: ignore[index]
    assert statistics["mode"] == "lockstep" and statistics["num_draft_tokens"] > 0


def test_chats_with_every_parameter(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look"}}
    answer = api.chat.completions.create(
        model="tiny-target", messages=MESSAGES, max_completion_tokens=20, n=2, logprobs=True, top_logprobs=2,
        tools=[tool], tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"},
        service_tier="auto", store=False, modalities=["text"], stream=False, extra_body=EXTRA, **SAMPLING,
    )  # fmt: skip
    assert answer.choices[0].message.content
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason in ("length", "stop")
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage and answer.usage.prompt_tokens_details is not None


def test_streams(api: openai.OpenAI, client: Client) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": EXTRA, **SAMPLING}
    chunks = list(api.completions.create(model="tiny-target", prompt=PROMPT, max_tokens=20, **options))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == expected(client, prompt=PROMPT, max_tokens=20)
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens <= 20 and not chunks[-1].choices
    pieces = list(api.chat.completions.create(model="tiny-target", messages=MESSAGES, max_tokens=20, **options))
    assert pieces[0].choices[0].delta.role == "assistant"
    content = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    plain = [MESSAGES[0], {"role": "user", "content": "Say something."}]
    assert content == expected(client, messages=plain, max_tokens=20)
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]].count(None) == len(pieces) - 2


def test_the_package_s_own_accumulation_of_a_stream(api: openai.OpenAI) -> None:
    options: Any = {"model": "tiny-target", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    text = api.chat.completions.create(**options).choices[0].message.content
    assert text
    with api.chat.completions.stream(**options, stop=text[-2:]) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    again = api.chat.completions.create(**options, stop=text[-2:])
    assert whole.choices[0].message.content == again.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"


def test_a_demanded_call_of_a_tool(api: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"d": {"enum": [1, 2]}}, "required": ["d"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}
    options: Any = {"model": "tiny-target", "messages": MESSAGES, "tools": [tool], "tool_choice": "required", "seed": 3}
    message = api.chat.completions.create(**options).choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function" and call.function.name == "look" and message.content is None
    with api.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments == call.function.arguments
    # What the package returns can be sent back, also what it has parsed.
    parsed = api.chat.completions.parse(**options).choices[0].message
    assert parsed.tool_calls and parsed.tool_calls[0].function.parsed_arguments
    for one in (message, choice.message, parsed):
        (called,) = one.tool_calls or []
        result = {"role": "tool", "tool_call_id": called.id, "content": "5"}
        messages: Any = [*MESSAGES, one, result]
        assert api.chat.completions.create(model="tiny-target", messages=messages, max_tokens=1).choices


async def test_asynchronously(tiny_fleet: Fleet) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{tiny_fleet.http}/v1", api_key="unused", max_retries=0) as api,
        AsyncClient(tiny_fleet.bridge) as client,
    ):

        async def stream(seed: int) -> str:
            chunks = await api.completions.create(
                model="tiny-target", prompt=PROMPT, max_tokens=20, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        texts = await asyncio.gather(*map(stream, range(4)))
        whole = [(await client.generate(PROMPT, max_tokens=20, temperature=1.0, seed=seed)).text for seed in range(4)]
        assert texts == whole
        assert [model.id async for model in api.models.list()] == ["tiny-target"]
        assert (await api.models.retrieve("tiny-target")).id == "tiny-target"


# Values of parameters that have an effect or describe the default, and values that are not supported.
HONOURED: dict[str, list[Any]] = {
    "best_of": [1], "echo": [False], "frequency_penalty": [0.5], "logit_bias": [{"7": -3}], "logprobs": [],
    "max_completion_tokens": [1], "max_tokens": [1], "messages": [], "metadata": [{"a": "b"}],
    "modalities": [["text"]], "model": [], "n": [2],
    "parallel_tool_calls": [True, False], "presence_penalty": [0.5], "prompt": [],
    "prompt_cache_key": ["a"], "safety_identifier": ["a"],
    "response_format": [{"type": "text"}],
    "seed": [3], "service_tier": ["auto", "default"], "stop": ["a", ["a", "b"]], "store": [False], "stream": [True],
    "stream_options": [], "suffix": [], "temperature": [0.5], "tool_choice": ["auto", "none"], "tools": [[]],
    "top_logprobs": [], "top_p": [0.5], "user": ["somebody"],
}  # fmt: skip
UNSUPPORTED = {
    "best_of": 3, "echo": True, "modalities": ["audio"], "service_tier": "flex",
    "response_format": {"type": "other"}, "store": True, "stream_options": {"include_usage": True}, "suffix": "end",
    "tool_choice": "always", "top_logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["completions", "chats"])
def test_every_parameter_is_honoured_or_refused_by_its_name(api: openai.OpenAI, kind: str) -> None:
    call: Any = api.completions.create if kind == "completions" else api.chat.completions.create
    given: dict[str, Any] = {"prompt": PROMPT} if kind == "completions" else {"messages": MESSAGES}
    body = CompletionRequest if kind == "completions" else ChatCompletionRequest
    options = {"extra_headers", "extra_query", "extra_body", "timeout"}
    parameters = set(inspect.signature(call).parameters) - options
    honoured = parameters & set(body.model_fields)
    assert honoured <= set(HONOURED) and len(honoured) > 12, "a parameter has no value above"
    for name in honoured:
        for value in HONOURED[name]:
            limit = {} if "max" in name else {"max_tokens": 1}
            assert call(**({"model": "tiny-target"} | limit | given | {name: value}))
    refused = dict.fromkeys(parameters - honoured, "x")
    refused |= {name: value for name, value in UNSUPPORTED.items() if name in honoured}
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as caught:
            call(model="tiny-target", max_tokens=1, **given, **{name: value})
        assert str(caught.value.param).partition(".")[0].partition("[")[0] == name


def test_errors_are_the_package_s_own(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="nobody", prompt="a")
    assert missing.value.param == "model" and missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        api.chat.completions.create(model="tiny-target", messages=[{"role": "user", "content": "word " * 400}])
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as unsupported:
        api.chat.completions.create(model="tiny-target", messages=MESSAGES, reasoning_effort="low")
    assert unsupported.value.param == "reasoning_effort"
