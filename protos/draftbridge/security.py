"""Credentials of a client, and channels that use them and take over changed files without a restart.

gRPC's own channel credentials are fixed when a channel is opened. A channel of this module reads its files again, at
most once a second, when a call begins. If certificates have changed, that call and later ones use a new connection;
running calls keep theirs.
"""

import asyncio
import ipaddress
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from draftbridge.errors import CallError

_log = logging.getLogger(__name__)

# Options of all channels to a bridge.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Otherwise a stream whose bridge has vanished, without closing its connection, would wait for ever.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Otherwise gRPC sends two pings, and then one a minute until there is data.
    ("grpc.http2.max_pings_without_data", 0),
)
_CHECK_SECONDS = 1.0
# A replaced channel is closed after this time; one of asyncio, as soon as its calls have ended.
_RETIRED_SECONDS = 24 * 3600.0
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]
C = TypeVar("C")


@dataclass(frozen=True)
class Credentials:
    """What a client shows to a server, and which servers it trusts. The default is a plain connection.

    `tls`: encrypt, and trust the certificate authorities that gRPC brings. `ca`: PEM file of the authorities to trust
    instead. `certificate` and `key`: PEM files that the client shows to a server with mutual TLS. `token`, or the
    content of `token_file`: the bearer token. All but `tls` and a token imply TLS. Files are read again when they
    change. `insecure` allows a token without TLS to leave this machine.
    """

    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    token: str = field(default="", repr=False)
    token_file: Path | str | None = None
    insecure: bool = False

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.tls or any(file is not None for file in (self.ca, self.certificate, self.key))

    def check(self, address: str) -> None:
        """Raises `CallError` for contradictory credentials, files that cannot be used, and an unencrypted token."""
        if (self.certificate is None) != (self.key is None):
            raise _invalid("a certificate and its key belong together: give both or neither")
        if self.token and self.token_file is not None:
            raise _invalid("give either a token or a token file")
        has_token = bool(self.token) or self.token_file is not None
        if has_token and not (self.encrypted or self.insecure or is_local(address)):
            raise _invalid(
                f"the token would be sent to {address} unencrypted: use TLS (tls or ca), or insecure if every network "
                "on the way is trusted"
            )
        _check_pem(self)
        _Material.read(self)


@dataclass(frozen=True)
class _Material:
    """The content of the files."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    metadata: Metadata

    @classmethod
    def read(cls, given: Credentials) -> "_Material":
        token = given.token or (_content(given.token_file) or b"").decode(errors="replace").strip()
        if given.token_file is not None and not token:
            raise _invalid(f"the token file {given.token_file} is empty: write the token into it")
        if not is_token(token):
            raise _invalid("a token consists of printable ASCII characters without spaces")
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return cls(_content(given.ca), _content(given.certificate), _content(given.key), metadata)

    @property
    def tls(self) -> tuple[bytes | None, ...]:
        return self.ca, self.certificate, self.key

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


def is_local(address: str) -> bool:
    """Returns whether an address (HOST:PORT, or that of a Unix socket) cannot be reached from another machine.

    Names other than localhost count as reachable, because what they resolve to may change.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def is_token(text: str) -> bool:
    """Returns whether a header can carry the text as a bearer token: printable ASCII characters without spaces."""
    return text.isascii() and text.isprintable() and " " not in text


def is_address(address: object) -> bool:
    """Returns whether a client can call it: HOST:PORT, with a port from 1 to 65535."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    # Bytes of a command line that are not UTF-8 become lone surrogates, which gRPC cannot encode.
    return re.fullmatch(r"[^/\ud800-\udfff]+", host) is not None and port.isdecimal() and 0 < int(port) < 1 << 16


def _direct(address: str, options: Options) -> Options:
    """Keeps connections within this machine off the proxy that gRPC takes from the environment (`http_proxy`).

    That is on another machine as a rule, from where the address means another one, and a token must not get there.
    """
    return (*options, ("grpc.enable_http_proxy", 0)) if is_local(address) else options


def open_channel(address: str, credentials: Credentials | None, options: Options) -> grpc.Channel:
    """Returns a channel for the synchronous client. Raises `CallError`."""
    options = _direct(address, options)
    if credentials is None or credentials == Credentials():
        return grpc.insecure_channel(address, options)

    def opened(material: _Material) -> grpc.Channel:
        if not credentials.encrypted:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, material.channel_credentials(), options)

    credentials.check(address)
    return _SyncChannel(_Renewed(credentials, opened))


def open_aio_channel(
    address: str, credentials: Credentials | None, options: Options, compression: grpc.Compression | None = None
) -> aio.Channel:
    """Returns a channel for asyncio. Raises `CallError`."""
    options = _direct(address, options)
    if credentials is None or credentials == Credentials():
        return aio.insecure_channel(address, options, compression)

    def opened(material: _Material) -> aio.Channel:
        if not credentials.encrypted:
            return aio.insecure_channel(address, options, compression)
        return aio.secure_channel(address, material.channel_credentials(), options, compression)

    credentials.check(address)
    return _AioChannel(_Renewed(credentials, opened))


class _Renewed(Generic[C]):
    """A channel that is replaced when the certificates have changed. `retired` receives the replaced channel."""

    def __init__(self, credentials: Credentials, opened: Callable[[_Material], C]) -> None:
        self._credentials, self._opened = credentials, opened
        self._material = _Material.read(credentials)
        self._lock = threading.Lock()
        self._checked = time.monotonic()
        self.channel = opened(self._material)
        self.retired: Callable[[C], None] = lambda channel: None
        self._methods: dict[tuple[str, str], Any] = {}

    def method(self, kind: str, path: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns a function that begins a call on the present channel, with the token."""

        def begin(*request: Any, metadata: Any = None, **more: Any) -> Any:
            method, own = self._current(kind, path, arguments, options)
            return method(*request, metadata=(*(metadata or ()), *own), **more)

        return begin

    def _current(
        self, kind: str, path: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, Metadata]:
        with self._lock:
            if time.monotonic() - self._checked >= _CHECK_SECONDS:
                self._checked = time.monotonic()
                self._renew()
            if (kind, path) not in self._methods:
                self._methods[kind, path] = getattr(self.channel, kind)(path, *arguments, **options)
            return self._methods[kind, path], self._material.metadata

    def _renew(self) -> None:
        try:
            found = _Material.read(self._credentials)
            if found.tls != self._material.tls:
                _check_pem(self._credentials)
        except CallError as error:
            _log.warning("the previous credentials stay in use: %s", error)
            return
        if found.tls != self._material.tls:
            replaced, self.channel = self.channel, self._opened(found)
            self._methods.clear()
            self.retired(replaced)
        self._material = found


class _SyncChannel(grpc.Channel):
    def __init__(self, renewed: _Renewed[grpc.Channel]) -> None:
        self._renewed = renewed
        # Each with the time since when it is not used.
        self._retired: list[tuple[float, grpc.Channel]] = []
        renewed.retired = self._retire

    def _retire(self, channel: grpc.Channel) -> None:
        now = time.monotonic()
        self._retired.append((now, channel))
        while now - self._retired[0][0] > _RETIRED_SECONDS:
            self._retired.pop(0)[1].close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._renewed.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._renewed.channel.unsubscribe(callback)

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("unary_stream", method, arguments, options)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("stream_unary", method, arguments, options)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("stream_stream", method, arguments, options)

    def close(self) -> None:
        for channel in (*(one for _, one in self._retired), self._renewed.channel):
            channel.close()

    def __enter__(self) -> "_SyncChannel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _AioChannel(aio.Channel):
    def __init__(self, renewed: _Renewed[aio.Channel]) -> None:
        self._renewed = renewed
        self._retired: dict[asyncio.Task[None], aio.Channel] = {}
        renewed.retired = self._retire

    def _retire(self, channel: aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close(_RETIRED_SECONDS))
        self._retired[task] = channel
        task.add_done_callback(lambda done: self._retired.pop(done, None))

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("unary_stream", method, arguments, options)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("stream_unary", method, arguments, options)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._renewed.method("stream_stream", method, arguments, options)

    async def close(self, grace: float | None = None) -> None:
        retired = dict(self._retired)
        for task in retired:
            task.cancel()
        for channel in (*retired.values(), self._renewed.channel):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._renewed.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._renewed.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._renewed.channel.channel_ready()

    async def __aenter__(self) -> "_AioChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _content(file: Path | str | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise _invalid(f"{file} cannot be read ({error.strerror}): give the path of a readable file") from None


def _check_pem(given: Credentials) -> None:
    """Raises `CallError` for files that cannot be read or are not PEM.

    gRPC would only log that, and the server would seem to be away.
    """
    for file in (given.ca, given.certificate, given.key):
        _content(file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if given.ca is not None:
            context.load_verify_locations(given.ca)
    except (ssl.SSLError, OSError) as error:
        raise _invalid(f"{given.ca} has no certificate in PEM: give the file of the server's authority") from error
    try:
        if given.certificate is not None and given.key is not None:
            context.load_cert_chain(given.certificate, given.key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise _invalid(
            f"{given.certificate} and {given.key} are not a certificate and its unencrypted key in PEM: give files "
            "that belong together"
        ) from error


def _invalid(message: str) -> CallError:
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_CREDENTIALS", message, {})
