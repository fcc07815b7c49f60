"""What takes long has threads of its own, and keeps them and its places in all limits until it ends."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import generation
from bridge.errors import PromptTooLong
from bridge.generation import Started, generate
from bridge.request import Request
from bridge.text.chat import Chat, Message
from bridge.text.models import Model
from bridge.threads import run, threads_for
from services.sandbox.jinja import run_template
from tests.support import tiny
from tests.support.texts import MARKED_TEXTS
from tests.support.tiny import CORPUS
from tests.support.waiting import eventually

# Bytes, and ids.
LARGE = 1 << 17
# More than asyncio has threads on any machine.
MANY = 40
CHAT = Chat((Message("user", "a"),))


@contextmanager
def gate() -> Iterator[threading.Event]:
    """Yields an event that holds threads up, at most until the end of the block."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


async def started(request: Request, model: Model) -> Started:
    """Returns the first event of a request, which needs no target yet."""
    async with aclosing(generate(request, model, None)) as events:  # type: ignore[arg-type]
        async for event in events:
            assert isinstance(event, Started)
            return event
    raise AssertionError


def hanging(name: str, begun: list[str], free: threading.Event) -> Model:
    """Returns a model whose template waits for `free` in each chat."""

    def wait(template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> str:
        begun.append(name)
        assert free.wait(60)
        return run_template(template, variables, marks, shield)

    template = "{% for m in messages %}" + name + "{{ m.content }}<eos>{% endfor %}"
    return replace(tiny.model("byte_level"), chat_template=template, run_template=wait)


async def test_slow_chats_of_one_template_keep_no_others_waiting() -> None:
    begun: list[str] = []
    with gate() as free, gate() as open_:
        open_.set()
        slow, other = hanging("slow", begun, free), hanging("other", begun, open_)
        chats = [asyncio.create_task(started(Request(CHAT), slow)) for _ in range(MANY)]
        await asyncio.to_thread(eventually, lambda: "slow" in begun)
        assert (await started(Request(CHAT), other)).prompt_token_count
        assert (await started(Request("a"), slow)).prompt_token_count == 1
        assert (await started(Request((70,) * LARGE), replace(slow, context_length=2 * LARGE))).prompt_token_count
        assert not any(chat.done() for chat in chats)
        free.set()
        assert len(await asyncio.gather(*chats)) == MANY


async def test_large_prompts_keep_no_short_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, model = generation._prepared, tiny.model("byte_level")
    with gate() as free:

        def hold(request: Request, model: Model) -> object:
            assert len(str(request.input)) < LARGE or free.wait(60)
            return prepared(request, model)

        monkeypatch.setattr(generation, "_prepared", hold)
        large = [asyncio.create_task(started(Request(f"{place} " * LARGE), model)) for place in range(MANY)]
        await asyncio.sleep(0)
        assert (await started(Request("a"), model)).prompt_token_count == 1
        assert not any(one.done() for one in large)
        free.set()
        assert all(isinstance(one, PromptTooLong) for one in await asyncio.gather(*large, return_exceptions=True))


async def test_a_cancelled_request_lasts_as_long_as_its_thread() -> None:
    begun, ended = threading.Event(), list[str]()
    with gate() as free:

        def work(name: str) -> None:
            begun.set()
            assert free.wait(60)
            ended.append(name)
            raise ValueError("nobody waits for this")

        threads = threads_for(LARGE)
        tasks = [asyncio.create_task(run(threads, work, str(place))) for place in range(5)]
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(3):  # also if it is cancelled again meanwhile
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        running = [task for task in tasks if not task.done()]
        assert 1 <= len(running) <= 2, "only those that have not begun end at once"
        free.set()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
        assert len(ended) == len(running)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = tiny.model(kind, context_length=64), list[int]()
    encode, held = model.vocabulary._encode, model.vocabulary.prefixes.prompt_count

    def counting(text: str, start: bool, *, plain: bool) -> object:
        lengths.append(len(text))
        return encode(text, start, plain=plain)

    monkeypatch.setattr(model.vocabulary, "_encode", counting)
    # The second one begins with fewer tokens than ordinary text has.
    for text in (" ".join(CORPUS) * 200, " " * 1000 + "x y z " * 20_000):
        with pytest.raises(PromptTooLong, match="has at least") as caught:
            model.prompt(text, framed=True)
        assert int(caught.value.metadata["prompt_token_count"]) >= 64
    assert sum(lengths) < 10_000, "characters that were encoded"
    assert model.vocabulary.prefixes.prompt_count == held


@pytest.mark.parametrize("kind", tiny.KINDS)
@given(text=MARKED_TEXTS, enough=st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_a_prompt_has_no_fewer_tokens_than_its_beginning_shows(kind: str, text: str, enough: int) -> None:
    words = tiny.vocabulary(kind)
    found = words.min_count(text * 3, None, enough)
    assert found <= len(words.prompt(text * 3, framed=False).ids)
    assert found == 0 or found >= enough


def test_a_prompt_that_does_not_fit_is_not_kept() -> None:
    model = tiny.model("byte_level", context_length=20)
    before = model.vocabulary.prefixes.prompt_count
    assert len(model.prompt("never seen before " * 3, framed=True).ids) >= 20
    assert model.vocabulary.prefixes.prompt_count == before
