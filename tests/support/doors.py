"""Requests to the doors for HTTP, and what their answers must be."""

import json

import httpx2 as httpx

PROMPT = "The quick brown"
CHAT = [{"role": "user", "content": "Say something."}]


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


def tool(name: str, **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}
