"""The HTTP door: what it answers, and how it refuses what it does not support."""

import json
from collections.abc import Iterator

import httpx2 as httpx
import jsonschema
import pytest

from draftbridge import Client
from draftbridge.v1 import bridge_pb2
from services.cli.processes import Fleet, launched

PROMPT = "The quick brown"
CHAT = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def doors(tiny_fleet: Fleet) -> Iterator[dict[str, str]]:
    """The door in the bridge's own process, and one in a process before it."""
    options = ("--bridge", tiny_fleet.bridge, "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with launched("http", "http", *options) as (url, _):
        yield {"bridge": tiny_fleet.http, "http": url}


@pytest.fixture(params=["bridge", "http"])
def http(request: pytest.FixtureRequest, doors: dict[str, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=doors[request.param], timeout=60) as client:
        yield client


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    defaults = {"model": "tiny-target", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    return http.post("/v1/completions", json=defaults | body)


def chat(http: httpx.Client, **body: object) -> httpx.Response:
    defaults = {"model": "tiny-target", "messages": CHAT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    return http.post("/v1/chat/completions", json=defaults | body)


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    """Asserts that the request was refused in OpenAI's form, and returns the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    return str(error["message"])


def events(response: httpx.Response) -> list[dict]:
    """Returns the events of a complete stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


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
    whole = complete(http, draftbridge=ours, max_tokens=60).json()
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
    assert reported["token_logprobs"] == pytest.approx(values)
    assert all(1 <= len(top) <= 3 for top in reported["top_logprobs"])
    assert all(token in top for token, top in zip(reported["tokens"], reported["top_logprobs"], strict=True))
    content = chat(http, logprobs=True, top_logprobs=2, max_tokens=8).json()["choices"][0]
    entries = content["logprobs"]["content"]
    assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in entries)
    spelled = b"".join(bytes(one["bytes"]) for one in entries)
    assert spelled.decode(errors="replace") == content["message"]["content"]
    streamed = events(chat(http, logprobs=True, max_tokens=8, stream=True))
    parts = [part["choices"][0]["logprobs"] for part in streamed]
    assert [one["token"] for part in parts if part for one in part["content"]] == [one["token"] for one in entries]


def test_a_token_that_ends_the_text_has_no_log_probability(http: httpx.Client) -> None:
    answer = complete(http, temperature=0, logit_bias={"2": 100}, logprobs=1).json()
    assert answer["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 1


def test_tools_reach_the_template(http: httpx.Client, client: Client) -> None:
    tools = [{"function": {"parameters": ["a", 5, None]}}]  # over gRPC, the order of several keys would not be kept
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    expected = client.generate(messages=CHAT, template_variables={"tools": tools}, **options)
    answer = chat(http, tools=tools, tool_choice="auto").json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.started.prompt_token_count
    without = chat(http).json()
    assert answer["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
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
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name in ("travel", "look")
    ]
    named = {"type": "function", "function": {"name": "look"}}
    for choice, names in (("required", {"travel", "look"}), (named, {"look"})):
        answer = chat(http, tools=tools, tool_choice=choice, max_tokens=60)
        assert answer.status_code == 200, answer.text
        answer = answer.json()["choices"][0]
        call = json.loads(answer["message"]["content"])
        assert call["name"] in names
        jsonschema.validate(call["arguments"], schema)
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
    refused(http.post("/v1/segmentations", json={"text": "a", "models": []}), 400, "models")
    refused(http.post("/v1/segmentations", json={"text": 5, "models": ["tiny-draft"]}), 400, "text")
    refused(http.post("/v1/segmentations", json={"text": "a", "models": ["nobody"]}), 404, "model")


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"colour": "red"}, "colour"),
        ({"draft": "tiny-draft"}, "draft"),
        ({"draftbridge": {"speed": 1}}, "draftbridge.speed"),
        ({"draftbridge": {"mode": "fast"}}, "draftbridge.mode"),
        ({"draftbridge": {"num_assistant_tokens": 65}}, "draftbridge.num_assistant_tokens"),
        ({"draftbridge": {"sources": ["oracle"]}}, "draftbridge.sources"),
        ({"draftbridge": {"tenant": "x" * 257}}, "draftbridge.tenant"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": 101}, "frequency_penalty"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logprobs": 101}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": "word " * 400}, "prompt"),
        ({"seed": 2**64}, "seed"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
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
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"prompt": "a"}, "prompt"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tools": "look"}, "tools"),
    ],
)
def test_a_chat_with_a_bad_parameter_is_refused_by_its_name(
    http: httpx.Client, body: dict[str, object], param: str
) -> None:
    refused(chat(http, **body), 400, param)


def test_an_unknown_model_or_draft_is_not_found(http: httpx.Client) -> None:
    assert "tiny-target" in refused(complete(http, model="nobody"), 404, "model")
    assert "tiny-draft" in refused(chat(http, draftbridge={"draft": "nobody"}), 404, "draftbridge.draft")


def test_errors_before_the_first_text_of_a_stream_have_their_status(http: httpx.Client) -> None:
    refused(complete(http, stream=True, prompt="word " * 400), 400, "prompt")
    refused(chat(http, stream=True, top_p=2), 400, "top_p")


def test_null_is_the_same_as_leaving_a_field_out(http: httpx.Client) -> None:
    fields = ["top_p", "top_k", "min_p", "logit_bias", "stop", "n", "stream", "stream_options", "user", "logprobs"]
    assert complete(http, **dict.fromkeys(fields)).json()["choices"] == complete(http).json()["choices"]


def test_parts_of_text_are_content(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "something."}]
    whole = [{"role": "user", "content": "Say\nsomething."}]
    said = chat(http, messages=[{"role": "user", "content": parts}])
    assert said.json()["choices"] == chat(http, messages=whole).json()["choices"]


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    refused(http.get("/v1/embeddings"), 404, None)
    refused(http.post("/v1/embeddings", json={}), 404, None)
    refused(http.get("/v1/completions"), 405, None)
