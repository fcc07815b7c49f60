"""Listens for HTTP: next to a gRPC server in the same event loop, or in a process of its own before a bridge."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from math import ceil
from typing import Any, cast

import uvicorn

from services.bridge.backend import Backend
from services.bridge.gateway import Gateway
from services.bridge.remote_gateway import RemoteGateway
from services.config import BridgeServerConfig, HttpServerConfig, ProcessConfig
from services.http.answer import Limits
from services.http.app import application
from services.http.connections import Connection, connection_limit
from services.rpc import security
from services.rpc.keys import Keys
from services.rpc.server import HURRIED_SECONDS, PortTaken, Stop, host_and_port, stop_event, unless

_BACKLOG = 2048
# What the system keeps for a client that reads slowly, so that it is noticed before its whole text is in memory.
_SEND_BUFFER_BYTES = 1 << 18
# Longer than clients keep a connection for their next request, so that it is not closed under their hands.
_KEEP_ALIVE_SECONDS = 60
# What clients have to read the ends of answers that a stop cuts. Then their connections are closed.
_LAST_SECONDS = 1.0


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process, which stops both doors."""
        yield


@dataclass(frozen=True)
class Listening:
    """Where a door listens, who may address it, what clients may use, and the security of the process."""

    address: str
    security: ProcessConfig
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    limits: Limits = Limits()
    shares_port: bool = False


@asynccontextmanager
async def http_door(
    config: BridgeServerConfig,
    gateway: Gateway,
    stop: asyncio.Event,
    keys: Keys | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[str]:
    """Serves HTTP on `config.http` until `stop` is set or the block ends, and yields the URL.

    `keys` are those of the gRPC server, so that a key's limits hold for both doors. `limits` replaces those of the
    configuration. Raises `InvalidField`, `InvalidConfiguration` or `PortTaken`.
    """
    limits = limits or Limits(body_bytes=config.http_body << 20, sequences=config.http_sequences)
    where = Listening(config.http, config, config.http_origin, config.http_host, limits, config.share_port)
    async with serving(where, gateway, stop, keys) as url:
        yield url


def run(
    config: HttpServerConfig, backend: RemoteGateway, on_start: Callable[[str], None], until_stdin_closes: bool = False
) -> None:
    """Serves HTTP over a bridge elsewhere until stopped, and closes the connection to it. `on_start` gets the URL."""
    keys = Keys(config.keys) if config.keys else None
    limits = Limits(body_bytes=config.body << 20, sequences=config.sequences)
    where = Listening(config.listen, config, config.origin, config.host, limits)

    async def serve() -> None:
        stop = stop_event(until_stdin_closes)
        try:
            async with serving(where, backend, stop, keys) as url:
                on_start(url)
                await stop.wait()
        finally:
            await backend.close()

    asyncio.run(serve())


@asynccontextmanager
async def serving(
    where: Listening, backend: Backend, stop: asyncio.Event, keys: Keys | None = None
) -> AsyncIterator[str]:
    """Serves HTTP over a backend until `stop` is set or the block ends, and yields the URL. See `http_door`."""
    host, port = host_and_port("http", where.address)
    security.check_exposure(where.address, where.security)
    context = security.server_context(where.security)
    bare = host.removeprefix("[").removesuffix("]")
    names = _hosts(bare, where.hosts)
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        both = bare == "::" and socket.has_dualstack_ipv6()  # IPv4, too, as gRPC does
        listener = socket.create_server(
            (bare, port), family=family, backlog=_BACKLOG, reuse_port=where.shares_port, dualstack_ipv6=both
        )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    except OSError as error:
        raise PortTaken(where.address) from error
    connection = partial(
        Connection,
        max_connections=where.limits.connections or connection_limit(),
        head_seconds=where.limits.head_seconds,
        send_seconds=where.limits.send_seconds,
        shaking=set(),
    )
    server = _Server(
        uvicorn.Config(
            application(backend, where.limits, where.origins, names, keys),
            ssl_context_factory=(lambda *_: context) if context else None,
            http=cast(Any, connection),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # Only a TLS handshake that does not end takes as long: from Python 3.12 on, asyncio waits for it.
            timeout_graceful_shutdown=ceil(where.security.grace + 2 * _LAST_SECONDS),
        )
    )

    left = asyncio.Event()

    async def stop_in_time() -> None:
        """Cancels what runs after the grace period, or in a hurry. uvicorn would log that as an error."""
        await unless(stop.wait(), left.wait())
        server.should_exit = True
        hurried = stop.hurried if isinstance(stop, Stop) else asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(where.security.grace):
                await hurried.wait()
                await asyncio.sleep(HURRIED_SECONDS)
        for task in tuple(server.server_state.tasks):
            task.cancel()
        await asyncio.wait((running,), timeout=_LAST_SECONDS)
        for connection in tuple(server.server_state.connections):  # their clients may have stopped reading
            connection.transport.abort()

    running, stopping = asyncio.create_task(server.serve([listener])), asyncio.create_task(stop_in_time())
    try:
        scheme = "https" if context else "http"
        yield f"{scheme}://{host}:{listener.getsockname()[1]}"
    finally:
        left.set()
        await running
        stopping.cancel()
        # After its own limit, uvicorn does not wait until requests have released what they hold.
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


def _hosts(listen: str, configured: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that a request may address the server by.

    A server on a loopback address accepts no others, because otherwise a web page whose name resolves to that address
    could use it with the browser's help (DNS rebinding).
    """
    try:
        local = listen == "localhost" or ip_address(listen).is_loopback
    except ValueError:
        local = False
    return (*configured, "localhost", "127.0.0.1", "[::1]", "::1", listen) if local or configured else ("*",)
