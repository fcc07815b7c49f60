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
        self._forwards, self._ended = asyncio.Event(), asyncio.Event()
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
        """Runs the proxy in a thread of its own, once. Yields its address."""
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        thread = threading.Thread(target=self._run, args=(server,), name="delay proxy")
        thread.start()
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)
            thread.join()

    def _run(self, server: asyncio.Server) -> None:
        async def end() -> None:
            await self._ended.wait()
            server.close()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

        self._loop.run_until_complete(end())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(far_writer):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, far_writer))
                    tasks.create_task(self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction until it ends; then it closes the other end's connection."""
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
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    queue.put_nowait((self._loop.time() + self._delay, data))
            queue.put_nowait((0.0, b""))
            await sender
        finally:
            sender.cancel()
