"""A sandbox process that answers messages, as the process that starts it sees it."""

import pickle
import socket
import struct
import subprocess
from contextlib import ExitStack
from time import monotonic

from services.child import command
from services.sandbox.process import environment

# How `multiprocessing.connection.Connection`, which the process uses, begins a message: with its length.
_HEADER = struct.Struct("!i")
_PIECE_BYTES = 1 << 18


class AnsweringProcess:
    """Runs a module, whose standard input is a socket for messages in both directions.

    Only `kill` may be called while another thread uses the object. `send` and `receive` raise `TimeoutError` at the
    deadline, a time of `time.monotonic`, and `EOFError` or another `OSError` than that if the process has ended. A
    deadline is that of a whole message, because a process that was taken over may send or read one byte by byte.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            stack.callback(self._socket.close)
            self._popen = subprocess.Popen(
                command(module, *arguments),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
            )
            stack.pop_all()

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._popen.poll()

    def send(self, value: object, deadline: float) -> None:
        """Sends a Python value."""
        self.send_bytes(pickle.dumps(value), deadline)

    def send_bytes(self, message: bytes, deadline: float) -> None:
        """Sends a message."""
        self._limit(deadline)
        self._socket.sendall(_HEADER.pack(len(message)) + message)

    def receive(self, max_bytes: int, deadline: float) -> bytes:
        """Returns the next message: bytes, because the process must not choose what this one unpickles.

        Raises `EOFError` for a longer one than `max_bytes`.
        """
        (length,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if not 0 <= length <= max_bytes:
            raise EOFError(f"it announced a message of {length} bytes")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._limit(deadline)
            piece = self._socket.recv(min(count - len(data), _PIECE_BYTES))
            if not piece:
                raise EOFError("it ended")
            data += piece
        return bytes(data)

    def _limit(self, deadline: float) -> None:
        if (seconds := deadline - monotonic()) <= 0:
            raise TimeoutError("it did not answer in time")
        self._socket.settimeout(seconds)

    def kill(self) -> None:
        """Kills the process; a call that waits for it fails."""
        self._popen.kill()

    def close(self, grace: float = 0.0) -> int:
        """Ends the process, closes the socket and returns the status. `grace`: seconds that the process has to end."""
        try:
            self._popen.wait(grace)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._socket.close()
        return self._popen.wait()
