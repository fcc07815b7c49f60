"""The HTTP door refuses what it does not support by its name, in both of its forms."""

from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from bridge.errors import InvalidField
from services.cli.processes import Fleet
from services.errors import DraftAway, PairRefused
from services.http.errors import report
from tests.support.doors import CHAT, chat, complete, door, refused, tool

UNSUPPORTED = {"properties": {"b": {"not": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def nested(depth: int) -> dict[str, Any]:
    """Returns `depth` objects inside each other."""
    return {"a": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"colour": "red"}, "colour"),
        ({"draft": "tiny-draft"}, "draft"),
        ({"draftbridge": {"speed": 1}}, "draftbridge.speed"),
        ({"draftbridge": {"mode": "fast"}}, "draftbridge.mode"),
        ({"draftbridge": {"spans": True}}, "draftbridge.spans"),
        ({"draftbridge": {"progress": True}}, "draftbridge.progress"),
        ({"draftbridge": {"num_assistant_tokens": 65}}, "draftbridge.num_assistant_tokens"),
        ({"draftbridge": {"sources": ["oracle"]}}, "draftbridge.sources"),
        ({"draftbridge": {"tenant": "x" * 257}}, "draftbridge.tenant"),
        ({"draftbridge": {"draft": "a", "drafts": ["b"]}}, "draftbridge.drafts"),
        ({"draftbridge": {"drafts": ["tiny-draft"] * 100}}, "draftbridge.drafts"),
        ({"draftbridge": {"workload": "x" * 1000}}, "draftbridge.workload"),
        ({"tenant": "ann"}, "tenant"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": 101}, "frequency_penalty"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {str(id_): 1 for id_ in range(1001)}}, "logit_bias"),
        ({"logprobs": 101}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": "word " * 400}, "prompt"),
        ({"seed": 2**64}, "seed"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [1] * 1001}, "stop_token_ids"),
        ({"store": True}, "store"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"suffix": "end"}, "suffix"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_a_completion_with_a_bad_parameter_is_refused_by_its_name(
    http: httpx.Client, body: dict[str, object], param: str
) -> None:
    assert param in refused(complete(http, **body), 400, param) or param == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"audio": {}}, "audio"),
        ({"functions": []}, "functions"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"max_completion_tokens": 10_000, "max_tokens": None}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "messages[0].text"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"n": 1}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"prompt": "a"}, "prompt"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True}}},
            "response_format.json_schema.schema",
        ),
        (
            {"draftbridge": {"choice": ["a"]}, "tools": [tool("look")], "tool_choice": "required"},
            "draftbridge",
        ),
        (
            {"tools": [tool("look", parameters={"type": "array"})], "tool_choice": "required"},
            "tools[0].function.parameters.type",
        ),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": "look"}, "tools"),
        ({"tools": [tool("a")], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("a", parameters="abc")]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", parameters=5)], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [tool("a", parameters=nested(25))]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", parameters={"maximum": 10**400})]}, "tools[0].function.parameters"),
        (
            {"tools": [tool("a"), tool("b", parameters=UNSUPPORTED)], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        ({"tools": [tool("a")], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"chat_template_kwargs": nested(25)}, "chat_template_kwargs"),
    ],
)
def test_a_chat_with_a_bad_parameter_is_refused_by_its_name(
    http: httpx.Client, body: dict[str, object], param: str
) -> None:
    refused(chat(http, **body), 400, param)


def test_a_size_is_that_of_the_value_s_kind(http: httpx.Client) -> None:
    for name, value, kind in (("logit_bias", {str(id_): 1 for id_ in range(1001)}, "an object"),
                              ("stop_token_ids", [1] * 1001, "a list")):  # fmt: skip
        message = refused(complete(http, **{name: value}), 400, name)
        assert message.startswith(f"{name} must be {kind} with at most 1000 items, got")


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_error_in_a_tool_names_its_place_in_that_tool(http: httpx.Client, name: str) -> None:
    broken = tool("b", parameters={"properties": {"c": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"pattern": "("}}})
    tools = [broken, tool("a")] if name == "a" else [tool("a"), broken]
    answer = chat(http, tools=tools, tool_choice="required")
    place = tools.index(broken)
    message = refused(answer, 400, f"tools[{place}].function.parameters")
    assert message.startswith(f"tools[{place}].function.parameters cannot be used at #/$defs/d: regex")


def test_an_unknown_model_or_draft_is_not_found(http: httpx.Client) -> None:
    assert "tiny-target" in refused(complete(http, model="nobody"), 404, "model")
    assert "tiny-draft" in refused(chat(http, draftbridge={"draft": "nobody"}), 404, "draftbridge.draft")
    assert "tiny-draft" in refused(chat(http, draftbridge={"drafts": ["nobody"]}), 404, "draftbridge.drafts")


@pytest.mark.parametrize(
    ("error", "expected", "param"),
    [
        (PairRefused("a", "b", "c"), 400, "draftbridge.draft"),
        (DraftAway("a", "later:50052", "it does not answer"), 503, "draftbridge.draft"),
        (InvalidField("chat.messages", "alternating", "others"), 400, "messages"),
    ],
)
def test_errors_of_the_bridge_name_the_parameter(error: Exception, expected: int, param: str) -> None:
    status, body, _ = report(error)
    assert (status, body["error"]["param"]) == (expected, param)
    assert body["error"]["message"] == str(error).removeprefix("chat.")


def test_errors_before_the_first_text_of_a_stream_have_their_status(http: httpx.Client) -> None:
    refused(complete(http, stream=True, prompt="word " * 400), 400, "prompt")
    refused(chat(http, stream=True, top_p=2), 400, "top_p")


def test_messages_name_what_is_allowed(http: httpx.Client) -> None:
    assert "'opportunistic'" in refused(complete(http, draftbridge={"mode": "fast"}), 400, "draftbridge.mode")
    assert "stop[1] must be a valid string, got 5" in refused(complete(http, stop=["a", 5]), 400, "stop[1]")
    beyond = chat(http, max_completion_tokens=10_000, max_tokens=None)
    assert refused(beyond, 400, "max_completion_tokens").startswith("max_completion_tokens 10000 does not fit")
    for kind, given, rule in (
        ("json_schema", {}, "given with type json_schema, got none"),
        ("text", {"json_schema": {"name": "a"}}, "left out unless type is json_schema, got text"),
    ):
        message = refused(chat(http, response_format={"type": kind} | given), 400, "response_format.json_schema")
        assert message == f"response_format.json_schema must be {rule}"


def test_max_tokens_that_do_not_fit_have_a_remedy_that_helps(http: httpx.Client) -> None:
    """A completion without `max_tokens` has 16 tokens only, so leaving them out does not help."""
    message = refused(complete(http, max_tokens=10_000), 400, "max_tokens")
    most = int(message.rpartition("request at most ")[2])
    assert complete(http, max_tokens=most).is_success
    refused(complete(http, max_tokens=most + 1), 400, "max_tokens")


def test_a_message_that_quotes_a_long_name_lacks_its_middle(http: httpx.Client) -> None:
    for answer, param in (
        (complete(http, model="x" * 3000), "model"),
        (chat(http, draftbridge={"draft": "x" * 3000}), "draftbridge.draft"),
    ):
        message = refused(answer, 404, param)
        assert len(message) <= 600 and "x ... x" in message


async def test_tools_that_the_template_has_no_place_for_are_refused(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": CHAT, "max_tokens": 1, "draftbridge": {"mode": "off"}, "tools": [tool("look")]}
    async with door(tiny_fleet) as (url, gateway), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        endpoint = gateway.zoo.target("")
        without = replace(endpoint, model=replace(endpoint.model, chat_template=""))
        monkeypatch.setattr(gateway.zoo, "replicas", lambda _: [without])
        answer = await http.post("/v1/chat/completions", json=body)
        assert "has no place for them" in refused(answer, 400, "tools")
        assert (await http.post("/v1/chat/completions", json=body | {"tool_choice": "none"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"draftbridge": {"regex": "a"}}, "draftbridge.regex"),
        ({"draftbridge": {"choice": ["a"]}}, "draftbridge.choice"),
        ({"draftbridge": {"grammar": 'start: "a"'}}, "draftbridge.grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
        ),
        ({"tools": [tool("look")], "tool_choice": "required"}, "tools"),
    ],
)
async def test_a_target_without_grammars_refuses_each_of_their_forms(
    tiny_fleet: Fleet, body: dict[str, Any], param: str
) -> None:
    async with door(tiny_fleet) as (url, gateway), httpx.AsyncClient(base_url=url) as http:
        gateway.zoo.target("").description.grammars = False
        answer = await http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1} | body)
        assert refused(answer, 400, param).endswith(f"or send the request without {param}")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "1" + "0" * 400])
def test_numbers_beyond_floats_are_refused(http: httpx.Client, number: str) -> None:
    body = (
        '{"model": "tiny-target", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [N]}}'
    )
    json_ = {"content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=body.replace("N", number), headers=json_)
    refused(answer, 400, "chat_template_kwargs")


def test_half_of_a_surrogate_pair_is_named(http: httpx.Client) -> None:
    """JavaScript's JSON.stringify writes it for a character that was cut in half."""
    body = '{"model": "tiny-target", "prompt": "\\ud800 x"}'
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "half of a surrogate pair" in refused(answer, 400, None)


def test_free_json_may_be_as_deep_as_the_bridge_receives_it(http: httpx.Client) -> None:
    assert chat(
        http, chat_template_kwargs=nested(24), tools=[tool("a", parameters=nested(24))], max_tokens=1
    ).is_success
    earlier = {**CALL, "function": {"name": "a", "arguments": nested(24)}}
    messages = [*CHAT, {"role": "assistant", "tool_calls": [earlier]}]
    assert chat(http, messages=messages, max_tokens=1).is_success


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    refused(http.get("/v1/embeddings"), 404, None)
    refused(http.post("/v1/embeddings", json={}), 404, None)
    refused(http.get("/v1/completions"), 405, None)
