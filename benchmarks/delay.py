"""A TCP proxy that puts a delay, or silence, between a client and a server."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class DelayProxy:
    """Forwards connections to `address` with `delay` seconds in each direction."""

    def __init__(self, address: str, delay: float) -> None:
        self._delay = delay
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._forwards = asyncio.Event()
        self._forwards.set()

    def set_delay(self, delay: float | None) -> None:
        """Changes the delay of what arrives from now on; None holds everything back until the next call."""

        def change() -> None:
            if delay is None:
                self._forwards.clear()
            else:
                self._delay = delay
                self._forwards.set()

        self._loop.call_soon_threadsafe(change)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Runs the proxy in a thread of its own. Yields its address."""
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        thread = threading.Thread(target=self._loop.run_forever, name="delay proxy", daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await queue.get()
                await self._forwards.wait()
                await asyncio.sleep(max(due - self._loop.time(), 0))
                if not data:
                    writer.close()
                    return
                writer.write(data)

        sender = asyncio.create_task(send())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                queue.put_nowait((self._loop.time() + self._delay, data))
        queue.put_nowait((0.0, b""))
        with contextlib.suppress(OSError):
            await sender
