"""Many requests with random cancels and faults: no error that was not injected, and nothing that leaks.

`DRAFTBRIDGE_SOAK_REQUESTS` sets their number; `make soak` runs 20,000.
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
WARM_SHARE, LEAST_WARM = 0.1, 100
# Below this number of requests, memory that is kept permanently still grows.
LEAST_MEASURED = 2000
MEMORY_GROWTH = 0.05
TARGETS = ("target", "replica")
# How often each kind of fault is chosen.
KINDS = {"cut": 5, "truncate": 5, "corrupt": 5, "delay": 5, "halve": 5, "outage": 1}
MODES = ("auto", "off", "lockstep", "opportunistic")
PROMPTS = [f"{index} soaked" for index in range(40)]
# Seconds in which a fault may still fail a request after it has been healed: connections and replicas recover.
AFTERMATH_SECONDS = 4.0
# A client that was refused waits before its next request, as clients should.
PAUSE_SECONDS = 0.5


@dataclass
class Faults:
    """Injects faults from a thread: to the draft, to one target, and sometimes to both targets."""

    world: World
    seed: int
    # The last time at which each target had a fault.
    hit: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> "Faults":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for proxy in self.world.proxies.values():
            proxy.heal()

    def explains(self, begun: float) -> bool:
        """Returns whether a request that began at this time and has just failed may have met faults of all targets."""
        return all(begun < self.hit.get(name, 0.0) + AFTERMATH_SECONDS for name in TARGETS)

    def _run(self) -> None:
        chance, proxies = random.Random(self.seed), self.world.proxies
        while not self._stop.wait(chance.uniform(0.05, 0.4)):
            (kind,) = chance.choices(tuple(KINDS), tuple(KINDS.values()))
            name = "draft" if kind == "halve" else chance.choice(["draft", "draft", *TARGETS])
            hit = TARGETS if kind == "outage" else (name,) if kind != "delay" else ()
            self.counts[kind] += 1
            self.hit |= dict.fromkeys(hit, float("inf"))
            match kind:
                case "cut":
                    proxies[name].cut()
                case "truncate":
                    proxies[name].truncate(chance.randrange(2000))
                case "corrupt":
                    proxies[name].corrupt(chance.randrange(2000))
                case "delay":
                    proxies[name].delay = 0.03
                case "halve":
                    proxies[name].halve()
                case "outage":
                    for one in TARGETS:
                        proxies[one].refuse()
            self._stop.wait(chance.uniform(0.05, 0.3))
            for proxy in proxies.values():
                proxy.heal()
            self.hit |= dict.fromkeys(hit, monotonic())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("soak"), slots=2 * CLIENTS, forward_ms=0.2)
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
        eventually(lambda: client.status().active_count == 0, 20)
    eventually(lambda: world.slots_in_use() == 0, 20)
    running = {"bridge": world.bridge, **world.services}
    return {name: Usage.of(psutil.Process(one.process.pid)) for name, one in running.items()}


async def requests(world: World, count: int, seed: int, faults: Faults) -> Counter[str]:
    """Sends requests from several clients, and returns how they ended. Fails for an error that was not injected."""
    chance, outcomes, left = random.Random(seed), Counter[str](), iter(range(count))

    async def one(client: AsyncClient) -> str:
        prompt, tokens = chance.choice(PROMPTS), chance.randrange(1, 24)
        cancel_at = chance.randrange(tokens) if chance.random() < 0.2 else None
        begun, text = monotonic(), ""
        right = expected(prompt, tokens)
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
            assert error.reason == "SERVICE_UNREACHABLE" and faults.explains(begun), error
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
    warm = max(int(REQUESTS * WARM_SHARE), LEAST_WARM)
    with Faults(world, 1) as faults:
        asyncio.run(requests(world, warm, 1, faults))
    before = usage(world)
    started = monotonic()
    with Faults(world, 2) as faults:
        outcomes = asyncio.run(requests(world, REQUESTS, 2, faults))
    elapsed = monotonic() - started
    after = usage(world)
    print(f"{dict(outcomes)} in {elapsed:.0f} s, faults {dict(faults.counts)}, {before}, {after}")
    assert outcomes.total() == REQUESTS
    assert outcomes["finished"] > 0.6 * REQUESTS
    for name, one in before.items():
        growth = MEMORY_GROWTH if REQUESTS >= LEAST_MEASURED else 3 * MEMORY_GROWTH
        assert after[name].memory < one.memory * (1 + growth), name
        assert after[name].threads <= one.threads + 2, name
        assert after[name].files <= one.files + 4, name
