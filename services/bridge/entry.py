"""Keeps the connections of one configured address: one, or for a host name one to each of its addresses."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from time import perf_counter

from services.bridge.connection import Connection
from services.bridge.names import Resolver, host_name

_log = logging.getLogger(__name__)

# Streams to an address that left its name may run on for this time.
_DRAIN_SECONDS = 24 * 3600.0
# A request that chose an address just before it left the name still opens its stream within this time.
_LINGER_SECONDS = 2.0
# The pause between the first look-ups of a name that is not found yet, and the time after which that is logged.
_RETRY_SECONDS, _PATIENCE_SECONDS = 1.0, 5.0


class Entry:
    """An address of the configuration.

    `connect` returns a new connection to an IP address of the host name, or to the configured address if "" is given:
    that is how gRPC reaches an address that is not a name, or a name that was not found yet. `on_retired` receives the
    address of a connection that left its name.
    """

    def __init__(
        self, address: str, connect: Callable[[str], Connection], on_retired: Callable[[str], None], resolver: Resolver
    ) -> None:
        self._host, self._connect, self._on_retired, self._resolver = host_name(address), connect, on_retired, resolver
        self._by_ip = {"": connect("")}
        self._retired: dict[asyncio.Task[None], Connection] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> list[Connection]:
        """The connections to the present addresses."""
        return list(self._by_ip.values())

    async def find(self, seconds: float, *, wait: bool) -> None:
        """Looks up the name for the first time, within the time limit. `wait`: until it is found."""
        logged, started = False, perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    if await self._look_up() or not (wait and self._host):
                        return
                    if not logged and (logged := perf_counter() - started > _PATIENCE_SECONDS):
                        _log.warning(
                            "the host name %s has no address yet, and is waited for, up to %g s: check the name; in "
                            "Kubernetes, a headless service gets it when one of its pods is ready",
                            self._host,
                            seconds,
                        )
                    await asyncio.sleep(_RETRY_SECONDS)

    def start(self, interval: float) -> None:
        """Starts all connections, now and those of new addresses later. `interval`: seconds between look-ups."""
        for one in self.connections:
            one.start()
        if self._host:
            self._task = asyncio.create_task(self._follow(interval), context=Context())

    async def close(self) -> None:
        """Stops looking up the name, and closes all connections."""
        tasks = [*self._retired, *([self._task] if self._task else [])]
        connections = [*self.connections, *self._retired.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in connections))

    async def _follow(self, interval: float) -> None:
        problem = ""
        while True:
            await asyncio.sleep(interval)
            try:
                for one in await self._look_up():
                    one.start()
                problem = ""
            except Exception as error:  # such as certificates that are being replaced, or no more threads
                if problem != (problem := f"{type(error).__name__}: {error}"):  # once, not in each round
                    _log.warning(
                        "the addresses of %s cannot be followed now (%s): the bridge keeps those that it has and tries "
                        "again every %g s; check its certificate files and its limits of threads and open files",
                        self._host,
                        problem,
                        interval,
                    )

    async def _look_up(self) -> list[Connection]:
        """Returns the new connections, after looking up the name.

        An address that left the name is drained as soon as one of the present addresses is connected, so that there is
        no time without any. A name that is not found keeps its addresses: the name server may be away.
        """
        try:
            found = await self._resolver(self._host) if self._host else []
        except OSError:
            found = []
        if not found:
            return []
        added = [ip for ip in found if ip not in self._by_ip]
        self._by_ip |= {ip: self._connect(ip) for ip in added}
        present = {ip: one for ip, one in self._by_ip.items() if ip in found}
        gone = {ip: one for ip, one in self._by_ip.items() if ip not in found}
        untried = not any(one.tried.is_set() for one in gone.values())
        if untried or any(one.endpoint for one in present.values()):
            self._by_ip = present
            for one in gone.values():
                self._retire(one)
        else:
            self._by_ip = {**present, **gone}  # the first one has the default model
        return [self._by_ip[ip] for ip in added]

    def _retire(self, connection: Connection) -> None:
        """Closes a connection when the streams that it has now are over."""

        async def close() -> None:
            await asyncio.sleep(_LINGER_SECONDS)
            await connection.close(_DRAIN_SECONDS)

        closing = asyncio.create_task(close(), context=Context())
        self._retired[closing] = connection
        closing.add_done_callback(lambda done: self._retired.pop(done, None))
        self._on_retired(connection.address)
