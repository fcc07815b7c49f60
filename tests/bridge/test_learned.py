"""N-grams of earlier outputs: within their memory, for their own tenant only, and without changing any text."""

import asyncio
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidField
from bridge.generation import Delta, Finished, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.ports import Pass
from bridge.request import Request, check, check_tenant
from bridge.sources.learned import LearnedSource
from bridge.sources.ngrams import _LENGTHS, MAX_LENGTH, TABLE_BYTES, NgramMemory, NgramTable, confidence
from bridge.sources.source import Offer, Opening, Outcome, offer_of
from bridge.sources.source_set import SourceSet
from bridge.tape import Tape
from bridge.text.translation import candidates
from services.model.target.session import TargetSession
from tests.support import tiny
from tests.support.alone import PROMPT, answer, did, oracle

MODEL = tiny.model("byte_level")
WORDS = MODEL.vocabulary
IDS = st.lists(st.integers(0, 3), max_size=40)


def following(outputs: Sequence[Sequence[int]], end: Sequence[int]) -> tuple[int, Counter[int]] | None:
    """Returns, slowly, the longest known end of `end` and the tokens that followed it in the outputs."""
    known: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for output in outputs:
        for index in range(1, len(output)):
            for length in _LENGTHS:
                if length <= index:
                    known[tuple(output[index - length : index])][output[index]] += 1
    found = [length for length in _LENGTHS if length <= len(end) and tuple(end[-length:]) in known]
    return (found[-1], known[tuple(end[-found[-1] :])]) if found else None


@given(outputs=st.lists(IDS, max_size=4), end=IDS)
def test_a_table_knows_what_mostly_followed(outputs: list[list[int]], end: list[int]) -> None:
    table = NgramTable()
    for output in outputs:
        table.learn(output, 0)
    expected, found = following(outputs, end), table.following(end)
    assert (expected is None) == (found is None)
    if expected and found:
        length, counts = expected
        if counts[found[0]] > sum(counts.values()) / 2 or len(counts) == 1:
            assert found[0] == counts.most_common(1)[0][0]
        if len(counts) == 1:
            assert found[1] == pytest.approx(confidence(length, counts[found[0]], 0))
        elif counts.most_common(1)[0][1] > sum(counts.values()) / 2:  # a majority always wins
            assert found[0] == counts.most_common(1)[0][0]


def test_an_entry_that_is_no_longer_used_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all n-grams need the same entry. One that occurred three times is not lost at once, but after some time."""
    monkeypatch.setattr("bridge.sources.ngrams._ENTRIES", 1)
    table, kept = NgramTable(), []
    for _ in range(3):
        table.learn([1, 2], 0)
    for _ in range(3):
        table.learn([5, 6], 0)
        kept.append([bool(table.following([1])), bool(table.following([5]))])
    assert kept == [[True, False], [True, False], [False, True]]


def test_confidence_grows_with_what_supports_it() -> None:
    assert confidence(1, 1, 0) < confidence(1, 2, 0) < confidence(2, 2, 0) < confidence(8, 2, 0) < 1
    assert 0 < confidence(1, 1, 9) < confidence(1, 1, 0)


def test_a_table_takes_the_memory_that_it_should_and_keeps_what_is_frequent() -> None:
    table, chance = NgramTable(), random.Random(0)
    for _ in range(40):
        table.learn([1, 2, 3, 4], 0)
        table.learn([chance.randrange(10, 1 << 17) for _ in range(5000)], 0)
    assert sum(sys.getsizeof(part) for part in vars(table).values()) <= TABLE_BYTES + 1024
    assert [table.following([*[1, 2, 3, 4][:count]])[0] for count in (1, 2, 3)] == [2, 3, 4]  # type: ignore[index]


def test_counts_do_not_overflow_and_habits_may_change() -> None:
    table = NgramTable()
    for _ in range(1000):
        table.learn([1, 2], 0)
    assert table.following([1]) == (2, pytest.approx(confidence(1, 255, 0)))
    for _ in range(1000):
        table.learn([1, 3], 0)
    assert table.following([1])[0] == 3  # type: ignore[index]


@pytest.mark.parametrize("table_count", [1, 3])
def test_memory_forgets_the_least_recently_used(table_count: int) -> None:
    memory = NgramMemory(table_count * TABLE_BYTES + 5)
    for tenant in range(table_count):
        memory.open(tenant, "tokenizer").learn([tenant, 9], 0)
    assert memory.byte_count == table_count * TABLE_BYTES <= memory.byte_limit
    memory.open(0, "tokenizer")  # so that another one is the least recently used
    memory.open("new", "tokenizer")
    forgotten = 1 if table_count > 1 else 0
    # The forgotten one comes last, because its new table takes another's place.
    for tenant in sorted(range(table_count), key=lambda one: one == forgotten):
        known = memory.open(tenant, "tokenizer").following([tenant])
        assert (known is None) is (tenant == forgotten)
    assert memory.byte_count <= memory.byte_limit
    assert memory.tenant_count == table_count


def source(prompt: Sequence[int], memory: NgramMemory, tenant: object = "ann") -> LearnedSource | None:
    opening = Opening(Tape(WORDS, prompt), lambda model: model.vocabulary.prompt(""), memory=memory, tenant=tenant)  # type: ignore[arg-type]
    return LearnedSource.open(opening)


def committed(one: LearnedSource, ids: Sequence[int]) -> None:
    data = one._tape.commit(ids)
    one.observe(Outcome(Pass(0, tuple(ids), 0, 0), Offer(), data))


def test_what_one_output_taught_is_proposed_in_another() -> None:
    memory = NgramMemory(TABLE_BYTES)
    output = candidates(WORDS, b"one two three four five six seven")
    first = source(output[:1], memory)
    assert first is not None and first.propose() is None
    committed(first, output[1:3])
    committed(first, output[3:])
    second = source([*candidates(WORDS, b"nothing"), *output[:3]], memory)
    assert second is not None
    found = second.propose()
    assert found is not None
    assert list(found.token_ids) == output[3:][: len(found.token_ids)]
    assert len(found.token_ids) > 3
    assert offer_of(WORDS, [found]).token_ids == found.token_ids
    assert found.data == WORDS.spell(found.token_ids)
    assert second.propose(b"x") is None, "it continues the text only"
    (offer,) = SourceSet([second], MODEL, None).offers()
    assert offer.sources == ("learned",) * len(offer.token_ids)
    limited = second.propose(limit=8)
    assert limited is not None and len(limited.token_ids) == 2


def test_a_control_token_is_no_candidate() -> None:
    memory, end = NgramMemory(TABLE_BYTES), MODEL.special_ids.eos[0]
    first = source([5], memory)
    assert first is not None
    committed(first, [6, 7, end])
    for prompt, expected in (([5, 6], (7,)), ([6, 7], None)):
        one = source(prompt, memory)
        assert one is not None
        found = one.propose()
        assert (found and found.token_ids) == expected


@given(outputs=st.lists(st.tuples(st.sampled_from(["ann", "bob"]), IDS), max_size=8), end=IDS)
def test_outputs_of_other_tenants_change_nothing(outputs: list[tuple[str, list[int]]], end: list[int]) -> None:
    shared, own = NgramMemory(2 * TABLE_BYTES), NgramMemory(2 * TABLE_BYTES)
    for tenant, output in outputs:
        shared.open(tenant, WORDS.sha256).learn(output, 0)
        if tenant == "ann":
            own.open(tenant, WORDS.sha256).learn(output, 0)
    found = [one.propose() for one in (source(end, shared), source(end, own)) if one]
    assert len(found) == 2
    assert found[0] == found[1]
    assert source(end, shared, "") is None


def asking(tenant: str, mode: Mode = Mode.AUTO, max_tokens: int = 40) -> Request:
    return Request(PROMPT, max_tokens=max_tokens, speculation=SpeculationParameters(mode), tenant=tenant)


async def generated(memory: NgramMemory, request: Request) -> tuple[list[int], Finished]:
    _, ids, finished = await answer(MODEL, tiny.HashEngine(MODEL), None, None, request, 0.0, memory)
    return ids, finished


@pytest.fixture
def expected() -> Iterator[list[int]]:
    """Returns the ids of a text in which no token occurs twice, so that prompt lookup finds nothing."""
    return oracle(MODEL, tiny.HashEngine(MODEL), 0.0, 40)


async def test_a_tenants_next_answer_takes_fewer_passes(expected: list[int]) -> None:
    memory = NgramMemory(4 * TABLE_BYTES)
    for tenant in ("ann", "bob", ""):
        ids, first = await generated(memory, asking(tenant))
        assert ids == expected
    for _ in range(2):
        ids, again = await generated(memory, asking("ann"))
        assert ids == expected
        assert did(again.statistics, "learned").num_accepted_tokens > 0
        assert again.statistics.target_pass_count < first.statistics.target_pass_count
    _, nobody = await generated(memory, asking(""))
    assert "learned" not in nobody.statistics.sources
    assert memory.tenant_count == 2


async def test_requests_of_one_tenant_at_once(expected: list[int]) -> None:
    memory = NgramMemory(4 * TABLE_BYTES)
    modes = [Mode.AUTO, Mode.OFF, Mode.LOCKSTEP, Mode.AUTO, Mode.AUTO]
    answers = await asyncio.gather(*(generated(memory, asking("ann", mode)) for mode in modes))
    assert all(ids == expected for ids, _ in answers)
    assert memory.tenant_count == 1


async def test_what_came_until_a_request_was_given_up_is_kept(expected: list[int]) -> None:
    memory, scheduler = NgramMemory(TABLE_BYTES), tiny.scheduler(tiny.HashEngine(MODEL))
    ids: list[int] = []
    with closing(TargetSession(MODEL, scheduler, tiny.sampler(MODEL))) as session:
        async with aclosing(generate(asking("ann"), MODEL, session, memory=memory)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    ids += event.token_ids
                    if len(ids) >= 20:
                        break
    scheduler.close()
    table = memory.open("ann", WORDS.sha256)
    found = table.following(expected[MAX_LENGTH : 2 * MAX_LENGTH])
    assert found is not None and found[0] == expected[2 * MAX_LENGTH]


def test_a_tenant_has_a_short_name() -> None:
    check_tenant("a" * 256, 0)
    with pytest.raises(InvalidField, match="tenant must be at most 256"):
        check_tenant("a" * 257, 0)
    with pytest.raises(InvalidField, match="tenant must be at most 256"):
        check(asking("a" * (256 + 2 * 65 + 1)))
