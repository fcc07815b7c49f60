"""A bridge, two replicas of a scripted target and a scripted draft, as processes with a bad network between them."""

from contextlib import ExitStack
from pathlib import Path

import grpc

from tests.support import certificates
from tests.support.observed import Observed, observed, value
from tests.support.proxy import Proxy

SCRIPTED = "benchmarks.scripted_service"
# A bridge notices within 1.5 times this period that a service does not answer. On a busy machine a service may
# take a good part of a second to answer.
KEEPALIVE_SECONDS = 2.0
# How long a process that is stopped lets its requests go on: longer than they take on a busy machine.
GRACE_SECONDS = 90.0


class World:
    """A bridge, two replicas of a target and a draft, each service behind a proxy.

    Each target has four slots and a queue of two, the draft three slots and no queue, unless `slots` is given. Without
    `torch`, which they do not need, processes start later and take less memory.
    """

    def __init__(
        self,
        directory: Path,
        slots: int | None = None,
        forward_ms: float = 2.0,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        torch: bool = True,
    ) -> None:
        self._directory, self._stack, self._started = directory, ExitStack(), 0
        self._slots, self._forward_ms, self._keepalive_seconds = slots, forward_ms, keepalive_seconds
        self._torch = torch
        authority = certificates.authority(directory / "ca.pem")
        self._tls = certificates.issue(authority, directory, "service").options
        self.services = {name: self.start_service(name) for name in ("target", "replica", "draft")}
        self.proxies = {
            name: self._stack.enter_context(Proxy(service.address)) for name, service in self.services.items()
        }
        self.bridge = self.start_bridge()

    def close(self) -> None:
        """Ends everything."""
        self._stack.close()

    def start_service(self, name: str, *options: str) -> Observed:
        """Starts a service; its role follows from `name`."""
        role = "draft" if name == "draft" else "target"
        slots, queue = (self._slots, 0) if self._slots else (3, 0) if role == "draft" else (4, 2)
        words = ["--role", role, "--slots", str(slots), "--queue", str(queue), *self._tls, *options]
        words += ["--grace", str(GRACE_SECONDS)]
        words += ["--forward-ms", str(self._forward_ms / (4 if role == "draft" else 1))]
        if role == "draft" and "--acceptance" not in options:
            words += ["--acceptance", "0.8"]
        self._started += 1
        return self._stack.enter_context(
            observed(self._directory, f"{name}{self._started}", *words, module=SCRIPTED, torch=self._torch)
        )

    def start_jumping(self) -> Observed:
        """Starts a target and a bridge whose wall clocks jump. Returns the bridge."""
        self._started += 1
        target = (SCRIPTED, "--role", "target", *self._tls)
        started = self._stack.enter_context(
            observed(self._directory, f"target{self._started}", *target, module="tests.support.jumping", torch=False)
        )
        bridge = ("services.cli", "bridge", "--target", started.address, "--draft", self.proxies["draft"].address)
        trust = ("--service-ca", str(self._directory / "ca.pem"))
        return self._stack.enter_context(
            observed(
                self._directory, f"bridge{self._started}", *bridge, *trust, module="tests.support.jumping", torch=False
            )
        )

    def start_bridge(self) -> Observed:
        """Starts a bridge."""
        targets = ("--target", self.proxies["target"].address, "--target", self.proxies["replica"].address)
        self._started += 1
        return self._stack.enter_context(
            observed(
                self._directory,
                f"bridge{self._started}",
                *("bridge", *targets, "--draft", self.proxies["draft"].address),
                *("--service-ca", str(self._directory / "ca.pem"), "--service-keepalive", str(self._keepalive_seconds)),
                *("--grace", str(GRACE_SECONDS)),
                torch=self._torch,
            )
        )

    def open_channel(self, name: str) -> grpc.Channel:
        """Opens a connection to a service, past its proxy."""
        trusted = grpc.ssl_channel_credentials((self._directory / "ca.pem").read_bytes())
        return grpc.secure_channel(self.services[name].address, trusted)

    def kill(self, name: str) -> None:
        """Kills a service."""
        self.services[name].process.kill()
        self.services[name].process.wait(60)

    def replace(self, name: str, *options: str) -> None:
        """Starts a service again, at its former address."""
        self.services[name] = self.start_service(name, *options)
        self.proxies[name].upstream = self.services[name].address

    def slots_in_use(self, *names: str) -> float:
        """Returns how many sequences services hold."""
        return sum(value(self.services[name].scrape(), "kv_slots_in_use") for name in names or self.services)

    def forward_count(self, *names: str) -> float:
        """Returns how many forwards targets have computed."""
        return sum(value(self.services[name].scrape(), "forward_duration_seconds_count") for name in names)

    def busy_and_idle(self) -> tuple[str, str]:
        """Returns the name of the target that serves the only request, and that of the other one."""
        idle, busy = sorted(("target", "replica"), key=self.slots_in_use)
        return busy, idle
