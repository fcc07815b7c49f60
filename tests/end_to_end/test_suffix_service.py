"""Tests the draft that needs no model: its side of a stream, and how a bridge uses it over real processes."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DraftBridgeError, PromptTooLong, ProtocolViolation, TokenOutOfRange
from bridge.ports import Proposal, Sync
from draftbridge import CallError, Client
from draftbridge.v1 import draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc, target_pb2_grpc
from services.cli import processes
from services.cli.processes import Fleet, fleet, serve
from services.errors import SlotsExhausted
from services.model.draft.suffix import SuffixModel, SuffixSession
from services.model.draft.suffix_index import SuffixMatcher
from tests.services.test_cli import command, refused
from tests.support import warm

MODEL = SuffixModel("suffix", 2).model


def test_its_ids_are_bytes() -> None:
    assert MODEL.vocabulary.tokens == [bytes([byte]) for byte in range(256)]
    text = "naïve 東京 🎉\x00\x7f\xa0\xad"
    assert MODEL.vocabulary.pieces(text.encode()).ids == list(text.encode())


@asynccontextmanager
async def session() -> AsyncIterator[tuple[SuffixSession, AsyncIterator[Proposal]]]:
    with closing(SuffixSession(MODEL)) as opened:
        async with asyncio.timeout(60):
            yield opened, aiter(opened.proposals())


async def test_it_says_what_followed_as_far_as_its_credit_goes() -> None:
    async with session() as (draft, proposals):
        await draft.sync(Sync(1, 0, tuple(b"one two three, one t"), 0, 3))
        proposal = await anext(proposals)
        assert (proposal.epoch, bytes(proposal.token_ids), proposal.done) == (1, b"wo ", False)
        waiting = asyncio.ensure_future(anext(proposals))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await draft.grant(7, 5)  # of another epoch
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await draft.grant(1, 4)
        assert bytes((await waiting).token_ids) == b"thre"
        # The new epoch keeps a part of its proposal, after which the text continued differently.
        await draft.sync(Sync(2, 23, tuple(b"one tw"), 9, 3))
        proposal = await anext(proposals)
        assert (proposal.epoch, bytes(proposal.token_ids)) == (2, b"o o")


async def test_it_is_done_where_it_has_nothing_to_say() -> None:
    async with session() as (draft, proposals):
        await draft.sync(Sync(1, 0, tuple(b"nothing is said twice"), 0, 8))
        proposal = await anext(proposals)
        assert (proposal.epoch, proposal.token_ids, proposal.done) == (1, (), True)
        await draft.sync(Sync(2, 21, tuple(b", nothing"), 0, 1000))
        proposal = await anext(proposals)
        assert proposal.done
        assert bytes(proposal.token_ids).startswith(b" is said twice, nothing is said")
        await draft.grant(2, 9)
        draft.on_end_of_requests()
        assert [one async for one in proposals] == []


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 100), st.text("ab", max_size=20).map(str.encode), st.integers(1, 9)), max_size=12
    )
)
def test_however_it_is_sent_back_it_says_what_a_new_one_would(steps: list[tuple[int, bytes, int]]) -> None:
    async def run() -> None:
        held = b""
        async with session() as (draft, proposals):
            for epoch, (keep, news, credit) in enumerate(steps, start=1):
                held = held[: min(keep, len(held))]
                news = news or b"a"
                await draft.sync(Sync(epoch, len(held), tuple(news), 0, credit))
                held += news
                match = SuffixMatcher(held).match()
                proposal = await anext(proposals)
                assert (proposal.epoch, bytes(proposal.token_ids)) == (epoch, match.data[:credit] if match else b"")
                assert proposal.done == (match is None)
                held += bytes(proposal.token_ids)

    asyncio.run(run())


async def test_each_byte_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the draft is often wrong and the text is long."""
    read = 0
    append = SuffixMatcher.append

    def counted(self: SuffixMatcher, data: bytes) -> None:
        nonlocal read
        read += len(data)
        append(self, data)

    monkeypatch.setattr(SuffixMatcher, "append", counted)
    text = bytes(range(256)) * 200
    async with session() as (draft, proposals):
        await draft.sync(Sync(1, 0, tuple(text), 0, 50))
        held, synced = len(text), len(text)
        for epoch in range(2, 102):
            assert len((await anext(proposals)).token_ids) == 50
            # Two tokens of its proposal were right, and the third was wrong.
            await draft.sync(Sync(epoch, held + 2, (*b"x", *range(epoch, epoch + 9)), 0, 50))
            held, synced = held + 12, synced + 12
        await anext(proposals)
        assert read == synced


async def test_other_requests_go_on_while_a_long_text_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    cut = SuffixMatcher.cut

    def noted(self: SuffixMatcher, length: int) -> None:
        threads.append(threading.get_ident())
        cut(self, length)

    monkeypatch.setattr(SuffixMatcher, "cut", noted)
    async with session() as (draft, proposals):
        for epoch, text in enumerate((b"ab" * 40_000, b"short", b"short, too"), start=1):
            await draft.sync(Sync(epoch, 0, tuple(text), 0, 1))
            await anext(proposals)
    assert [one == threading.get_ident() for one in threads] == [False, False, True]


@pytest.mark.parametrize(
    ("sync", "error"),
    [
        (Sync(0, 0, (5,), 0, 1), ProtocolViolation),
        (Sync(1, 5, (5,), 0, 1), ProtocolViolation),
        (Sync(1, 0, (), 0, 1), ProtocolViolation),
        (Sync(1, 0, (256,), 0, 1), TokenOutOfRange),
    ],
)
async def test_bad_syncs_are_refused(sync: Sync, error: type[DraftBridgeError]) -> None:
    async with session() as (draft, proposals):
        await draft.sync(sync)
        with pytest.raises(error):
            await anext(proposals)


async def test_a_context_that_is_full_ends_it() -> None:
    size = MODEL.context_length
    async with session() as (draft, proposals):
        await draft.sync(Sync(1, 0, (5,) * (size - 3), 0, 9))
        assert len((await anext(proposals)).token_ids) == 3
        proposal = await anext(proposals)
        assert (proposal.token_ids, proposal.done) == ((), True)
        await draft.sync(Sync(2, 0, (5,) * (size + 10), 0, 9))
        assert (await anext(proposals)).done
        await draft.sync(Sync(3, 100, (5,), 0, 9))
        assert (await anext(proposals)).token_ids == (5,) * 9
        await draft.sync(Sync(4, 0, (5,) * (2 * size + 1), 0, 9))
        with pytest.raises(PromptTooLong):
            await anext(proposals)


async def test_sessions_hold_at_most_the_given_number_of_slots() -> None:
    """A session without a text takes no slot, and frees none."""

    async def propose(session: SuffixSession) -> None:
        await session.sync(Sync(1, 0, tuple(b"aaaaaaaa"), 0, 3))
        assert (await anext(session.proposals())).token_ids == tuple(b"aaa")

    suffix = SuffixModel("suffix", 2)
    sessions = [suffix.open() for _ in range(5)]
    await propose(sessions[0])
    await propose(sessions[1])
    for late in sessions[2:4]:
        with pytest.raises(SlotsExhausted, match="--slots") as refused_:
            await propose(late)
        assert "--queue" not in str(refused_.value), "it has none"
        late.close()
    for _ in range(2):
        sessions[0].close()
    await sessions[0].sync(Sync(2, 0, (5,) * (2 * MODEL.context_length + 1), 0, 9))
    with pytest.raises(PromptTooLong):  # it takes no slot
        await anext(sessions[0].proposals())
    await propose(sessions[4])
    with pytest.raises(SlotsExhausted):
        await propose(suffix.open())


@contextmanager
def remembering(target: Path) -> Iterator[Fleet]:
    """Runs a tiny target, the suffix draft, and a bridge that learns from outputs."""
    options = ("--dtype", "float32", "--threads", "1")
    bridge_options = ("--ngram-memory", "2")
    with fleet(
        str(target), "suffix", target_options=options, draft_options=options, bridge_options=bridge_options
    ) as running:
        yield running


@pytest.fixture(scope="module")
def suffix_fleet(tiny_models: tuple[Path, Path]) -> Iterator[Fleet]:
    """Serves all tests here that do not depend on what a bridge has learnt before."""
    with remembering(tiny_models[0]) as running:
        yield running


PROMPT = "The quick brown fox. The quick brown dog. The quick"
# With one token, every candidate is right; with two, some are.
ONE, TWO = ({id_: 100.0 for id_ in ids} for ids in ((14,), (14, 15)))


@pytest.mark.parametrize("mode", ["lockstep", "opportunistic", "auto"])
@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": ONE}, {"logit_bias": TWO}, {"logit_bias": TWO, "temperature": 0.8, "seed": 3}]
)
def test_a_bridge_uses_it_and_the_text_is_the_targets_own(suffix_fleet: Fleet, mode: str, options: dict) -> None:
    with Client(suffix_fleet.bridge) as client:
        alone = client.generate(PROMPT, max_tokens=100, speculation="off", **options)
        for _ in range(3):  # on a busy machine, an answer may be late
            together = client.generate(PROMPT, max_tokens=100, speculation=mode, **options)
            if not together.finished.speculation.note:
                break
    assert together.token_ids == alone.token_ids
    assert together.text == alone.text
    assert together.started.draft == "suffix"
    speculation = together.finished.speculation
    assert not speculation.note
    if options and mode == "lockstep":  # in this mode the target waits for the draft
        assert [one.name for one in speculation.sources] == ["draft"]
        assert speculation.num_accepted_tokens > (50 if options == {"logit_bias": ONE} else 0)


def test_a_chat_has_it_too(suffix_fleet: Fleet) -> None:
    messages = [{"role": "user", "content": "a rose is a rose <eos> is a rose"}]
    with Client(suffix_fleet.bridge) as client:
        alone, together = (
            client.generate(messages=messages, max_tokens=60, speculation=mode, logit_bias=ONE)
            for mode in ("off", "lockstep")
        )
    assert together.text == alone.text
    assert together.finished.speculation.num_accepted_tokens > 0


def test_it_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_start", warm.cold_start)
    with processes.serve("suffix", "--role", "draft") as (_, process):
        maps = psutil.Process(process.pid).memory_maps()
    assert not [one.path for one in maps if "torch" in one.path]


def test_it_says_who_it_is(suffix_fleet: Fleet) -> None:
    with Client(suffix_fleet.bridge) as client:
        (model,) = [one for one in client.models() if one.name == "suffix"]
    assert (model.role, model.engine, model.vocabulary_size) == (model_pb2.ROLE_DRAFT, "suffix", 256)
    with grpc.insecure_channel(suffix_fleet.draft) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "draftbridge.v1.DraftService" in services
        assert "draftbridge.v1.TargetService" not in services
        pieces = list(
            model_pb2_grpc.ModelServiceStub(channel).GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=60)
        )
    assert pieces[-1].sha256 == model.tokenizer_sha256


async def test_it_is_no_target(suffix_fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(suffix_fleet.draft) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60).read()
    assert CallError.from_rpc(caught.value, "").reason == "ROLE_NOT_SERVED"
    assert "does not serve suffix as a target" in refused(
        command("bridge", "--target", suffix_fleet.draft, "--listen", "127.0.0.1:0")
    )
    for role in ("target", "both"):
        assert "--role must be draft with suffix" in refused(command("serve", "suffix", "--role", role))
    assert "serve it with --role draft" in refused(command("up", "--target", "suffix", "--draft", "none"))
    assert "serve it with --role draft" in refused(command("pull", "suffix"))


async def test_more_sessions_than_slots_are_told_to_come_again() -> None:
    opening = draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(model="echo"))
    syncing = draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=1, token_ids=b"aaaaaaaa", credit=2))
    with serve("suffix", "--role", "draft", "--slots", "1", "--name", "echo") as (address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            first, second = stub.Draft(timeout=60), stub.Draft(timeout=60)
            for call in (first, second):
                await call.write(opening)
                await call.write(syncing)
                if call is first:
                    assert bytes((await call.read()).token_ids) == b"aa"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.read()
            assert CallError.from_rpc(caught.value, "").reason == "SLOTS_EXHAUSTED"
            # After a client has closed its side and its stream has ended, another client gets the slot.
            await first.done_writing()
            assert await first.read() == grpc.aio.EOF
            third = stub.Draft(timeout=60)
            await third.write(opening)
            await third.write(syncing)
            assert bytes((await third.read()).token_ids) == b"aa"
            third.cancel()


def has_no_repetition(text: str) -> bool:
    """Returns whether no two characters in a row occur twice, so that no candidate from the text itself is right."""
    pairs = list(itertools.pairwise(text))
    return len(set(pairs)) == len(pairs)


def test_what_a_tenant_was_told_before_is_a_draft(tiny_models: tuple[Path, Path]) -> None:
    """Uses a new bridge: one that has seen other requests may have learnt that candidates are not worth their cost."""
    with remembering(tiny_models[0]) as running:
        check_what_tenants_are_told(running)


def check_what_tenants_are_told(running: Fleet) -> None:
    prompt = "She sells"
    with Client(running.bridge) as client:

        def ask(tenant: str, seed: int) -> tuple[str, int]:
            got = client.generate(prompt, max_tokens=40, seed=seed, temperature=1.0, tenant=tenant)
            counts = [one.num_accepted_tokens for one in got.finished.speculation.sources if one.name == "learned"]
            return got.text, sum(counts)

        seed = next(seed for seed in range(50) if has_no_repetition(prompt + ask("", seed)[0]))
        text, nothing = ask("", seed)
        assert nothing == 0
        assert ask("ann", seed) == ask("bob", seed) == (text, 0)
        # On a busy machine, the planner may measure that candidates cost more than they gain, until it tries again.
        for _ in range(200):
            again, count = ask("ann", seed)
            assert again == text
            if count:
                break
        assert count
        assert ask("cid", seed) == ask("", seed) == (text, 0)
        kept = client.status().ngram_memory
        assert kept.tenant_count == 3
        assert len(text) < kept.held_byte_count < kept.limit_byte_count == 2 << 20
        with pytest.raises(CallError, match="at most 256") as caught:
            ask("a" * 257, seed)
        assert caught.value.reason == "INVALID_FIELD"
    done = command("generate", prompt, "--tenant", "ann", "--server", running.bridge, "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert "--ngram-memory" in refused(command("bridge", "--target", "x:1", "--ngram-memory", "-1"))
