"""Each fault of a process or of the network between them leaves the text of the undisturbed run.

Scripted models stand for real ones, because their text can be computed: everything else is the real thing, with TLS.
Every service is behind a proxy, so that a service keeps its address when it is restarted.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.scripted_service import expected
from bridge.target_link import CREDIT_TOKENS
from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from services.bridge.endpoint import CHECK_SECONDS
from tests.support.depth import DEEP
from tests.support.proxy import Proxy
from tests.support.unread import hold_unread
from tests.support.waiting import eventually
from tests.support.world import World

PROMPT, TOKENS = "a fault", 100
# More than a fault costs also on a busy machine, and less than what waits for it again and again.
LIMIT_SECONDS = 60.0
MODES = ("off", "lockstep", "opportunistic")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("faults"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def world(running: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yields the world in good health, and heals it after the test."""
    hold_unread(monkeypatch)
    yield running
    for name, service in running.services.items():
        running.proxies[name].heal()
        if service.process.poll() is not None:
            running.replace(name)
    with Client(running.bridge.address) as client:
        eventually(lambda: all(one.reachable for one in client.status().endpoints))
        eventually(lambda: usable(client))
        eventually(lambda: client.status().active_count == 0)
    eventually(lambda: running.slots_in_use() == 0)


def usable(client: Client) -> bool:
    """Returns whether requests have both replicas and the draft again: a replica that failed rests for a while."""
    return client.generate(PROMPT, max_tokens=8, speculation="lockstep").finished.speculation.note == ""


def generate(
    world: World, mode: str, fault: Callable[[], object] = lambda: None, tokens: int = TOKENS, **options: Any
) -> tuple[str, Any]:
    """Returns the text of a request and its last event. The fault comes when some of the text is there.

    Until it has come, the request goes on, however late this process is: with log probabilities, a connection of
    `hold_unread` holds so little of the text that the target gets no more credit.
    """
    text, faulted = "", False
    with Client(world.bridge.address) as client:
        for event in client.stream(PROMPT, max_tokens=tokens, speculation=mode, logprobs=LOGPROBS, **options):
            if isinstance(event, bridge_pb2.GenerateDelta):
                text += event.text
                if not faulted and len(text) >= FAULT_TOKENS:
                    faulted = True
                    fault()
    assert faulted
    return text, event


FAULT_TOKENS, LOGPROBS = TOKENS // 3, 100
RIGHT = expected(PROMPT, TOKENS)
# More than the credit of a target, so that not all of the text can be on its way before the fault.
LONG_TOKENS = CREDIT_TOKENS + TOKENS
RIGHT_LONG = expected(PROMPT, LONG_TOKENS)


@pytest.mark.parametrize("mode", MODES)
def test_the_undisturbed_text(world: World, mode: str) -> None:
    text, finished = generate(world, mode)
    assert text == RIGHT
    assert mode != "lockstep" or finished.speculation.num_drafts > 0


NETWORK: dict[str, Callable[[Proxy], object]] = {
    "cut": Proxy.cut,
    "refused": Proxy.refuse,
    "halved": Proxy.halve,
    "truncated": lambda proxy: proxy.truncate(40),
    "corrupted": lambda proxy: proxy.corrupt(40),
    "slow": lambda proxy: setattr(proxy, "delay", 0.2),
}


# Outside deep runs, the modes alternate.
PAIRS = [
    (fault, mode) for number, fault in enumerate(NETWORK) for mode in (MODES[1:] if DEEP else (MODES[1 + number % 2],))
]


@pytest.mark.parametrize(("fault", "mode"), PAIRS)
def test_a_bad_network_to_the_draft(world: World, fault: str, mode: str) -> None:
    started = time.monotonic()
    text, finished = generate(world, mode, lambda: NETWORK[fault](world.proxies["draft"]), LONG_TOKENS)
    assert text == RIGHT_LONG
    assert time.monotonic() - started < LIMIT_SECONDS
    assert fault == "slow" or finished.speculation.note  # the request noticed the fault


@pytest.mark.parametrize("fault", ["cut", "refused", "halved", "truncated", "corrupted"] if DEEP else ["cut", "halved"])
def test_a_bad_network_to_a_target_with_a_replica(world: World, fault: str) -> None:
    started = time.monotonic()
    others: dict[str, float] = {}

    def hit() -> None:
        name, other = world.busy_and_idle()
        others[other] = world.forward_count(other)
        NETWORK[fault](world.proxies[name])

    assert generate(world, "auto", hit, LONG_TOKENS)[0] == RIGHT_LONG
    assert time.monotonic() - started < LIMIT_SECONDS
    assert all(world.forward_count(other) > before for other, before in others.items())  # the request was moved


def test_a_slow_network_to_a_target(world: World) -> None:
    for name in ("target", "replica"):
        world.proxies[name].delay = 0.01
    assert generate(world, "auto")[0] == RIGHT


@pytest.mark.parametrize("mode", MODES[1:] if DEEP else ["lockstep"])
def test_a_draft_that_is_killed_and_comes_back_as_another_model(world: World, mode: str) -> None:
    text, finished = generate(world, mode, lambda: world.kill("draft"), LONG_TOKENS)
    assert text == RIGHT_LONG
    assert "SERVICE_UNREACHABLE" in finished.speculation.note
    world.replace("draft", "--name", f"other-{mode}", "--acceptance", "0.1")

    def replaced() -> bool:
        with Client(world.bridge.address) as client:
            result = client.generate(PROMPT, max_tokens=TOKENS, speculation=mode)
        assert result.text == RIGHT
        return result.started.draft == f"other-{mode}"

    eventually(replaced)


@pytest.mark.parametrize("mode", MODES[1:] if DEEP else ["opportunistic"])
def test_a_draft_that_hangs(world: World, mode: str) -> None:
    draft = world.services["draft"].process.pid
    started = time.monotonic()
    try:
        assert generate(world, mode, lambda: os.kill(draft, signal.SIGSTOP))[0] == RIGHT
        assert time.monotonic() - started < LIMIT_SECONDS
    finally:
        os.kill(draft, signal.SIGCONT)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_target_with_a_replica(world: World, signal_: signal.Signals) -> None:
    hit = []

    def fault() -> None:
        hit.append(world.services[world.busy_and_idle()[0]].process)
        hit[0].send_signal(signal_)

    try:
        assert generate(world, "auto", fault)[0] == RIGHT
    finally:
        if signal_ is signal.SIGKILL:
            hit[0].wait(60)
        else:
            hit[0].send_signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", ["killed", "halved"])
def test_a_target_without_a_replica_is_unavailable(world: World, fault: str) -> None:
    world.proxies["replica"].refuse()
    started = time.monotonic()
    with pytest.raises(CallError) as caught:
        # The target's credit does not reach to the end of the text before the fault.
        hit = world.kill if fault == "killed" else lambda name: world.proxies[name].halve()
        generate(world, "off", lambda: hit("target"), LONG_TOKENS)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE")
    assert time.monotonic() - started < LIMIT_SECONDS


def test_a_deadline_ends_a_request_whose_target_is_away(world: World) -> None:
    world.proxies["replica"].refuse()
    stub = bridge_stub(world)
    # Its text takes longer than the deadline, also if this process reads too late to stop it.
    speculation = bridge_pb2.Speculation(mode=bridge_pb2.Speculation.MODE_OFF)
    request = bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=LONG_TOKENS, speculation=speculation)
    with Client(world.bridge.address) as client:
        before = client.status()
        with pytest.raises(grpc.RpcError) as caught:
            for response in stub.Generate(request, timeout=0.6):  # before the bridge notices by itself
                if response.HasField("delta"):
                    world.proxies["target"].halve()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        eventually(lambda: client.status().active_count == 0)
        after = client.status()
    assert after.failed_count == before.failed_count, "it did not wait until the bridge noticed"


def test_deadlines_end_streams_of_services_too(world: World) -> None:
    """The target waits for candidates, the draft for credit."""
    verify = [
        target_pb2.VerifyRequest(open=target_pb2.VerifyOpen()),
        target_pb2.VerifyRequest(run=target_pb2.VerifyRun(token_ids=[70, 71], credit=100, patience_us=50_000_000)),
    ]
    draft = [
        draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()),
        draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=1, token_ids=[70], credit=1)),
    ]
    done = threading.Event()

    def endless(messages: list[Any]) -> Iterator[Any]:
        yield from messages
        done.wait(60)

    with world.open_channel("target") as one, world.open_channel("draft") as other:
        for channel in (one, other):
            grpc.channel_ready_future(channel).result(60)
        calls = [
            target_pb2_grpc.TargetServiceStub(one).Verify(endless(verify), timeout=5),
            draft_pb2_grpc.DraftServiceStub(other).Draft(endless(draft), timeout=5),
        ]
        try:
            assert all(next(call).token_ids for call in calls)
            assert world.slots_in_use("target", "draft") == 2
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    list(call)
                assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            eventually(lambda: world.slots_in_use() == 0, 30)
        finally:
            done.set()


def test_status_is_answered_while_all_services_hang(world: World) -> None:
    for proxy in world.proxies.values():
        proxy.halve()
    stub = bridge_stub(world)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetStatus(bridge_pb2.GetStatusRequest(), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    for _ in range(5):  # processes may be held up
        started = time.monotonic()
        answer = stub.GetStatus(bridge_pb2.GetStatusRequest(), timeout=60)
        assert [one.reachable for one in answer.endpoints] == [False] * 3
        if (taken := time.monotonic() - started) < 2 * CHECK_SECONDS:
            break
    assert taken < 2 * CHECK_SECONDS, "they are asked side by side"


def bridge_stub(world: World) -> Any:
    return bridge_pb2_grpc.BridgeServiceStub(grpc.insecure_channel(world.bridge.address))


def test_full_slots_refuse_some_and_change_nobodys_text(world: World) -> None:
    """Two targets have four slots and a queue of two each, the draft has three slots and no queue."""

    def one(_: int) -> Any:
        try:
            with Client(world.bridge.address) as client:
                return client.generate(PROMPT, max_tokens=TOKENS, speculation="lockstep")
        except CallError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(16)))
    refused = [result for result in results if isinstance(result, CallError)]
    # gRPC may report the failed write to a refused stream in place of the refusal. Both can be retried.
    assert {(error.code, error.reason) for error in refused} <= {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOTS_EXHAUSTED"),
        (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE"),
    }
    served = [result for result in results if not isinstance(result, CallError)]
    assert len(served) >= 8
    assert {result.text for result in served} == {RIGHT}
    assert any("SLOTS_EXHAUSTED" in result.finished.speculation.note for result in served)


@pytest.mark.parametrize("how", ["killed", "hung up"])
def test_a_client_that_is_gone_frees_its_sessions(world: World, how: str) -> None:
    program = (
        "import sys; from draftbridge import Client\n"
        "for event in Client(sys.argv[1]).stream('a client', max_tokens=8000, speculation='opportunistic'):\n"
        "    print('.', flush=True)"
    )
    with Client(world.bridge.address) as client:
        before = client.status()
        if how == "killed":
            words = [sys.executable, "-c", program, world.bridge.address]
            with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                for _ in range(10):
                    process.stdout.readline()
                assert world.slots_in_use("target", "replica") == 1
                process.kill()
        else:
            for _ in zip(client.stream("a client", max_tokens=8000), range(10), strict=False):
                pass
        eventually(lambda: client.status().active_count == 0 and world.slots_in_use() == 0)
        after = client.status()
    assert after.cancelled_count == before.cancelled_count + 1 and after.finished_count == before.finished_count


def test_a_killed_bridge_frees_the_sessions_of_its_services(world: World) -> None:
    def run() -> None:
        with pytest.raises(CallError), Client(world.bridge.address) as client:
            client.generate(PROMPT, max_tokens=8000, speculation="lockstep")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: world.slots_in_use("target", "replica") == 3)
    world.bridge.process.kill()
    eventually(lambda: world.slots_in_use() == 0)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    world.bridge = world.start_bridge()


@pytest.mark.parametrize("which", ["bridge", "target"])
def test_sigterm_lets_running_requests_finish(world: World, which: str) -> None:
    """The target finishes its requests; new requests go to its replica."""
    stopped = world.bridge if which == "bridge" else world.services["target"]
    opened = world.open_channel("target") if which == "target" else grpc.insecure_channel(stopped.address)
    with opened as channel, ThreadPoolExecutor(8) as pool:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        going_on = threading.Event()
        # None of them ends before all of them run.
        results = [pool.submit(generate, world, "auto", lambda: going_on.wait(60), LONG_TOKENS) for _ in range(3)]
        eventually(lambda: world.slots_in_use("target", "replica") == 3)
        stopped.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        going_on.set()
        if which == "target":
            results += [pool.submit(generate, world, "off", tokens=LONG_TOKENS) for _ in range(2)]
        assert {result.result()[0] for result in results} == {RIGHT_LONG}
        with pytest.raises(grpc.RpcError):  # a watcher does not delay the process's end
            list(health)
    assert stopped.process.wait(60) == 0
    if which == "bridge":
        world.bridge = world.start_bridge()


def test_clocks_that_jump_change_nothing(world: World) -> None:
    bridge = world.start_jumping()
    with Client(bridge.address) as client:
        for mode in MODES if DEEP else ("auto",):
            result = client.generate(PROMPT, max_tokens=TOKENS, speculation=mode)
            assert result.text == RIGHT
            # The clocks jump by an hour or more.
            assert 0 < result.finished.speculation.elapsed_ns < 600e9
        assert 0 < client.status().uptime_ns < 600e9


def test_a_client_that_reads_slowly_holds_back_its_own_target_only(world: World) -> None:
    """Unread text fills the connection's window and the credit; then its target waits until the client reads on."""
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096), ("grpc.use_local_subchannel_pool", 1)]
    request = bridge_pb2.GenerateRequest(prompt=PROMPT, max_tokens=1200, speculation=bridge_pb2.Speculation(mode=2))
    with grpc.insecure_channel(world.bridge.address, small) as channel, Client(world.bridge.address) as other:
        stream = bridge_pb2_grpc.BridgeServiceStub(channel).Generate(request)
        text = "".join(next(stream).delta.text for _ in range(3))

        before, after = -1.0, world.forward_count("target", "replica")
        while after > before:
            assert other.generate("another", max_tokens=20, speculation="off").text == expected("another", 20)
            before, after = after + 20, world.forward_count("target", "replica")
        (held,) = other.status().running
        assert held.generated_token_count < 1000
        assert world.slots_in_use("target", "replica") == 1
        text += "".join(response.delta.text for response in stream)
    assert text == expected(PROMPT, 1200)
