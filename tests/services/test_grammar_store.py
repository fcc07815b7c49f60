"""Grammars are tried once, compiled for each request, and forgotten."""

import asyncio
import gc
from contextlib import nullcontext
from threading import Event

import pytest

from bridge.errors import InvalidGrammar, NotReady
from bridge.sampling.grammar import Grammar, GrammarKind
from services.errors import SandboxBusy
from services.grammars import store as grammar_store
from services.grammars.store import TokenGrammars
from services.grammars.trial import grammar_busy
from tests.support import grammars as support
from tests.support import tiny
from tests.support.waiting import eventually


async def test_a_grammar_is_tried_once_and_an_error_kept() -> None:
    tried = []

    class Counting(support.Untried):
        def check(self, grammar: Grammar) -> None:
            tried.append(grammar)
            if grammar.text == "bad":
                raise InvalidGrammar(grammar.field, "is bad")

    store = TokenGrammars(tiny.model("byte_level"), Counting())
    good, bad = Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.REGEX, "bad")
    for _ in range(3):
        await store.open(good, frozenset({2}))
        with pytest.raises(InvalidGrammar, match=r"^sampling.regex is bad$"):
            await store.open(bad, frozenset({2}))
    assert tried == [good, bad]


@pytest.mark.parametrize(("installed", "usable"), [("1.7.6", False), ("1.9.0", True), ("1.10.0", True)])
async def test_a_library_that_is_too_old_is_named(
    installed: str, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an environment that vLLM shares."""
    monkeypatch.setattr(grammar_store, "_INSTALLED_VERSION", installed)
    opening = TokenGrammars(tiny.model("byte_level"), support.Untried()).open(
        Grammar(GrammarKind.REGEX, "a+"), frozenset({2})
    )
    with nullcontext() if usable else pytest.raises(NotReady, match=r"1\.7\.6: install .* of their own"):
        await opening


class Slow(support.Untried):
    """Notes what it tries, and goes on when `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[Grammar] = []
        self.may_end = Event()

    def check(self, grammar: Grammar) -> None:
        self.tried.append(grammar)
        assert self.may_end.wait(60)


async def test_a_store_that_is_closed_tries_no_more() -> None:
    trial = Slow()
    store = TokenGrammars(tiny.model("byte_level"), trial)
    grammars = [Grammar(GrammarKind.REGEX, "a" * count) for count in range(1, 6)]
    waiting = [asyncio.create_task(store.open_draft(one)) for one in grammars]
    await asyncio.to_thread(eventually, lambda: bool(trial.tried))
    store.close()
    trial.may_end.set()
    await asyncio.to_thread(store._store._trying._threads.pop().join)
    assert len(trial.tried) == 1
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_requests_for_one_new_grammar_wait_for_the_same_trial() -> None:
    trial = Slow()
    store = TokenGrammars(tiny.model("byte_level"), trial)
    grammars = [Grammar(GrammarKind.REGEX, f"a{place}") for place in range(33)]
    waiting = [asyncio.create_task(store.open_draft(grammars[0])) for _ in range(50)]
    others = [asyncio.create_task(store.open_draft(one)) for one in grammars[1:]]
    await asyncio.sleep(0)
    with pytest.raises(SandboxBusy, match="32 others are waiting"):
        await others.pop()  # the 33rd grammar, not the 33rd request
    waiting.pop().cancel()
    trial.may_end.set()
    await asyncio.gather(*waiting, *others)
    assert trial.tried == grammars[:32]
    store.close()


async def test_a_known_grammar_does_not_wait_for_the_trials_of_others() -> None:
    trial = Slow()
    trial.may_end.set()
    store = TokenGrammars(tiny.model("byte_level"), trial)
    known, new = (Grammar(GrammarKind.REGEX, text) for text in "ab")
    await store.open_draft(known)
    trial.may_end.clear()
    trying = asyncio.create_task(store.open_draft(new))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await store.open_draft(known)
    assert not trying.done()
    trial.may_end.set()
    await trying
    store.close()


async def test_a_grammar_that_compiles_slowly_delays_only_new_and_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Slow()
    trial.may_end.set()
    store = TokenGrammars(tiny.model("byte_level"), trial)
    slow, fast, new = (Grammar(GrammarKind.REGEX, text) for text in "abc")
    monkeypatch.setattr("services.grammars.store._SLOW_SECONDS", -1.0)
    await store.open_draft(slow)
    monkeypatch.setattr("services.grammars.store._SLOW_SECONDS", 60.0)
    await store.open_draft(fast)
    trial.may_end.clear()
    trying = asyncio.create_task(store.open_draft(new))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(store.open_draft(slow)) for _ in range(33)]
    async with asyncio.timeout(30):
        await store.open_draft(fast)
        with pytest.raises(SandboxBusy, match="32 others are waiting"):
            await waiting.pop()
    assert not any(one.done() for one in waiting)
    trial.may_end.set()
    await asyncio.gather(trying, *waiting)
    await store.open_draft(slow)
    store.close()


async def test_a_trial_that_fails_after_its_request_is_not_logged_and_a_stopped_server_is_busy() -> None:
    class Failing(Slow):
        def check(self, grammar: Grammar) -> None:
            super().check(grammar)
            raise grammar_busy("it is trying others")

    unread: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    trial = Failing()
    store = TokenGrammars(tiny.model("byte_level"), trial)
    grammar = Grammar(GrammarKind.REGEX, "a")
    request = asyncio.create_task(store.open_draft(grammar))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.wait([request])
    trial.may_end.set()
    await asyncio.wrap_future(store._store._trying.submit(int))  # runs after the trial
    del request
    gc.collect()
    assert not unread
    store.close()
    with pytest.raises(SandboxBusy, match="is stopping"):
        await store.open_draft(grammar)


async def test_grammars_are_forgotten_by_the_memory_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Slow()
    trial.may_end.set()
    monkeypatch.setattr("services.grammars.store._KNOWN_BYTES", 3500)
    store = TokenGrammars(tiny.model("byte_level"), trial)
    small, large, other = Grammar.choice(["a"]), Grammar.choice(["a" * 1000]), Grammar.choice(["b" * 1000])
    for grammar in (small, large, small, large, other, small):
        await store.open(grammar, frozenset({2}))
    assert trial.tried == [small, large, other, small]
    store.close()
