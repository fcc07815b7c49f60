"""Earlier outputs serve as drafts: within the budget, for their own tenant only, and without changing any text."""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import aclosing, closing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidField
from bridge.generation import Delta, Finished, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request, check
from bridge.sources.suffix import SuffixSource
from bridge.sources.suffix_index import MIN_MATCH_BYTES, Match, SuffixMatcher, max_memory_bytes
from bridge.sources.suffix_memory import SuffixMemory
from bridge.tape import Tape
from bridge.text.translation import candidates
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle

VOCABULARY = tiny.model("byte_level").vocabulary
LETTERS = st.text("ab", max_size=16).map(str.encode)
OUTPUTS = st.lists(st.tuples(st.sampled_from(["ann", "bob", ""]), LETTERS), max_size=12)


def data(match: Match | None) -> bytes:
    return match.data if match else b""


def longest(text: bytes, memory: SuffixMemory, tenant: str, after: bytes = b"") -> Match | None:
    prompt_ids = candidates(VOCABULARY, text)
    assert VOCABULARY.spell(prompt_ids) == text
    elsewhere = partial(memory.match, tenant) if tenant else None
    return SuffixSource(Tape(VOCABULARY, prompt_ids), elsewhere)._longest(after)


def held(*drafters: SuffixMatcher) -> int:
    """Returns the bytes of memory that the matchers really use."""
    return sum(
        sys.getsizeof(part)
        for one in drafters
        for part in (one, one.__dict__, one._text, one._last, one._before, one._starts)
    )


@given(outputs=OUTPUTS, end=LETTERS)
def test_outputs_of_other_tenants_change_nothing(outputs: list[tuple[str, bytes]], end: bytes) -> None:
    shared, own = SuffixMemory(1 << 20), SuffixMemory(1 << 20)
    for tenant, output in outputs:
        shared.remember(tenant, output)
        if tenant == "ann":
            own.remember(tenant, output)
    assert shared.match("ann", end) == own.match("ann", end)
    assert longest(end, shared, "ann") == longest(end, own, "ann")
    assert shared.match("cid", end) is None
    assert longest(end, shared, "") == SuffixMatcher(end).match()


@given(outputs=st.lists(LETTERS, max_size=8), end=LETTERS)
def test_a_match_is_of_one_output(outputs: list[bytes], end: bytes) -> None:
    memory = SuffixMemory(1 << 20)
    for output in outputs:
        memory.remember("ann", output)
    match = memory.match("ann", end)
    if match:
        assert match.length >= MIN_MATCH_BYTES
        assert any(output.endswith(end[-match.length :] + match.data) for output in outputs)
        assert match.data


def test_the_longer_match_is_taken_and_of_equals_the_texts_own() -> None:
    memory = SuffixMemory(1 << 20)
    memory.remember("ann", b"one two three four")
    assert data(longest(b"nothing of two th", memory, "ann")) == b"ree four"
    assert data(longest(b" two then, of two th", memory, "ann")).startswith(b"en, of")
    assert data(longest(b" two then, one two th", memory, "ann")) == b"ree four"
    assert data(longest(b"nothing of ", memory, "ann", b"two th")) == b"ree four"


@pytest.mark.parametrize("budget", [0, 20 << 10, 64 << 10, 1 << 20])
def test_the_budget_holds_at_any_time(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, memory, most = random.Random(0), SuffixMemory(budget), 0
    append = SuffixMatcher.append

    def checked(drafter: SuffixMatcher, output: bytes) -> None:
        append(drafter, output)
        assert sum(max_memory_bytes(one.length) for one in (*memory._tenants.values(), drafter)) <= budget
        assert held(*memory._tenants.values(), drafter) <= budget

    monkeypatch.setattr(SuffixMatcher, "append", checked)
    for number in range(600):
        memory.match(f"tenant {chance.randrange(40)}", b"abcd")
        output = chance.randbytes(chance.choice([3, 5, 40, 3000, 70_000 * (number % 50 == 0)]))
        memory.remember(f"tenant {chance.randrange(40)}", output)
        assert held(*memory._tenants.values()) <= memory.byte_count <= budget
        most = max(most, memory.byte_count)
    assert most >= 0.8 * budget or budget == 20 << 10, "the budget is used"


def test_who_was_away_the_longest_is_forgotten_first() -> None:
    memory = SuffixMemory(100 << 10)  # it has room for three of them
    outputs = {name: f"what {name} was told, and nobody else".encode() for name in ("ann", "bob", "cid", "dan")}
    for tenant, output in outputs.items():
        if tenant == "dan":
            assert memory.match("ann", outputs["ann"][:20])  # so that bob is the least recently used
        memory.remember(tenant, output + bytes(500))
    known = [tenant for tenant, output in outputs.items() if memory.match(tenant, output[:20])]
    assert known == ["ann", "cid", "dan"]
    memory.remember("cid", bytes(3200))  # it replaces the outputs of two others
    known = [tenant for tenant, output in outputs.items() if memory.match(tenant, output[:20])]
    assert known == ["cid"]


def test_of_one_tenant_the_latest_outputs_are_kept() -> None:
    memory = SuffixMemory(1 << 20)
    for number in range(20_000):
        memory.remember("ann", f"line {number:05} is here".encode())
    ends = [f"line {number:05}".encode() for number in range(20_000)]
    found = {number: match for number, end in enumerate(ends) if (match := memory.match("ann", end))}
    kept = [number for number, match in found.items() if match.length == len(ends[number])]
    # A few are not found, because others use their entry of the table.
    assert len(kept) > 0.99 * (20_000 - kept[0])
    assert 20_000 - (64 << 10) / 18 <= kept[0] < 20_000 - (32 << 10) / 18 + 1
    assert {found[number].data for number in kept} == {b" is here"}
    memory.remember("ann", random.Random(0).randbytes(2 << 20))
    assert held(*memory._tenants.values()) <= memory.byte_count <= 1 << 20


TARGET = tiny.model("byte_level")


def asking(tenant: str, mode: Mode = Mode.AUTO, max_tokens: int = 40) -> Request:
    return Request(PROMPT, max_tokens=max_tokens, speculation=SpeculationParameters(mode), tenant=tenant)


async def generated(memory: SuffixMemory, request: Request) -> tuple[list[int], Finished]:
    _, ids, finished = await answer(TARGET, tiny.HashEngine(TARGET), None, None, request, 0.0, memory)
    return ids, finished


@pytest.fixture
def expected() -> Iterator[list[int]]:
    """Returns the ids of a text without a repetition that could be matched."""
    ids = oracle(TARGET, tiny.HashEngine(TARGET), 0.0, 40)
    text = PROMPT.encode() + TARGET.vocabulary.spell(ids)
    assert not any(text[at : at + MIN_MATCH_BYTES] in text[:at] for at in range(len(text) - MIN_MATCH_BYTES))
    return ids


async def test_a_tenant_is_told_sooner_what_it_was_told_before(expected: list[int]) -> None:
    memory = SuffixMemory(1 << 20)
    for tenant in ("ann", "bob", ""):
        ids, first = await generated(memory, asking(tenant))
        assert ids == expected
        assert did(first.statistics, "suffix").num_draft_tokens == first.statistics.num_draft_tokens == 0
    for _ in range(2):
        ids, again = await generated(memory, asking("ann"))
        assert ids == expected
        assert 0 < did(again.statistics, "suffix").num_accepted_tokens == again.statistics.num_accepted_tokens
        assert again.statistics.target_pass_count < first.statistics.target_pass_count
    _, nobody = await generated(memory, asking(""))
    assert nobody.statistics.num_draft_tokens == 0
    assert set(memory._tenants) == {"ann", "bob"}


async def test_requests_of_one_tenant_at_once(expected: list[int]) -> None:
    memory = SuffixMemory(1 << 20)
    modes = [Mode.AUTO, Mode.OFF, Mode.LOCKSTEP, Mode.AUTO, Mode.AUTO]
    answers = await asyncio.gather(*(generated(memory, asking("ann", mode)) for mode in modes))
    assert all(ids == expected for ids, _ in answers)
    assert memory._tenants["ann"].length == len(modes) * len(TARGET.vocabulary.spell(expected))


async def test_what_a_request_said_until_it_was_given_up_is_kept(expected: list[int]) -> None:
    memory, scheduler = SuffixMemory(1 << 20), tiny.scheduler(tiny.HashEngine(TARGET))
    ids: list[int] = []
    with closing(TargetSession(TARGET, scheduler, tiny.sampler(TARGET))) as session:
        async with aclosing(generate(asking("ann"), TARGET, session, memory=memory)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    ids += event.token_ids
                    if len(ids) >= 20:
                        break
    scheduler.close()
    output = TARGET.vocabulary.spell(expected)
    half = len(TARGET.vocabulary.spell(ids))
    assert output.startswith(data(match := memory.match("ann", output[: MIN_MATCH_BYTES + 1])), MIN_MATCH_BYTES + 1)
    assert match is not None
    assert half - MIN_MATCH_BYTES - 1 <= len(match.data) < len(output) - MIN_MATCH_BYTES - 1


def test_a_tenant_has_a_short_name() -> None:
    check(asking("a" * 256))
    with pytest.raises(InvalidField, match="tenant must be at most 256"):
        check(asking("a" * 257))
