"""Addresses that a test may use again after a server has left them."""

import random
import socket

# Below the ports that Linux chooses itself where a program asks for any: another test would soon get one of those.
_FIRST, _LAST = 15_000, 32_000


def free_address() -> str:
    """Returns HOST:PORT of a port that nobody uses."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
