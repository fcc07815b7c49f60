"""The gRPC server of every process, with health checks, reflection, error mapping and graceful shutdown."""

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha import reflection

from bridge.errors import DraftBridgeError, InvalidField
from services import config_values, open_files
from services.config import ServerConfig
from services.rpc import security
from services.rpc.gate import Gate
from services.rpc.health import HealthServicer
from services.rpc.insight import Insight, InsightInterceptor
from services.rpc.keys import Keys
from services.rpc.status import StatusInterceptor

T = TypeVar("T")

# The grace of running calls in a hurry, and of calls that only watch the health.
HURRIED_SECONDS, _IDLE_SECONDS = 2.0, 0.5
_HEALTH_INTERVAL_SECONDS = 1.0
# A connection is closed if the client does not answer a ping within half of this; pings are sent as often.
_KEEPALIVE_SECONDS = 20.0
_SEND_LIMIT_BYTES = 64 << 20
# The errors of an address that no server can have: it is taken, not for this user, or another machine's.
_UNUSABLE = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)


def check_free(listen: str, shared: bool = False) -> None:
    """Raises `PortTaken` unless a server can listen there: gRPC would also print a line of its own.

    `shared`: other servers that share their port may listen there, too.
    """
    host, port = host_and_port("listen", listen)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for a name with an empty or long part
        raise PortTaken(listen) from error
    unusable = 0
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shared and hasattr(socket, "SO_REUSEPORT"):
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                trial.bind(address)
        except OSError as error:
            unusable += error.errno in _UNUSABLE
            # Of a name's other addresses, gRPC needs only one: localhost may have one that the machine lacks.
            if error.errno == errno.EADDRINUSE or unusable == len(found):
                raise PortTaken(listen) from error


class PortTaken(DraftBridgeError, reason="PORT_TAKEN"):
    """A server cannot listen on its address."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"cannot listen on {address}: another program has the port, the address is not this "
            "machine's, or this user may not use ports below 1024; choose another, or port 0 for a free one",
            address=address,
        )


def host_and_port(field: str, listen: str) -> tuple[str, int]:
    """Returns both parts of the HOST:PORT that a setting has. Raises `InvalidField`."""
    try:
        return config_values.host_and_port(listen)
    except ValueError as error:
        raise InvalidField(field, str(error), listen) from None


class Stop(asyncio.Event):
    """Is set when the process is to stop. `hurried` is set when it must not wait for the whole grace period."""

    def __init__(self) -> None:
        super().__init__()
        self.hurried = asyncio.Event()


class Server:
    """Binds `listen`, HOST:PORT, when constructed (port 0: a free port) and serves in `run_until`.

    `config`: security and limits. `insight`: what the server shows of its calls. `share_port`: several processes may
    listen on the address. Raises `InvalidField`, `InvalidConfiguration` or `PortTaken`.
    """

    def __init__(
        self,
        listen: str,
        config: ServerConfig | None = None,
        insight: Insight | None = None,
        keepalive_seconds: float = _KEEPALIVE_SECONDS,
        share_port: bool = False,
    ) -> None:
        config = config or ServerConfig.model_validate({})
        credentials = security.server_credentials(config)
        self.keys = Keys(config.keys) if config.keys else None
        self._insight = insight or Insight()
        self._grace_seconds = config.grace
        self._services: dict[str, Callable[[], bool]] = {}
        open_files.raise_limit()
        self._gate = Gate(self.keys, config.call_limit)
        self._server = aio.server(
            interceptors=[InsightInterceptor(self._insight), self._gate, StatusInterceptor()],
            options=[
                # Otherwise a second process would silently share the port.
                ("grpc.so_reuseport", int(share_port)),
                # Bridges send keepalive pings every 20 seconds, also while a stream carries no data.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.http2.max_ping_strikes", 0),
                # A client that vanished without closing its connection would hold its sequences for ever.
                ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
                ("grpc.keepalive_timeout_ms", int(keepalive_seconds * 500)),
                # Otherwise gRPC waits a minute for the answer to a ping, whatever the timeout above.
                ("grpc.http2.ping_timeout_ms", int(keepalive_seconds * 500)),
                ("grpc.http2.max_pings_without_data", 0),
                *security.limits(config),
                ("grpc.max_send_message_length", _SEND_LIMIT_BYTES),
                ("grpc.enable_channelz", int(self._insight.channelz)),
            ],
        )
        host, _ = host_and_port("listen", listen)
        security.check_exposure(listen, config)
        if not share_port:
            check_free(listen)
        try:
            if credentials:
                bound = self._server.add_secure_port(listen, credentials)
            else:
                bound = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise PortTaken(listen) from error
        if bound == 0:
            raise PortTaken(listen)
        self.address = f"{host}:{bound}"

    def register(
        self,
        add: Callable[[Any, Any], None],
        servicer: object,
        descriptor: ServiceDescriptor | None,
        usable: Callable[[], bool] = lambda: True,
    ) -> None:
        """Adds a service; without a descriptor, health and reflection do not list it.

        While `usable`, called every second, returns False, the health of the service alone is NOT_SERVING.
        """
        add(servicer, self._server)
        if descriptor is not None:
            self._services[descriptor.full_name] = usable
            for method in descriptor.methods:
                # Prometheus sees an increase only of a series that it knows: the first such error would not alert.
                name = f"{descriptor.full_name}/{method.name}"
                self._insight.metrics.call_duration.labels(name, grpc.StatusCode.INTERNAL.name)

    async def run_until(
        self, stop: asyncio.Event, on_start: Callable[[str], None], alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Serves until `stop` is set; running calls may then end within the grace period. `on_start` gets the address.

        `alive` is called every second; while it returns False, health reports NOT_SERVING.
        """
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        names = [*self._services, SERVICE_NAME, reflection.SERVICE_NAME]
        if self._insight.channelz:
            channelz.add_channelz_servicer(self._server)
            names.append(channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name)
        reflection.enable_server_reflection(names, self._server)
        health.set(self._serving(alive()))
        await self._server.start()
        on_start(self.address)
        while not stop.is_set():
            try:
                async with asyncio.timeout(_HEALTH_INTERVAL_SECONDS):
                    await stop.wait()
            except TimeoutError:
                health.set(self._serving(alive()))
        health.set(dict.fromkeys(("", *self._services), False))
        await self._drain(stop)

    async def _drain(self, stop: asyncio.Event) -> None:
        """Accepts no more calls, and cancels running ones after the grace period, or earlier if there is a hurry."""
        stopping = asyncio.ensure_future(self._server.stop(self._grace_seconds))
        # Clients may watch the health for ever, which must not use up the grace period.
        hurried = stop.hurried if isinstance(stop, Stop) else asyncio.Event()
        await unless(hurried.wait(), self._gate.wait_idle())
        seconds = HURRIED_SECONDS if hurried.is_set() else _IDLE_SECONDS
        # Two stops that reach their ends at the same time may crash gRPC.
        if seconds < self._grace_seconds:
            await self._server.stop(seconds)
        await stopping

    def _serving(self, alive: bool) -> dict[str, bool]:
        return {"": alive} | {name: alive and usable() for name, usable in self._services.items()}


async def unless(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the work's result, or None if `end` comes first, which cancels the work."""
    task, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, ending):
            one.cancel()
        await asyncio.gather(task, ending, return_exceptions=True)


def stop_event(watch_stdin: bool) -> Stop:
    """Returns an event that SIGINT and SIGTERM set; with `watch_stdin` also the end of standard input.

    A second SIGINT is a hurry. So is the end of standard input: the process that started this one is gone, even if it
    was killed, or waits for the end of this one.
    """
    event = Stop()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        (event.hurried if event.is_set() else event).set()

    def hurry() -> None:
        event.set()
        event.hurried.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, event.set)

    def wait() -> None:
        # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
        while os.read(0, 1 << 16):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(hurry)

    if watch_stdin:
        threading.Thread(target=wait, name="stdin", daemon=True).start()
    return event
