"""Serves the Prometheus metrics of a process over HTTP, with the certificate, keys and exposure rule of its calls."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from bridge.errors import DraftBridgeError
from services.config import ProcessConfig
from services.errors import Unauthenticated
from services.metrics import readable_accept
from services.rpc import security
from services.rpc.keys import Keys
from services.rpc.server import host_and_port

_log = logging.getLogger(__name__)

# A connection that sends nothing for this long is closed, and its thread ends. Single bytes keep it open.
_IDLE_SECONDS = 10.0
# Each connection has a thread, also before its key is checked. A further one takes the place of the oldest one without
# a request, so that silent ones keep nobody out; it is closed at once if there is none.
_MAX_CONNECTIONS = 32
# A thread ends at once when its connection is closed: more is not waited for.
_ENDING_SECONDS = 1.0
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


class MetricsPortTaken(DraftBridgeError, reason="METRICS_PORT_TAKEN"):
    """The metrics cannot be served on their address."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"cannot serve metrics on {address}: another program has the port, the address is not this "
            "machine's, or this user may not use ports below 1024; choose another with --metrics HOST:PORT, or port 0 "
            "for a free one",
            address=address,
        )


@contextmanager
def serving_metrics(config: ProcessConfig, registry: CollectorRegistry) -> Iterator[str]:
    """Serves the metrics on `config.metrics` from a thread during the block, and yields their URL.

    Raises `InvalidField`, `InvalidConfiguration` or `MetricsPortTaken`.
    """
    host, port = host_and_port("--metrics", config.metrics)
    security.check_exposure(config.metrics, config)
    context = security.server_context(config)
    application = _readable(make_wsgi_app(registry))
    if config.keys:
        application = _guarded(application, Keys(config.keys))
    bare = host.removeprefix("[").removesuffix("]")
    try:
        server = make_server(bare, port, application, _Server6 if ":" in bare else _Server, _Handler)
    except OSError as error:
        raise MetricsPortTaken(config.metrics) from error
    if context:
        # The handshake is left to the connection's own thread, so that a client that stalls in it stops nobody.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingWSGIServer):
    # Of connections that wait to be accepted; the base class has room for 5.
    request_queue_size = 128

    def __init__(self, *given: Any) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        # Connections whose request has not arrived yet, by age.
        self._silent: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*given)

    def server_bind(self) -> None:
        """Binds without the base class's look-up of this machine's name, which waits for a name server that is down."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection, or closes the connection if there are too many."""
        if not (self._free.acquire(blocking=False) or self._makes_room()):
            self.shutdown_request(request)
            return
        with self._lock:
            self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no more threads; the caller closes the connection
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, request: Any) -> None:
        self.on_request(request)
        self._free.release()

    def on_request(self, connection: socket.socket) -> None:
        """Keeps a connection whose request has arrived, even if further ones come."""
        with self._lock:
            self._silent.pop(connection, None)

    def _makes_room(self) -> bool:
        """Closes the oldest connection without a request. Returns whether a further one may take its place."""
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            del self._silent[oldest]
            with suppress(OSError):  # it has ended meanwhile
                # Not the method of TLS sockets, which another thread must not call during the handshake.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        return self._free.acquire(timeout=_ENDING_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a connection that breaks off, or fails in its handshake, without the traceback of the base class."""
        _log.debug("a connection for metrics has failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_SECONDS
    server: _Server

    def parse_request(self) -> bool:
        """Reads the request's headers, and notes that they have arrived."""
        whole = super().parse_request()
        self.server.on_request(self.connection)
        return whole

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: requests for metrics arrive every few seconds."""


def _readable(application: Application) -> Application:
    """Returns an application that gives another one only Accept headers that it can read."""

    def readable(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return application(environ | {"HTTP_ACCEPT": readable_accept(environ.get("HTTP_ACCEPT", ""))}, start_response)

    return readable


def _guarded(application: Application, keys: Keys) -> Application:
    """Returns an application that answers only requests with one of the keys."""
    lock = threading.Lock()

    def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            with lock:
                keys.find(environ.get("HTTP_AUTHORIZATION"))
        except Unauthenticated as error:
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [str(error).encode()]
        return application(environ, start_response)

    return guarded
