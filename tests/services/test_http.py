"""The HTTP door: what it answers."""

import json

import httpx2 as httpx
import jsonschema
import pytest

from draftbridge import Client
from draftbridge.v1 import bridge_pb2
from services.http.requests import CompletionRequest, Extension
from tests.support.doors import CHAT, PROMPT, chat, complete, events, refused, tool


def test_its_text_is_that_of_the_grpc_door(http: httpx.Client, client: Client) -> None:
    expected = client.generate(PROMPT, max_tokens=12, temperature=1.0, seed=3)
    answer = complete(http).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == expected.started.prompt_token_count
    said = chat(http).json()["choices"][0]["message"]
    told = client.generate(messages=CHAT, max_tokens=12, temperature=1.0, seed=3)
    assert said == {"role": "assistant", "content": told.text, "refusal": None, "annotations": []}


@pytest.mark.parametrize("mode", ["off", "lockstep", "opportunistic", "auto"])
def test_a_stream_adds_up_to_the_answer_in_every_mode(http: httpx.Client, mode: str) -> None:
    ours = {"mode": mode, "draft": "tiny-draft", "spans": True}
    whole = complete(http, draftbridge=ours | {"spans": None}, max_tokens=60).json()
    stream = complete(http, draftbridge=ours, max_tokens=60, stream=True, stream_options={"include_usage": True})
    *parts, last = events(stream)
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == whole["choices"][0]["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(part["usage"] is None for part in parts)
    (statistics,) = last["usage"]["draftbridge"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 60
    assert statistics["mode"] == mode and statistics["seed"] == 3
    spans = [span for part in parts for span in part["choices"][0].get("draftbridge", {}).get("spans", [])]
    assert sum(span["byte_count"] for span in spans) == len(text.encode())
    assert statistics["draft"] == ("" if mode == "off" else "tiny-draft")
    if mode == "lockstep":
        assert statistics["num_draft_tokens"] > 0


def test_the_statistics_are_those_of_the_contract(http: httpx.Client, client: Client) -> None:
    (statistics,) = complete(http).json()["usage"]["draftbridge"]
    contract = {field.name for field in bridge_pb2.SpeculationStatistics.DESCRIPTOR.fields}
    assert set(statistics) == contract | {"index", "target", "draft", "seed"}


def test_a_draft_is_chosen_or_named_in_order_of_preference(http: httpx.Client) -> None:
    (chosen,) = complete(http, draftbridge={"workload": "tales"}).json()["usage"]["draftbridge"]
    assert chosen["draft_choice"]["draft"] == chosen["draft"] == "tiny-draft"
    (named,) = complete(http, draftbridge={"drafts": ["tiny-draft", "tiny-draft"]}).json()["usage"]["draftbridge"]
    assert named["drafts"] == ["tiny-draft"] and named["draft_choice"] is None
    refused = complete(http, draftbridge={"drafts": ["tiny-draft"], "draft": "tiny-draft"})
    assert refused.status_code == 400 and "empty if draft is given" in refused.json()["error"]["message"]


def test_choices_have_consecutive_seeds(http: httpx.Client) -> None:
    answer = complete(http, n=2, prompt=[PROMPT, "She sells"], ignore_eos=True).json()
    alone = [
        complete(http, prompt=prompt, seed=seed, ignore_eos=True).json()["choices"][0]["text"]
        for prompt in (PROMPT, "She sells")
        for seed in (3, 4)
    ]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 48
    (seed,) = [one["seed"] for one in complete(http, seed=None).json()["usage"]["draftbridge"]]
    assert 0 <= seed < 2**53


def test_token_ids_are_a_prompt(http: httpx.Client, client: Client) -> None:
    ids = [1, 20, 30, 40]
    expected = client.generate(token_ids=ids, max_tokens=5, temperature=0).text
    assert complete(http, prompt=ids, max_tokens=5, temperature=0).json()["choices"][0]["text"] == expected
    assert len(complete(http, prompt=[ids, ids], max_tokens=1).json()["choices"]) == 2


def test_log_probabilities(http: httpx.Client, client: Client) -> None:
    deltas = [
        event
        for event in client.stream(PROMPT, max_tokens=12, temperature=1.0, seed=3, logprobs=2)
        if isinstance(event, bridge_pb2.GenerateDelta)
    ]
    values = [one.logprob for delta in deltas for one in delta.logprobs]
    reported = complete(http, logprobs=2).json()["choices"][0]["logprobs"]
    assert len(reported["tokens"]) == len(reported["token_logprobs"]) == len(reported["text_offset"]) == 12
    assert reported["token_logprobs"] == pytest.approx(values, abs=1e-4)
    assert all(1 <= len(top) <= 3 for top in reported["top_logprobs"])
    assert all(token in top for token, top in zip(reported["tokens"], reported["top_logprobs"], strict=True))
    # Tokens that are not whole characters keep names of their own.
    (top, *_) = complete(http, logprobs=100).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert "\ufffd" not in top and sum(name.startswith("bytes:\\x") for name in top) > 1
    content = chat(http, logprobs=True, top_logprobs=2, max_tokens=8).json()["choices"][0]
    entries = content["logprobs"]["content"]
    assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in entries)
    spelled = b"".join(bytes(one["bytes"]) for one in entries)
    assert spelled.decode(errors="replace") == content["message"]["content"]
    streamed = events(chat(http, logprobs=True, max_tokens=8, stream=True))
    parts = [part["choices"][0]["logprobs"] for part in streamed]
    assert [one["token"] for part in parts if part for one in part["content"]] == [one["token"] for one in entries]


def test_log_probabilities_name_the_place_of_each_token_in_the_text(http: httpx.Client) -> None:
    choices = complete(http, n=4, max_tokens=24, ignore_eos=True, logprobs=0).json()["choices"]
    assert any("\ufffd" in choice["text"][:8] for choice in choices), "bytes that are not UTF-8 count, too"
    for choice in choices:
        reported = choice["logprobs"]
        for token, offset in zip(reported["tokens"], reported["text_offset"], strict=True):
            # Control tokens add no text.
            assert token.startswith(("bytes:", "<")) or choice["text"].startswith(token, offset)


def test_a_token_that_ends_the_text_has_no_log_probability(http: httpx.Client) -> None:
    answer = complete(http, temperature=0, logit_bias={"2": 100}, logprobs=1).json()
    assert answer["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 1


def test_tools_reach_the_template_with_their_keys_in_order(http: httpx.Client, client: Client) -> None:
    tools = [tool("look", parameters={"enum": [1.0, 2**53 + 1, None]})]
    answer = chat(http, tools=tools, tool_choice="auto").json()
    sent = client.generate(messages=CHAT, template_variables={"tools": tools}, max_tokens=12, temperature=1.0, seed=3)
    assert answer["choices"][0]["message"]["content"] == sent.text
    assert answer["usage"]["prompt_tokens"] == sent.started.prompt_token_count
    without = chat(http).json()
    assert answer["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
    assert answer["choices"] != without["choices"]
    assert chat(http, tools=tools, tool_choice="none").json()["choices"] == without["choices"]
    refused(chat(http, chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs")
    refused(chat(http, tools=tools, chat_template_kwargs={"tools": []}), 400, "chat_template_kwargs")
    refused(chat(http, tool_choice="required"), 400, "tool_choice")
    refused(chat(http, tools=tools, parallel_tool_calls=False), 400, "parallel_tool_calls")


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_json_has_the_form_that_is_asked_for(http: httpx.Client, client: Client) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    answer = chat(http, response_format=named, max_tokens=60).json()["choices"][0]
    jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
    assert answer["finish_reason"] == "stop"
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "json_schema": SCHEMA}
    assert answer["message"]["content"] == client.generate(messages=CHAT, **options).text
    free = chat(http, response_format={"type": "json_object"}, max_tokens=60).json()["choices"][0]
    assert free["message"]["content"].startswith("{")
    assert complete(http, draftbridge={"choice": ["yes", "no"]}).json()["choices"][0]["text"] in ("yes", "no")


def test_a_strict_tool_is_called_as_its_schema_says(http: httpx.Client) -> None:
    # So small that the rendered tools fit the model's context.
    schema = {"properties": {"d": {"enum": [1, 2]}}, "required": ["d"], "additionalProperties": False}
    tools = [tool(name, parameters=schema, strict=True) for name in ("travel", "look")]
    for choice, names in (("required", {"travel", "look"}), (tool("look"), {"look"})):
        answer = chat(http, tools=tools, tool_choice=choice, max_tokens=60, parallel_tool_calls=False)
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["choices"]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        assert set(call) == {"id", "type", "function"} and call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        streamed = [
            part["choices"][0]
            for part in events(chat(http, tools=tools, tool_choice=choice, max_tokens=60, stream=True))
        ]
        assert not any(part["delta"].get("content") for part in streamed)
        pieces = [piece for part in streamed for piece in part["delta"].get("tool_calls", [])]
        whole = pieces[0]["function"] | {"arguments": "".join(one["function"]["arguments"] for one in pieces)}
        assert whole == call["function"] and streamed[-1]["finish_reason"] == "tool_calls"
    # The answer and the result of the tool continue the chat.
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    assert chat(http, messages=[*CHAT, found["message"], result], tools=tools[:1], tool_choice="none").is_success
    refused(chat(http, tools=tools), 400, "tools[0].function.strict")
    refused(chat(http, tools=tools, tool_choice={"type": "function", "function": {"name": "x"}}), 400, "tool_choice")


def test_a_grammar_that_cannot_be_used_is_refused_with_its_place(http: httpx.Client) -> None:
    wrong = {"name": "a", "schema": {"properties": {"b": {"not": {}}}}}
    answer = chat(http, response_format={"type": "json_schema", "json_schema": wrong})
    message = refused(answer, 400, "response_format.json_schema")
    assert "#/properties/b" in message and answer.json()["error"]["code"] == "invalid_grammar"
    refused(complete(http, draftbridge={"regex": "("}), 400, "draftbridge.regex")
    refused(complete(http, draftbridge={"regex": "a", "choice": ["b"]}), 400, "draftbridge")


def test_models_and_health(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny-target"]
    assert listed["draftbridge"]["drafts"] == [{"id": "tiny-draft"}]
    assert http.get("/v1/models/tiny-target").json() == listed["data"][0]
    refused(http.get("/v1/models/nobody"), 404, "model")
    refused(http.get("/v1/models/"), 404, None)
    health = http.get("/health").json()
    assert health["status"] == "ok" and {one["problem"] for one in health["services"]} == {None}


def test_two_models_segment_a_text(http: httpx.Client, client: Client) -> None:
    text = "The quick brown fox, naïve 😀"
    answer = http.post("/v1/segmentations", json={"text": text, "models": ["tiny-target", "tiny-draft"]}).json()
    assert [row["model"] for row in answer["data"]] == ["tiny-target", "tiny-draft"]
    expected = client.translate(text, source="tiny-target", target="tiny-draft")
    for row, tokens in zip(answer["data"], (expected.source_tokens, expected.target_tokens), strict=True):
        assert [one["id"] for one in row["tokens"]] == [one.token_id for one in tokens]
        assert [one["byte_count"] for one in row["tokens"]] == [len(one.data) for one in tokens]
        assert sum(one["byte_count"] for one in row["tokens"]) == len(text.encode())
    (alone,) = http.post("/v1/segmentations", json={"text": "a", "models": ["tiny-draft"]}).json()["data"]
    assert alone["model"] == "tiny-draft" and "".join(one["text"] for one in alone["tokens"]) == "a"
    refused(http.post("/v1/segmentations", json={"text": "a", "models": ["nobody"]}), 404, "models")
    message = refused(http.post("/v1/segmentations", json={"text": "a", "models": []}), 400, "models")
    assert message.startswith("models must be a list with at least 1 item, got")
    long = http.post("/v1/segmentations", json={"text": "a" * 65_537, "models": ["tiny-draft"]})
    assert refused(long, 400, "text").startswith("text must be a string with at most 65536 characters, got")
    refused(http.post("/v1/segmentations", json={"text": 5, "models": ["tiny-draft"]}), 400, "text")


def test_a_stream_reports_its_progress(http: httpx.Client) -> None:
    ours = {"mode": "lockstep", "progress": True}
    options = {"max_tokens": 60, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *parts, last = events(complete(http, draftbridge=ours, stream=True, **options))
    told = [part["choices"][0].get("draftbridge", {}).get("progress") for part in parts]
    reports = [one for one in told if one]
    (final,) = last["usage"]["draftbridge"]
    passes = [one["target_pass_count"] for one in reports]
    assert passes[0] >= 1 and passes == sorted(passes) and passes[-1] <= final["target_pass_count"]
    assert set(reports[0]) <= set(final) | {"cached_token_count"}
    assert final["plain_tokens_per_second"] > 0 and final["current_plan"].startswith("draft in turns")
    quiet = events(complete(http, draftbridge={"mode": "lockstep"}, stream=True))
    assert all("draftbridge" not in part["choices"][0] for part in quiet)


def test_null_is_the_same_as_leaving_a_field_out(http: httpx.Client) -> None:
    fields = set(CompletionRequest.model_fields) - {"prompt", "max_tokens", "temperature", "seed"}
    ours = {"draftbridge": dict.fromkeys(Extension.model_fields)}
    for empty in (dict.fromkeys(fields), ours):
        assert complete(http, **empty).json()["choices"] == complete(http).json()["choices"]


def test_a_call_that_is_cut_has_the_arguments_so_far(http: httpx.Client) -> None:
    schema = {"properties": {"long": {"const": "x" * 200}}, "required": ["long"]}
    options = {"tools": [tool("f", parameters=schema)], "tool_choice": "required", "max_tokens": 40}
    (cut,) = chat(http, **options).json()["choices"]
    arguments = cut["message"]["tool_calls"][0]["function"]["arguments"]
    assert cut["finish_reason"] == "length" and arguments.startswith('{"long": "x')
    streamed = [part["choices"][0] for part in events(chat(http, **options, stream=True))]
    pieces = [piece for part in streamed for piece in part["delta"].get("tool_calls", [])]
    assert "".join(one["function"]["arguments"] for one in pieces) == arguments
    assert streamed[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [{"max_tokens": 5}, {"stop": '{"'}], ids=["tokens", "stop"])
def test_a_call_that_is_cut_before_its_arguments_is_content(http: httpx.Client, limit: dict[str, object]) -> None:
    options = {"tools": [tool("f")], "tool_choice": "required", "logprobs": True} | limit
    (cut,) = chat(http, **options).json()["choices"]
    content = cut["message"]["content"]
    assert "tool_calls" not in cut["message"] and '{"name": "f"'.startswith(content)
    assert bool(content) == ("max_tokens" in limit)
    streamed = [part["choices"][0] for part in events(chat(http, **options, stream=True))]
    assert "".join(part["delta"].get("content") or "" for part in streamed) == content
    assert streamed[-1]["finish_reason"] == cut["finish_reason"]
    assert chat(http, messages=[*CHAT, cut["message"], *CHAT]).is_success


def test_parts_of_text_are_content(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "something."}]
    whole = [{"role": "user", "content": "Say\nsomething."}]
    said = chat(http, messages=[{"role": "user", "content": parts}])
    assert said.json()["choices"] == chat(http, messages=whole).json()["choices"]
