"""A TCP proxy that stands for a bad network: it refuses, cuts, delays, halves, truncates and corrupts connections."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards connections to `upstream`, HOST:PORT, from `address`, in its own thread.

    `upstream` may change: new connections go to the new one. `delay` is the time in seconds that each piece of data
    waits in either direction. Faults hit connections in the middle of what they carry; `heal` ends all of them.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream, self.delay = upstream, 0.0
        self._refuses = False
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        # Bytes towards the client after which the connection is truncated or a bit is flipped.
        self._truncate_after: int | None = None
        self._corrupt_after: int | None = None
        self.hit_count = 0
        self._flows = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = self._run(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.call_soon_threadsafe(self._flows.set)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def close() -> None:
            self._server.close()
            self._abort_all()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Resets all connections, as a router does that has lost them."""
        self._run(self._in_loop(self._abort_all))

    def refuse(self) -> None:
        """Resets all connections and each new one."""
        self._refuses = True
        self.cut()

    def halve(self) -> None:
        """Forwards nothing more, but leaves all connections open, as a cut cable does."""
        self._run(self._in_loop(self._flows.clear))

    def truncate(self, byte_count: int) -> None:
        """Ends a connection after this many further bytes towards the client."""
        self._truncate_after = byte_count

    def corrupt(self, byte_count: int) -> None:
        """Flips a bit after this many further bytes towards the client."""
        self._corrupt_after = byte_count

    def heal(self) -> None:
        """Ends all faults. Connections that were halved are reset, as by a peer that has dropped them."""
        self._refuses, self.delay, self._truncate_after, self._corrupt_after = False, 0.0, None, None
        if not self._flows.is_set():
            self.cut()
            self._run(self._in_loop(self._flows.set))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @staticmethod
    async def _in_loop(action: Any) -> None:
        action()

    def _abort_all(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                # With a linger time of zero, closing sends a reset instead of an end.
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refuses:
                raise ConnectionRefusedError
            host, _, port = self.upstream.rpartition(":")
            from_service, to_service = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, to_service)
        self._pairs.add(pair)
        try:
            up = self._pump(reader, to_service, down=False)
            down = self._pump(from_service, writer, down=True)
            await asyncio.gather(up, down)
        except OSError:
            pass
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flows.wait()
            if down:
                data = self._tampered(data)
            writer.write(data)
            await writer.drain()
            if down and self._truncate_after == 0:
                self._truncate_after = None
                self.hit_count += 1
                raise ConnectionAbortedError
        writer.write_eof()

    def _tampered(self, data: bytes) -> bytes:
        if self._truncate_after is not None:
            data = data[: self._truncate_after]
            self._truncate_after -= len(data)
        if self._corrupt_after is not None:
            place, self._corrupt_after = self._corrupt_after, self._corrupt_after - len(data)
            if place < len(data):
                self._corrupt_after = None
                self.hit_count += 1
                return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data
