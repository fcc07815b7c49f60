"""Finds the addresses that a host name has in DNS.

gRPC resolves names itself, but keeps to one address of several, and returns to DNS only after a connection failed. A
bridge needs all of them, because each is a replica, and must notice when one is added or taken away.
"""

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

# Returns the addresses of a host in a fixed order. Raises `OSError`.
Resolver = Callable[[str], Awaitable[list[str]]]
_NAME = re.compile(r"(?P<host>[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?):(?P<port>\d+)")


def host_name(address: str) -> str:
    """Returns the host of HOST:PORT if it is a name to look up in DNS, or "".

    Empty for IP addresses, for localhost, and for addresses with a scheme such as unix: or dns:, which are gRPC's.
    """
    match = _NAME.fullmatch(address)
    if match is None or is_localhost(address):
        return ""
    with suppress(ValueError):
        ipaddress.ip_address(match["host"])
        return ""
    return match["host"]


def is_localhost(address: str) -> bool:
    """Returns whether HOST:PORT has the host localhost, which stands for 127.0.0.1 and ::1."""
    return address.rpartition(":")[0].rstrip(".").lower() == "localhost"


def with_ip(address: str, ip: str) -> str:
    """Returns HOST:PORT with the host replaced by an IP address."""
    port = address.rpartition(":")[2]
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


async def resolve(host: str) -> list[str]:
    """Returns the host's IPv4 addresses, or its IPv6 addresses if it has none, sorted. Raises `OSError`.

    A machine with both kinds is one replica, not two. The look-up runs in a daemon thread: a name server that does not
    answer must neither occupy the threads that encode prompts nor delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[str]] = loop.create_future()

    def finish(found: list[str], error: OSError | None) -> None:
        if done.cancelled():
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(found)

    def look_up() -> None:
        found, error = [], None
        try:
            found = _addresses(host)
        except (OSError, UnicodeError) as caught:  # UnicodeError: a label of more than 63 characters
            error = caught if isinstance(caught, OSError) else OSError(str(caught))
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, found, error)

    threading.Thread(target=look_up, name=f"dns {host}", daemon=True).start()
    return await done


# What a look-up fails with if a name has addresses, but none of a kind that this machine has.
_NO_SUCH_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None), getattr(socket, "EAI_ADDRFAMILY", None)}


def _addresses(host: str) -> list[str]:
    try:  # addresses of a kind that this machine has, too
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror as error:
        if error.errno not in _NO_SUCH_ADDRESS:
            raise
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family = {family: {str(address[0]) for one, *_, address in found if one is family} for family, *_ in found}
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
