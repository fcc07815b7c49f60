"""Runs several bridges as worker processes that share one address, so that a bridge can use more than one core.

The system distributes connections among the workers, and a connection stays with its worker. A worker that ends
unexpectedly is started again.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import closing, suppress

from bridge.errors import InvalidField
from services.bridge.pair_memory import PairMemory
from services.child import command
from services.cli.options import as_options
from services.cli.processes import READY, ProcessFailed, private_environment
from services.config import BridgeServerConfig
from services.rpc.server import PortTaken, Stop, host_and_port, stop_event, unless

_log = logging.getLogger(__name__)

# The pause before a worker that has ended is started again, at first and at most: it doubles until a worker serves.
_RESTART_SECONDS, _MAX_RESTART_SECONDS = 1.0, 30.0


def run_workers(config: BridgeServerConfig, until_stdin_closes: bool, on_start: Callable[[str], None]) -> None:
    """Serves `config` with its number of workers until stopped. `on_start` receives what each of them announces.

    Raises `PortTaken`, `InvalidField`, and `ProcessFailed` if a worker does not start.
    """
    # Others that have SO_REUSEPORT, such as macOS, may give one of the workers all connections.
    if sys.platform != "linux":
        raise InvalidField("--workers", "1 on this system, which cannot share a port", config.workers)
    with closing(_Ports(config.share_port)) as ports:
        shared = {"listen": ports.reserve("listen", config.listen), "workers": 1, "share_port": True}
        if config.http:
            shared["http"] = ports.reserve("http", config.http)
        if config.pair_memory:  # a file that cannot be read is set aside once, not by each worker
            PairMemory(config.pair_memory).close()
        shared_config = config.model_copy(update=shared)
        asyncio.run(_serve(shared_config, config.workers, until_stdin_closes, on_start))


class _Ports:
    """Reserves ports, without listening on them, so that they stay taken while a worker is started again.

    `shared`: other bridges may have the ports, too.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._sockets: list[socket.socket] = []

    def reserve(self, field: str, listen: str) -> str:
        """Returns HOST:PORT with the reserved port. Raises `PortTaken` or `InvalidField`."""
        host, port = host_and_port(field, listen)
        bare = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        try:
            if not self._shared:
                with socket.socket(family) as alone:  # an unrelated process that shares its port must not share ours
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind((bare, port))
            reserved = socket.socket(family)
            self._sockets.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((bare, port))
        except OSError as error:
            raise PortTaken(listen) from error
        return f"{host}:{reserved.getsockname()[1]}"

    def close(self) -> None:
        """Frees the ports."""
        for one in self._sockets:
            one.close()


async def _serve(
    config: BridgeServerConfig, count: int, until_stdin_closes: bool, on_start: Callable[[str], None]
) -> None:
    stop = stop_event(until_stdin_closes)
    workers = [_Worker(number, config) for number in range(count)]
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]

    async def ready() -> str:
        return (await asyncio.gather(*(worker.ready for worker in workers)))[0]

    try:
        if announced := await unless(stop.wait(), ready()):
            on_start(announced)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in workers))


class _Worker:
    """One worker. `ready` gets what it announces when it serves for the first time."""

    def __init__(self, number: int, config: BridgeServerConfig) -> None:
        self._number = number
        if config.metrics:
            host, port = host_and_port("--metrics", config.metrics)
            config = config.model_copy(update={"metrics": f"{host}:{port + number if port else 0}"})
        self._arguments = command("services.cli", "bridge", *as_options(config), "--until-stdin-closes")
        self._process: Process | None = None
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, stop: Stop) -> None:
        """Runs the worker, and starts it again when it ends, until `stop` is set. Raises `ProcessFailed`."""
        pause = _RESTART_SECONDS
        while not stop.is_set():
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._arguments,
                    stdin=PIPE,
                    stdout=PIPE,
                    # The file of the configuration may have changed since, and its siblings have the old settings.
                    env=private_environment(),
                    start_new_session=os.name == "posix",
                )
            except OSError as error:  # the system may lack memory or processes for a moment
                ended, reason = f"could not be started ({error.strerror})", str(error.strerror)
            else:
                ending = asyncio.create_task(self._end(process, stop))
                if await self._read(process):
                    pause = _RESTART_SECONDS
                ended, reason = f"ended with status {await process.wait()}", "see its message above"
                ending.cancel()
            if stop.is_set():
                return
            if not self.ready.done():
                self.ready.set_exception(ProcessFailed(f"worker {self._number} did not start: {reason}"))
                return
            _log.error("worker %d %s and is started again in %.0f s", self._number, ended, pause)
            await unless(stop.wait(), asyncio.sleep(pause))
            pause = min(2 * pause, _MAX_RESTART_SECONDS)

    async def kill(self) -> None:
        """Ends the worker at once. Waits for the end of its pipes, because they must not outlive the event loop."""
        if self._process:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.communicate()

    async def _read(self, process: Process) -> bool:
        """Reads what the worker prints, to its end. Returns whether it has served."""
        assert process.stdout is not None
        served = False
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if not text.startswith(READY):
                with suppress(OSError):  # nobody reads our output any more, and the bridge goes on
                    print(text, flush=True)
                continue
            served = True
            if not self.ready.done():
                self.ready.set_result(text.removeprefix(READY))
        return served

    @staticmethod
    async def _end(process: Process, stop: Stop) -> None:
        """Ends the worker as this process is ended. A worker whose standard input is closed ends in a hurry."""
        assert process.stdin is not None
        await stop.wait()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await stop.hurried.wait()
        process.stdin.close()
