"""Finds the services behind a DNS name, such as that of a headless service of Kubernetes, each with its own address."""

import asyncio
import socket
from collections.abc import Sequence

from bridge.errors import Unreachable

# An address dns:HOST:PORT stands for all addresses that HOST resolves to.
PREFIX = "dns:"


def host_of(address: str) -> str:
    """Returns the name of a DNS address, which the certificates of its services are for; "" for any other address."""
    return address.removeprefix(PREFIX).rpartition(":")[0] if address.startswith(PREFIX) else ""


async def resolve(address: str) -> Sequence[str]:
    """Returns the addresses that an address stands for, in a stable order. Raises `Unreachable`."""
    host = host_of(address)
    if not host:
        return [address]
    port = address.rpartition(":")[2]
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:
        raise Unreachable(address, f"the name cannot be resolved: {error}") from error
    hosts = sorted({str(one[4][0]) for one in found})
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]
