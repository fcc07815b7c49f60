"""Channels from a bridge to model services."""

import os

import grpc
from grpc import aio

from bridge.errors import Unreachable
from draftbridge.security import Credentials, open_aio_channel

# The largest message of a model service is a chunk of its tokenizer. Parsing a larger one would block the event loop
# for longer than a pass of a fast target takes.
_MAX_MESSAGE_BYTES = (1 << 18) + (64 << 10)


def open_channel(
    address: str, credentials: Credentials | None = None, name: str = "", keepalive_seconds: float = 20.0
) -> aio.Channel:
    """Returns a channel for streams of small messages. Raises `Unreachable` if the address has no port.

    `name`: the HOST:PORT that the address was looked up for, which is the one in the server's certificate. Calls fail
    if the service does not answer a ping within half of `keepalive_seconds`.
    """
    if ":" not in address:
        raise Unreachable(address, "an address is HOST:PORT")
    given = options(_MAX_MESSAGE_BYTES, keepalive_seconds)
    if name:
        given.append(("grpc.default_authority", name))
        if _bypasses_proxy(name):  # gRPC compares only the address, which is not the one that a user lists
            given.append(("grpc.enable_http_proxy", 0))
        if credentials and credentials.encrypted:
            given.append(("grpc.ssl_target_name_override", name.rpartition(":")[0]))
    return open_aio_channel(address, credentials, given, grpc.Compression.NoCompression)


def _bypasses_proxy(name: str) -> bool:
    """Returns whether the environment exempts HOST:PORT from its proxy, by the rule that gRPC has for names."""
    # gRPC reads these names only in lower case.
    listed = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    host = name.rpartition(":")[0].lower()
    return any(host.endswith(ending) for one in listed.split(",") if (ending := one.strip().lower()))


def options(max_message_bytes: int, keepalive_seconds: float = 20.0) -> list[tuple[str, int | str]]:
    """Returns the options of a channel for streams that receives messages of up to this size; see `open_channel`."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # Prompts can be long.
        ("grpc.max_send_message_length", 64 << 20),
        ("grpc.enable_retries", 0),
        # Detects a machine that hangs or disappears without closing the connection.
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_seconds * 500)),
        # A minute otherwise, whatever the timeout above.
        ("grpc.http2.ping_timeout_ms", int(keepalive_seconds * 500)),
        # Otherwise gRPC sends two pings, and then one a minute until there is data, which a health stream has not.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Otherwise two channels to one address share a connection, and one delays the other (head-of-line blocking).
        ("grpc.use_local_subchannel_pool", 1),
    ]
