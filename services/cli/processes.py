"""A target, a draft and a bridge as processes of ours, gone when we are."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bridge.errors import DraftBridgeError
from services.engines.engine import core_count

READY = "listening on "
_STOP_SECONDS = 10.0


class ProcessFailed(DraftBridgeError):
    """A process that we started ended before it was ready; its own message stands above ours."""

    reason = "PROCESS_FAILED"


@dataclass(frozen=True)
class Fleet:
    """Addresses of the three, and their processes by name."""

    bridge: str
    target: str
    processes: dict[str, "subprocess.Popen[str]"]
    draft: str = ""


def draft_threads() -> int:
    """For a draft beside a target that has the whole machine: half of it.

    Cores that a target is denied it never has, also where no draft pays; whether one pays beside it, `auto` finds out.
    """
    return max(1, core_count() // 2)


class StopSignals:
    """SIGINT and SIGTERM of this process, from its making on: `asked` is true once one came.

    Until `started` is set, they raise `KeyboardInterrupt` as well, so that waiting ends. That alone is not enough:
    raised in a destructor or in a weak reference's callback, as imports have them, it is lost.
    """

    def __init__(self) -> None:
        self.asked = False
        self.started = False
        self._ears, self._mouth = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        # No more than this: whatever lock it took, the main thread might hold it right now.
        self.asked = True
        os.write(self._mouth, b"!")
        if not self.started:
            raise KeyboardInterrupt

    def wait(self, processes: Iterable["subprocess.Popen[str]"]) -> None:
        """Until a signal came, also one before, or one of the processes ended."""

        def watch(process: "subprocess.Popen[str]") -> None:
            process.wait()
            os.write(self._mouth, b"!")

        for process in processes:
            threading.Thread(target=watch, args=(process,), daemon=True).start()
        os.read(self._ears, 1)


@contextlib.contextmanager
def pinned(cores: Iterable[int] | None) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores only; None leaves them all cores.

    Raises `ProcessFailed` for cores that this machine, or this process, does not have.
    """
    if cores is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ProcessFailed("this system cannot pin processes to cores: leave out the option for cores")
    allowed, wanted = os.sched_getaffinity(0), set(cores)
    if not wanted or not wanted <= allowed:
        raise ProcessFailed(
            f"cores {sorted(wanted)} are not all available: choose among {', '.join(map(str, sorted(allowed)))}"
        )
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def fleet(
    target: str,
    draft: str | None,
    *,
    listen: str = "127.0.0.1:0",
    target_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    bridge_options: Sequence[str] = (),
    target_cores: Sequence[int] | None = None,
    draft_cores: Sequence[int] | None = None,
) -> Iterator[Fleet]:
    """Starts all three, or two without a draft, waits until they are ready, and stops them whatever happens.

    `target_cores`, `draft_cores`: the cores that a model server runs on, all if None.
    """
    processes: dict[str, subprocess.Popen[str]] = {}
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> None:
            process = _start(*arguments)
            processes[name] = process
            stack.callback(stop, process)

        common = ("--until-stdin-closes", "--listen", "127.0.0.1:0")
        with pinned(target_cores):
            start("target", "serve", target, "--role", "target", *common, *target_options)
        if draft is not None:
            with pinned(draft_cores):
                start("draft", "serve", draft, "--role", "draft", *common, *draft_options)
        addresses = {name: _ready(name, process) for name, process in processes.items()}
        models = [word for name, address in addresses.items() for word in (f"--{name}", address)]
        start("bridge", "bridge", *models, "--listen", listen, "--until-stdin-closes", *bridge_options)
        yield Fleet(_ready("bridge", processes["bridge"]), processes=processes, **addresses)


@contextlib.contextmanager
def serve(model: str, *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Starts one model server, and stops it in the end; its address and process."""
    with launched(model, "serve", model, "--until-stdin-closes", "--listen", "127.0.0.1:0", *options) as server:
        yield server


@contextlib.contextmanager
def launched(name: str, *arguments: str, module: str = "services.cli") -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Starts a module that prints its address and ends with its standard input, and stops it in the end."""
    process = _start(*arguments, module=module)
    try:
        yield _ready(name, process), process
    finally:
        stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    """Ends a process: politely, then not."""
    if process.stdin:
        process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout:
        process.stdout.close()


def _start(*arguments: str, module: str = "services.cli") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for us; we stop them in our own order.
        start_new_session=os.name == "posix",
    )


def _ready(name: str, process: "subprocess.Popen[str]") -> str:
    """The address that a process prints when it is ready. Raises `ProcessFailed`."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while we read
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    # Read to the end, so that the process never blocks on a full pipe.
    threading.Thread(target=read, name=f"{name} output", daemon=True).start()
    while (line := lines.get()) is not None:
        if READY in line:
            return line.split(READY, 1)[1].strip()
    raise ProcessFailed(f"the {name} did not start; its own message is above")
