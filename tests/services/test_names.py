"""Host names of targets and drafts: each address is a service, and addresses come and go while requests run."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bridge.errors import Unreachable
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from draftbridge import CallError, Credentials
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.bridge.connection import Connection
from services.bridge.endpoint import ModelReader
from services.bridge.entry import Entry
from services.bridge.gateway import Gateway, Opened
from services.bridge.names import host_name, resolve, with_ip
from services.bridge.zoo import Zoo
from services.cli.processes import serve
from services.errors import DraftAway
from services.rpc import channel
from services.rpc.channel import open_channel
from tests.support.certificates import authority, issue
from tests.support.secure import suffix_server
from tests.support.waiting import eventually
from tests.support.zoo import trusted

OPTIONS = ("--dtype", "float32", "--threads", "1", "--slots", "4")
# The first two addresses serve one model, the third another, and the last nothing.
FIRST, SECOND, OTHER, NOBODY = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("gpu-1:50051", "gpu-1"),
        ("targets.models.svc.cluster.local:50051", "targets.models.svc.cluster.local"),
        ("targets.example.:1", "targets.example."),
        ("10.0.0.7:50051", ""),
        ("[::1]:50051", ""),
        ("localhost:50051", ""),
        ("LOCALHOST.:50051", ""),
        ("unix:/run/target.sock", ""),
        ("dns:///targets:50051", ""),
        ("gpu-1", ""),
    ],
)
def test_names_are_told_from_addresses(address: str, host: str) -> None:
    assert host_name(address) == host


def test_the_port_stays() -> None:
    assert with_ip("gpu-1:50051", "10.0.0.7") == "10.0.0.7:50051"
    assert with_ip("gpu-1:50051", "fd00::7") == "[fd00::7]:50051"


async def test_the_system_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    four, six, stream = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM
    records = [
        (six, stream, 6, "", ("fd00::7", 0, 0, 0)),
        (four, stream, 6, "", ("10.0.0.9", 0)),
        (four, stream, 6, "", ("10.0.0.7", 0)),
    ]

    def answer(host: str, port: None, type: int, flags: int = 0) -> list[object]:
        assert type == stream
        if flags and host == "lonely":
            raise socket.gaierror(socket.EAI_NONAME, "no address of a kind that this machine has")
        return [one for one in records if host != "six" or one[0] is six]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert await resolve("both") == ["10.0.0.7", "10.0.0.9"], "a machine with two families is one replica"
    assert await resolve("six") == ["fd00::7"]
    assert await resolve("lonely") == ["10.0.0.7", "10.0.0.9"]
    monkeypatch.undo()
    with pytest.raises(OSError):
        await resolve("no.such.host.invalid")
    with pytest.raises(OSError):
        await resolve("a" * 70)


@pytest.mark.parametrize(
    ("exempt", "direct"),
    [
        ("gpu-1.example", True),
        (".example", True),
        ("other, .Example ", True),
        ("other", False),
        ("10.0.0.7", False),
        ("", False),
    ],
)
def test_a_name_that_no_proxy_lists_is_connected_directly(
    exempt: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC itself compares the address that the bridge has looked up."""
    opened = []
    monkeypatch.setattr(channel, "open_aio_channel", lambda address, credentials, given, _: opened.append(dict(given)))
    monkeypatch.setenv("no_proxy", exempt)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    channel.open_channel("10.0.0.7:50051", None, "gpu-1.example:50051")
    channel.open_channel("gpu-1.example:50051")
    assert [one.get("grpc.enable_http_proxy") for one in opened] == [0 if direct else None, None]


class Records:
    """A name server whose records a test sets."""

    def __init__(self, **records: list[str]) -> None:
        self.records = records
        self.count = 0

    async def __call__(self, host: str) -> list[str]:
        self.count += 1
        if host not in self.records:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.records[host]


@pytest.fixture(scope="module")
def port(tiny_models: tuple[Path, Path]) -> Iterator[int]:
    """Yields the port that all addresses serve on."""
    target, draft = map(str, tiny_models)
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(3)]
        sockets[0].bind((FIRST, 0))
        port = int(sockets[0].getsockname()[1])
        for one, address in zip(sockets[1:], (SECOND, OTHER), strict=True):
            one.bind((address, port))
    with ExitStack() as stack:
        for model, address in ((target, FIRST), (target, SECOND), (draft, OTHER)):
            stack.enter_context(serve(model, *OPTIONS, "--listen", f"{address}:{port}"))
        yield port


@asynccontextmanager
async def gateway_of(
    records: Records, targets: list[str], drafts: list[str], seconds: float = 10.0
) -> AsyncIterator[Gateway]:
    zoo = Zoo(targets, drafts, seconds, resolve_interval=0.1, resolver=records)
    try:
        with trusted():
            await zoo.connect()
        yield Gateway(zoo)
    finally:
        await zoo.close()


async def text_of(
    gateway: Gateway, mode: Mode, on_delta: Callable[[int], object] = lambda number: None
) -> tuple[str, Finished]:
    """Returns the text of a request. `on_delta` receives the number of each delta."""
    sampling = SamplingParameters(temperature=1.0)
    request = Request("The quick brown", sampling, seed=3, max_tokens=60, speculation=SpeculationParameters(mode=mode))
    text, number = "", 0
    async with asyncio.timeout(60), aclosing(gateway.generate(request)) as events:
        async for event in events:
            match event:
                case Delta():
                    text, number = text + event.text, number + 1
                    if asyncio.iscoroutine(waiting := on_delta(number)):
                        await waiting
                case Finished():
                    return text, event
                case Opened():
                    pass
    raise AssertionError


def listed(gateway: Gateway) -> list[str]:
    return [one.address for one in gateway.zoo.endpoints]


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


async def test_addresses_of_a_name_are_replicas_that_come_and_go_under_a_request(port: int) -> None:
    records, name = Records(targets=[FIRST]), f"targets:{port}"
    first, second = f"{name} ({FIRST})", f"{name} ({SECOND})"
    async with gateway_of(records, [name], []) as gateway:
        assert listed(gateway) == [first]
        expected, _ = await text_of(gateway, Mode.OFF)
        records.records["targets"] = [FIRST, SECOND]
        await until(lambda: listed(gateway) == [first, second])
        assert [one.address for one in gateway.zoo.replicas(gateway.zoo.target(""))] == [first, second]

        async def swap(number: int) -> None:
            """Takes the first address away in the middle of a request that runs there."""
            if number == 3:
                assert gateway._balancer._replicas[first].active == 1
                records.records["targets"] = [SECOND]
                await until(lambda: listed(gateway) == [second])
                assert gateway._balancer._replicas[first].active == 1

        text, finished = await text_of(gateway, Mode.OFF, swap)
        assert (text, finished.generated_token_count) == (expected, 60), "it ends where it began"
        assert first not in gateway._balancer._replicas, "what is gone is forgotten"
        assert (await text_of(gateway, Mode.OFF))[0] == expected, "new requests go to the other address"
        await until(lambda: not gateway.zoo._entries[0]._retired)


async def test_another_model_takes_over_a_name_without_a_gap(port: int) -> None:
    records = Records(models=[FIRST])
    async with gateway_of(records, [f"models:{port}"], []) as gateway:
        assert [model.name for model in gateway.targets] == ["tiny-target"]
        records.records["models"] = [NOBODY]
        asked = records.count
        await until(lambda: records.count > asked + 2)
        assert [model.name for model in gateway.targets] == ["tiny-target"], "until a new address answers"
        assert [one.problem == "" for one in await gateway.check()] == [False, True]
        await text_of(gateway, Mode.OFF)
        records.records["models"] = [OTHER]
        await until(lambda: [model.name for model in gateway.targets] == ["tiny-draft"])
        await text_of(gateway, Mode.OFF)
        assert [one.problem for one in await gateway.check()] == [""]


async def test_drafts_of_a_name_share_the_requests(port: int) -> None:
    async with gateway_of(Records(drafts=[FIRST, SECOND]), [f"{OTHER}:{port}"], [f"drafts:{port}"]) as gateway:
        most: dict[str, int] = {}

        def look(number: int) -> None:
            for address, one in gateway.pairing.balancer._replicas.items():
                most[address] = max(most.get(address, 0), one.active)

        # Two of them reuse the cache of the first one's prompt.
        results = await asyncio.gather(*(text_of(gateway, Mode.LOCKSTEP, look) for _ in range(3)))
        assert len({text for text, _ in results}) == 1
        assert sorted(most.values()) == [1, 2], most
        assert [one.active for one in gateway.pairing.balancer._replicas.values()] == [0, 0]


async def test_a_name_that_is_not_found(port: int) -> None:
    records = Records()
    with pytest.raises(Unreachable, match="nowhere:1"):
        async with gateway_of(records, ["nowhere:1"], [], seconds=3.0):
            pass
    assert records.count > 1, "it waits for its targets"
    async with gateway_of(records, [f"{FIRST}:{port}", "nowhere:1"], [f"later:{port}"], seconds=3.0) as gateway:
        assert listed(gateway) == [f"{FIRST}:{port}"]
        assert [one.problem == "" for one in await gateway.check()] == [True, False, False]
        with pytest.raises(DraftAway, match=f"later:{port}"):
            gateway.zoo.draft("tiny-target")
        records.records["later"] = [SECOND]
        await until(lambda: len(listed(gateway)) == 2)
        assert gateway.zoo.draft("tiny-target") is not None
        del records.records["later"]
        asked = records.count
        await until(lambda: records.count > asked + 4)
        assert len(listed(gateway)) == 2, "a name server that is away takes nothing away"


async def test_the_certificate_is_that_of_the_name(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    pair = issue(authority(ca), tmp_path, "server", "draft.example")
    with suffix_server(*pair.options) as address:
        name, stub = f"draft.example:{address.rpartition(':')[2]}", model_pb2_grpc.ModelServiceStub
        for named, answers in ((name, True), ("", False)):
            async with open_channel(with_ip(name, "127.0.0.1"), Credentials(ca=ca), named) as channel:
                try:
                    await stub(channel).GetModel(model_pb2.GetModelRequest(), timeout=30)
                    assert answers
                except grpc.RpcError:
                    assert not answers


async def test_a_failed_round_does_not_end_following_a_name(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[str] = []

    def connect(ip: str) -> Connection:
        if ip:
            attempts.append(ip)
        if len(attempts) in (1, 2):
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "the key has another certificate", {})
        channel = open_channel(with_ip("draft.example:1", ip or NOBODY))
        return Connection(ip, model_pb2.ROLE_DRAFT, channel, channel, ModelReader(), 0.1, lambda new, old: None)

    entry = Entry("draft.example:1", connect, lambda address: None, Records(**{"draft.example": [NOBODY]}))
    entry.start(0.01)
    try:
        await until(lambda: NOBODY in [one.address for one in entry.connections])
    finally:
        await entry.close()
    assert attempts == [NOBODY] * 3
    warnings = [one.getMessage() for one in caplog.records if "draft.example" in one.getMessage()]
    assert len(warnings) == 1, "one line for one problem"
    assert "another certificate" in warnings[0] and "check its certificate files" in warnings[0]
