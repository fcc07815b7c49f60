"""The process that runs one chat template for any number of chats.

    python -m services.sandbox.template_process SECONDS < socket

It sends `ready` and receives the template. For each chat it receives `(variables, marks)` and sends a line with the
outcome, followed by the text. Before that, for each use of `tojson`, it sends a line `shield`, followed by the text to
shield, and receives the shielded text. It sends bytes instead of Python values, because a template that takes over the
process must not choose what the bridge unpickles.
"""

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from services.sandbox.jinja import MEMORY_LIMIT_BYTES, attempt
from services.sandbox.process import confine

READY = "ready"
SHIELD = "shield"


def _main(time_limit: float) -> None:
    confine(MEMORY_LIMIT_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the bridge may still finish its requests
    threading.Thread(target=_end_with_the_bridge, daemon=True).start()
    connection: Connection[Any, Any] = Connection(os.dup(0))

    def send(kind: str, text: str = "") -> None:
        connection.send_bytes(f"{kind}\n{text}".encode("utf-8", "surrogatepass"))

    def shield(text: str) -> str:
        send(SHIELD, text)
        return connection.recv_bytes().decode("utf-8", "surrogatepass")

    send(READY)
    template = connection.recv()
    while True:
        variables, marks = connection.recv()
        # The bridge enforces the limit. If the bridge has ended while a function here holds the interpreter lock, only
        # this signal ends the process.
        signal.setitimer(signal.ITIMER_REAL, time_limit)
        outcome, text = attempt(template, variables, marks, shield)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(outcome, text)


def _end_with_the_bridge() -> None:
    poll = select.poll()
    poll.register(0, 0)  # reports only that the other side has closed
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
