"""Answers of the HTTP door, as a whole and as a stream, and those that the end of the server cuts off."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest
from starlette.responses import Response

from bridge.errors import EngineFailure
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode
from bridge.ports import FinishReason, Logprob
from bridge.request import Request
from bridge.statistics import Statistics
from services.bridge.backend import Opened, ServedModel
from services.cli.processes import Fleet
from services.http import answer as answer_module
from services.http.answer import Answer, Limits, respond
from services.http.generation import Event
from services.http.requests import CompletionRequest
from services.http.responses import ChatFormat, Choice, CompletionFormat
from tests.support import tiny
from tests.support.doors import LONG, door, refused
from tests.support.memory import in_own_process

MODEL = ServedModel("m", 1000, False, (), tiny.model("byte_level").vocabulary)


async def events(tokens: int) -> AsyncGenerator[Event]:
    """Yields two choices whose tokens have 20 alternatives each."""
    for index in range(2):
        yield index, Opened("m", "", 0, 1)
        for _ in range(tokens):
            top = tuple((id_, -id_ / 7) for id_ in range(70, 90))
            yield index, Delta("\u00e9", (71,), (Logprob(-71 / 7, top),))
        yield index, Finished(FinishReason.LENGTH, 1, tokens, tokens, 1, 1, Mode.OFF, Statistics())


async def stay() -> Any:
    await asyncio.Event().wait()


def _answered(chat: bool) -> tuple[bytes, int]:
    """Returns the body of an answer of 300 tokens, and the most memory that was in use."""
    form, body = (ChatFormat if chat else CompletionFormat), CompletionRequest(prompt="a")
    choices = [Choice(index, Request("a"), MODEL) for index in range(2)]
    tracemalloc.start()
    response = asyncio.run(respond(Answer(form(MODEL), choices, events(300), lambda _: None), body, stay))
    assert response
    return response.body, tracemalloc.get_traced_memory()[1]


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_held_as_they_are_sent(chat: bool) -> None:
    body, peak = in_own_process(_answered, chat)
    assert len(body) > 200_000 and peak < 3 * len(body)
    for choice in json.loads(body)["choices"]:
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values() if values is not None} == {300}


async def test_a_whole_answer_ends_when_it_has_been_read() -> None:
    read, body = asyncio.Event(), b""

    async def send(message: Any) -> None:
        """Waits while anything that was sent before has not been read, as the server does."""
        nonlocal body
        if body:
            await read.wait()
        body += message.get("body", b"")

    choices = [Choice(index, Request("a"), MODEL) for index in range(2)]
    answer = Answer(CompletionFormat(MODEL), choices, events(1), lambda _: None)
    response = await respond(answer, CompletionRequest(prompt="a"), stay)
    assert response
    sending = asyncio.create_task(response({"type": "http"}, stay, send))
    await asyncio.wait([sending], timeout=0.05)
    assert body == response.body and not sending.done()
    read.set()
    await sending


async def test_a_stream_sends_each_text_as_soon_as_it_comes() -> None:
    sent, first, more = b"", asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncGenerator[Event]:
        yield 0, Opened("m", "", 0, 1)
        yield 0, Delta("first", (71,))
        await more.wait()
        yield 0, Delta("second", (72,))
        yield 0, Finished(FinishReason.LENGTH, 1, 2, 11, 1, 1, Mode.OFF, Statistics())

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if b"first" in sent:
            first.set()

    answer = Answer(CompletionFormat(MODEL), [Choice(0, Request("a"), MODEL)], slow(), lambda _: None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        response = await respond(answer, CompletionRequest(prompt="a", stream=True), stay)
        assert response
        tasks.create_task(response({"type": "http", "method": "POST"}, stay, send))
        await first.wait()
        assert b"second" not in sent
        more.set()
    assert b"second" in sent and sent.endswith(b"data: [DONE]\n\n")


class Silent:
    """A stream of a chat whose text does not come until `free` is set, and what has been sent of it.

    `waits_in_queue`: even the prompt has not been read until then.
    """

    def __init__(self, error: Exception | None = None, *, waits_in_queue: bool = False) -> None:
        self.free, self.closed, self.begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.status, self.sent, self._error, self._waits_in_queue = 0, b"", error, waits_in_queue

    async def events(self) -> AsyncGenerator[Event]:
        try:
            if self._waits_in_queue:
                await self.free.wait()
            yield 0, Opened("m", "", 0, 1)
            await self.free.wait()
            if self._error:
                raise self._error
            yield 0, Delta("text", (71,))
            yield 0, Finished(FinishReason.LENGTH, 1, 1, 4, 1, 1, Mode.OFF, Statistics())
        finally:
            self.closed.set()

    async def response(self) -> Response | None:
        answer = Answer(ChatFormat(MODEL), [Choice(0, Request("a"), MODEL)], self.events(), lambda _: None)
        return await respond(answer, CompletionRequest(prompt="a", stream=True), stay)

    async def send(self, message: Any) -> None:
        self.status = self.status or message["status"]
        self.sent += message.get("body", b"")
        if self.sent:
            self.begun.set()


HTTP = {"type": "http", "method": "POST"}


@pytest.mark.parametrize("error", [None, EngineFailure("a pass failed")], ids=["text", "error"])
@pytest.mark.parametrize("waits_in_queue", [True, False])
async def test_a_stream_whose_text_does_not_come_begins_without_it(
    error: Exception | None, waits_in_queue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "_MAX_SILENT_SECONDS", 0.0)
    silent = Silent(error, waits_in_queue=waits_in_queue)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        response = await silent.response()
        assert response and not silent.free.is_set()
        tasks.create_task(response(HTTP, stay, silent.send))
        await silent.begun.wait()
        assert silent.status == 200
        if waits_in_queue:
            assert silent.sent.startswith(b": ")
        silent.free.set()
    sent = silent.sent.decode()
    role, second = [event for event in sent.split("\n\n") if not event.startswith(":")][:2]
    assert '"role":"assistant"' in role
    if error:
        assert "a pass failed" in json.loads(second.removeprefix("data: "))["error"]["message"]
    else:
        assert '"text"' in second
    assert sent.endswith("data: [DONE]\n\n") is not bool(error)


async def test_an_error_before_a_stream_begins_has_its_own_status() -> None:
    silent = Silent(EngineFailure("a pass failed"))
    silent.free.set()
    with pytest.raises(EngineFailure):
        await silent.response()


async def test_a_client_that_leaves_before_the_text_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "_MAX_SILENT_SECONDS", 0.0)
    silent = Silent()

    async def leave() -> Any:
        await silent.begun.wait()
        return {"type": "http.disconnect"}

    async with asyncio.timeout(60):
        response = await silent.response()
        assert response
        await response(HTTP, leave, silent.send)
        await silent.closed.wait()
    assert b'"text"' not in silent.sent


def test_a_streamed_chat_begins_with_its_role() -> None:
    part = ChatFormat(MODEL).first(Choice(0, Request("a"), MODEL))
    assert part and part["delta"] == {"role": "assistant", "content": ""}


async def test_log_probabilities_of_answers_that_are_not_streamed_are_bounded(tiny_fleet: Fleet) -> None:
    body = LONG | {"max_tokens": 5}
    async with door(tiny_fleet, Limits(logprob_bytes=1000)) as (url, _), httpx.AsyncClient(base_url=url) as http:
        assert "stream the answer" in refused(await http.post("/v1/completions", json=body), 429, None)
        assert (await http.post("/v1/completions", json=body | {"stream": True})).status_code == 200
        for _ in range(3):  # they are free again when the answer has been sent
            assert (await http.post("/v1/completions", json=body | {"logprobs": 2})).status_code == 200


async def test_requests_without_an_answer_at_the_end_of_the_grace_period_are_503(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Semaphore(0)

    async def hang(*given: object) -> None:
        begun.release()
        await asyncio.Event().wait()

    async with httpx.AsyncClient(timeout=60) as http:
        async with door(tiny_fleet, grace=0) as (url, gateway):
            for name in ("served", "served_target", "segment"):
                monkeypatch.setattr(gateway, name, hang)
            calls = (
                http.get(f"{url}/v1/models"),
                http.post(f"{url}/v1/completions", json={"prompt": "a"}),
                http.post(f"{url}/v1/segmentations", json={"text": "a", "models": ["tiny-target"]}),
            )
            running = [asyncio.create_task(one) for one in calls]
            for _ in running:
                await begun.acquire()
        for answer in await asyncio.gather(*running):
            assert "is stopping" in refused(answer, 503, None) and answer.headers["retry-after"] == "1"
