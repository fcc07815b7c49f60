"""Listens for HTTP next to the gRPC server, in the same event loop and over the same gateway."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from math import ceil

import uvicorn

from services.bridge.gateway import Gateway
from services.config import BridgeServerConfig
from services.http.answer import Limits
from services.http.app import application
from services.rpc import security
from services.rpc.keys import Keys
from services.rpc.server import PortTaken, Stop, host_and_port

_BACKLOG = 2048
# What the system keeps for a client that reads slowly, so that it is noticed before its whole text is in memory.
_SEND_BUFFER_BYTES = 1 << 18
# Longer than clients keep a connection for their next request, so that it is not closed under their hands.
_KEEP_ALIVE_SECONDS = 60


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process, which stops both doors."""
        yield


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
    host, port = host_and_port("http", config.http)
    security.check_exposure(config.http, config)
    context = security.server_context(config)
    try:
        bare = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        shared = config.share_port
        listener = socket.create_server((bare, port), family=family, backlog=_BACKLOG, reuse_port=shared)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    except OSError as error:
        raise PortTaken(config.http) from error
    limits = limits or Limits(body_bytes=config.http_body << 20, sequences=config.http_sequences)
    server = _Server(
        uvicorn.Config(
            application(gateway, limits, config.http_origin, _hosts(bare, config.http_host), keys),
            ssl_context_factory=(lambda *_: context) if context else None,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=ceil(config.grace),
        )
    )

    async def stop_with_the_process() -> None:
        await stop.wait()
        server.should_exit = True
        if isinstance(stop, Stop):
            await stop.hurried.wait()
            for task in tuple(server.server_state.tasks):
                task.cancel()

    serving, stopping = asyncio.create_task(server.serve([listener])), asyncio.create_task(stop_with_the_process())
    try:
        scheme = "https" if context else "http"
        yield f"{scheme}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        stopping.cancel()
        # After the grace, uvicorn cancels requests but does not wait until they have released what they hold.
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
