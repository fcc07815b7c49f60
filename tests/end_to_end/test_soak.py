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
# Memory is compared with that after the first part of the requests, when caches and pools have grown.
WARM_SHARE, LEAST_WARM = 0.25, 100
# Below this number of requests, memory still grows by what is kept for good.
LEAST_MEASURED = 2000
MEMORY_GROWTH = 0.05
MODES = ("auto", "off", "lockstep", "opportunistic")
PROMPTS = [f"{index} soaked" for index in range(40)]
# Seconds in which a fault may still fail a request after it has been healed: connections and replicas recover.
AFTERMATH_SECONDS = 4.0


@dataclass
class Faults:
    """Injects faults from a thread: to the draft and to one target at a time; sometimes to both targets."""

    world: World
    seed: int
    # The times at which both targets were away, as (begin, end).
    outages: list[tuple[float, float]] = field(default_factory=list)
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
        """Returns whether a request that began then, and has failed now, met an outage of all targets."""
        return any(begun < end + AFTERMATH_SECONDS for _, end in self.outages)

    def _run(self) -> None:
        chance, proxies = random.Random(self.seed), self.world.proxies
        while not self._stop.wait(chance.uniform(0.05, 0.4)):
            kind = chance.choice(["cut", "truncate", "corrupt", "delay", "halve", "outage"])
            name = chance.choice(["draft", "draft", "target", "replica"])
            self.counts[kind] += 1
            begun = monotonic()
            if kind == "cut":
                proxies[name].cut()
            elif kind == "truncate":
                proxies[name].truncate(chance.randrange(2000))
            elif kind == "corrupt":
                proxies[name].corrupt(chance.randrange(2000))
            elif kind == "delay":
                proxies[name].delay = 0.03
            elif kind == "halve":
                proxies["draft"].halve()
            elif chance.random() < 0.2:
                for one in ("target", "replica"):
                    proxies[one].refuse()
                self.outages.append((begun, float("inf")))
            self._stop.wait(chance.uniform(0.05, 0.3))
            for proxy in proxies.values():
                proxy.heal()
            if self.outages and self.outages[-1][1] == float("inf"):
                self.outages[-1] = (self.outages[-1][0], monotonic())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("soak"), slots=2 * CLIENTS, forward_ms=0.2)
    try:
        yield opened
    finally:
        opened.close()


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    memory: int
    threads: int
    files: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Usage":
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())


def usage(world: World) -> dict[str, Usage]:
    """Returns what each process holds, once no request runs."""
    with Client(world.bridge.address) as client:
        eventually(lambda: client.status().active_count == 0, 20)
    eventually(lambda: world.slots_in_use() == 0, 20)
    running = {"bridge": world.bridge, **world.services}
    return {name: Usage.of(psutil.Process(one.process.pid)) for name, one in running.items()}


async def requests(world: World, count: int, seed: int, faults: Faults) -> Counter[str]:
    """Sends requests from several clients, and returns how they ended. Fails at an error that was not injected."""
    chance, outcomes, left = random.Random(seed), Counter[str](), iter(range(count))

    async def one(client: AsyncClient) -> str:
        prompt, tokens = chance.choice(PROMPTS), chance.randrange(1, 60)
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
