"""Many requests with random cancels and faults: no error while one target is well, and nothing that leaks.

`DRAFTBRIDGE_SOAK_REQUESTS` sets their number; `make soak` runs 20,000. Processes are killed in `test_faults.py`.
"""

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import psutil
import pytest

from benchmarks.scripted_service import expected
from draftbridge import AsyncClient, CallError, Client
from draftbridge.v1 import bridge_pb2
from tests.support.waiting import eventually
from tests.support.world import World

REQUESTS = int(os.environ.get("DRAFTBRIDGE_SOAK_REQUESTS", "150"))
CLIENTS = 12
# The baseline of memory is taken after the first part of the requests, when caches and pools have grown.
WARM_SHARE, MIN_WARM = 0.1, 100
# Below this number of requests, memory that is kept permanently still grows.
MIN_MEASURED = 2000
MEMORY_GROWTH = 0.05
# Pools of threads, such as asyncio's of a few more than there are cores, start threads when calls happen to coincide.
# A thread lost with each fault or cancelled request would be many more.
POOL_THREADS = 8
TARGETS = ("target", "replica")
MODES = ("auto", "off", "lockstep", "opportunistic")
PROMPTS = [f"{index} soaked" for index in range(40)]
# Seconds from the end of a target's fault to the next one: by then, requests use it again.
RECOVERY_SECONDS = 5.0
# A client that was refused waits before its next request, as clients should.
PAUSE_SECONDS = 0.5


@dataclass
class Faults:
    """Injects faults from a thread: often to the draft, at times to one target, never to both targets at once."""

    world: World
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> "Faults":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _recovered(self) -> bool:
        """Returns whether both targets can be used, which may take longer on a busy machine."""
        with Client(self.world.bridge.address) as client:
            found = {one.address: one.reachable for one in client.status().endpoints}
        return all(found[self.world.proxies[name].address] for name in TARGETS)

    def _run(self) -> None:
        chance, target_at = random.Random(self.seed), 0.0
        while not self._stop.wait(chance.uniform(0.05, 0.4)):
            name, kinds = "draft", ("cut", "truncate", "corrupt", "delay", "halve")
            if monotonic() >= target_at and self._recovered():
                name, kinds = chance.choice(TARGETS), ("cut", "truncate", "corrupt", "delay")
            kind, proxy = chance.choice(kinds), self.world.proxies[name]
            hit_count = proxy.hit_count
            match kind:
                case "cut":
                    proxy.cut()
                case "truncate":
                    proxy.truncate(chance.randrange(2000))
                case "corrupt":
                    proxy.corrupt(chance.randrange(2000))
                case "delay":
                    proxy.delay = 0.03
                case "halve":
                    proxy.halve()
            self._stop.wait(chance.uniform(0.05, 0.3))
            proxy.heal()
            if name != "draft":
                target_at = monotonic() + RECOVERY_SECONDS
            if kind not in ("truncate", "corrupt") or proxy.hit_count > hit_count:
                self.counts[f"{kind} {name}"] += 1


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("soak")
    opened = World(directory, slots=2 * CLIENTS, forward_ms=0.2, keepalive_seconds=15.0, torch=False)
    try:
        yield opened
    finally:
        opened.close()


@dataclass(frozen=True)
class Usage:
    """The resources that a process holds."""

    memory: int
    threads: int
    files: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Usage":
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())


def usage(world: World) -> dict[str, Usage]:
    """Returns what each process holds, when no request is running."""
    with Client(world.bridge.address) as client:
        eventually(lambda: client.status().active_count == 0)
    eventually(lambda: world.slots_in_use() == 0)
    running = {"bridge": world.bridge, **world.services}
    return {name: Usage.of(psutil.Process(one.process.pid)) for name, one in running.items()}


async def requests(world: World, count: int, seed: int, *, outage: bool = False) -> Counter[str]:
    """Sends requests from several clients, and returns how they ended. They may fail only in an `outage`."""
    chance, outcomes, left = random.Random(seed), Counter[str](), iter(range(count))

    async def one(client: AsyncClient) -> str:
        prompt, tokens = chance.choice(PROMPTS), chance.randrange(1, 24)
        cancel_at = chance.randrange(tokens) if chance.random() < 0.2 else None
        text, right = "", expected(prompt, tokens)
        options: dict[str, Any] = {"max_tokens": tokens, "speculation": chance.choice(MODES)}
        stream = client.stream(prompt, **options)
        try:
            async with asyncio.timeout(60):
                async for event in stream:
                    if isinstance(event, bridge_pb2.GenerateDelta):
                        text += event.text
                        assert right.startswith(text)
                        if cancel_at is not None and len(text) > cancel_at:
                            return "cancelled"
        except CallError as error:
            assert outage and error.reason == "SERVICE_UNREACHABLE", error
            await asyncio.sleep(PAUSE_SECONDS)
            return "outage"
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        assert text == right
        return "finished"

    async def client() -> None:
        async with AsyncClient(world.bridge.address) as connected:
            for _ in left:
                outcomes[await one(connected)] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return outcomes


def test_soak(world: World) -> None:
    asyncio.run(requests(world, CLIENTS, 0))
    connected = usage(world)  # after faults, connections may be away for a while
    warm = max(int(REQUESTS * WARM_SHARE), MIN_WARM)
    with Faults(world, 1):
        asyncio.run(requests(world, warm, 1))
    before = usage(world)
    started = monotonic()
    with Faults(world, 2) as faults:
        outcomes = asyncio.run(requests(world, REQUESTS, 2))
    elapsed = monotonic() - started
    after = usage(world)
    print(f"{dict(outcomes)} in {elapsed:.0f} s, faults {dict(faults.counts)}, {before}, {after}")
    assert outcomes.total() == REQUESTS
    assert any(name.endswith(TARGETS) for name in faults.counts), faults.counts
    growth = MEMORY_GROWTH if REQUESTS >= MIN_MEASURED else 3 * MEMORY_GROWTH
    for name, one in before.items():
        assert after[name].memory < one.memory * (1 + growth), name
        assert after[name].threads <= one.threads + POOL_THREADS, name
    # Connections that were cut are closed with a delay.
    for name, one in connected.items():
        eventually(lambda name=name, most=one.files: usage(world)[name].files <= most)


def test_an_outage_of_all_targets_ends_with_it(world: World) -> None:
    for name in TARGETS:
        world.proxies[name].refuse()
    outcomes = asyncio.run(requests(world, 2 * CLIENTS, 3, outage=True))
    assert outcomes["outage"] == 2 * CLIENTS
    for name in TARGETS:
        world.proxies[name].heal()
    with Client(world.bridge.address) as client:
        eventually(lambda: all(one.reachable for one in client.status().endpoints))
    assert asyncio.run(requests(world, 2 * CLIENTS, 4))["outage"] == 0
