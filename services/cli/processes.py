"""Starts model servers and bridges as child processes, and stops them. They also end if this process dies."""

import contextlib
import gc
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.errors import DraftBridgeError
from services.child import command
from services.config import ModelServerConfig, option
from services.config_reading import load
from services.engines import together
from services.engines.cpu import core_count
from services.engines.registry import AUTO, engine_spec
from services.interrupts import as_interrupts, importing
from services.store.built_in import SUFFIX
from services.store.cache import Report

READY = "listening on "
STOP_SECONDS = 10.0
# glibc asks for huge pages for all large allocations, so that a model server need not move its weights to them later.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Beginnings of variables for model servers that others reach, and for bridges that connect to those. Ours are reached
# by our bridge only, which has no token or certificate for them, and several cannot share one port for metrics.
_FOR_OTHERS = (
    "DRAFTBRIDGE_SERVE_METRICS",
    "DRAFTBRIDGE_SERVE_TLS_",
    "DRAFTBRIDGE_SERVE_KEYS",
    "DRAFTBRIDGE_BRIDGE_SERVICE_",
)


class ProcessFailed(DraftBridgeError):
    """A child process ended before it was ready. It has printed its own error message."""

    reason = "PROCESS_FAILED"


def announce(address: str) -> None:
    """Prints where this process listens, once it serves.

    What is loaded by then stays until the process ends. It is left out of garbage collections, which would otherwise
    delay all streams by tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    print(f"{READY}{address}", flush=True)


@dataclass(frozen=True)
class Fleet:
    """The addresses of target, draft ("" if there is none) and bridge, and their processes by name.

    `http` is the URL of the bridge's HTTP server, "" if it has none.
    """

    bridge: str
    target: str
    processes: dict[str, "subprocess.Popen[str]"]
    draft: str = ""
    http: str = ""


def fetch(targets: Sequence[str], drafts: Sequence[str | None], report: Report, *, trusted: bool = False) -> None:
    """Downloads models here, where the progress is shown, before servers read them. Raises what `resolve` raises."""
    with importing():
        from services.store.resolve import resolve  # takes a while, and few commands need it

    for model in dict.fromkeys((*targets, *(one for one in drafts if one not in (None, SUFFIX)))):
        resolve(model, report, weights="", trusted=trusted)


def configured_environment() -> dict[str, str]:
    """Returns the environment of a bridge that has the user's configuration, or of its model servers."""
    return {key: value for key, value in os.environ.items() if not key.startswith((*_FOR_OTHERS, together.LOCK))}


def private_environment() -> dict[str, str]:
    """Returns the environment of a bridge that has only the options of its command line, or of its model servers."""
    left_out = ("DRAFTBRIDGE_CONFIG", "DRAFTBRIDGE_BRIDGE_")
    return {key: value for key, value in configured_environment().items() if not key.startswith(left_out)}


@dataclass(frozen=True)
class ServerOptions:
    """The options for the command line of a model server. `trusted`: it may run the code of its model."""

    words: tuple[str, ...] = ()
    trusted: bool = False


def server_options(
    model: str, environment: Mapping[str, str], usual: Mapping[str, str], **given: str | None
) -> ServerOptions:
    """Checks the options of a model server that is to be started in an environment, before its model is downloaded.

    `given`: what the user gave, by the names of settings; None if nothing. `usual`: values for what neither the user
    nor the environment nor its file sets. Returns no options for prompt lookup, which has no engine.
    Raises `InvalidConfiguration`, `InvalidField`, or `UnusableModel` for an engine that is not installed.
    """
    if model == SUFFIX:
        return ServerOptions()
    place = {"model": model, "listen": "127.0.0.1:0"}
    origins = load(ModelServerConfig, place, environment=environment, partial=True).origins
    chosen = {name: value for name, value in usual.items() if origins[name] == "default"}
    chosen |= {name: value for name, value in given.items() if value is not None}
    config = load(ModelServerConfig, place | chosen, environment=environment).values
    if config.engine != AUTO:
        engine_spec(config.engine).check(config.options)
    words = [word for name, value in chosen.items() for word in (option(name), value)]
    return ServerOptions(tuple(words), config.options.trusted)


def draft_threads() -> int:
    """Returns the number of threads for a draft on the target's machine: half of the cores, but two if there are two.

    The target still uses all cores: it waits while the draft computes, and cores reserved for a draft are wasted
    whenever speculation does not help.
    """
    return min(core_count(), max(2, core_count() // 2))


class StopSignals:
    """Handles SIGINT and SIGTERM from its construction on: `asked` is the last one that has arrived, None before that.

    Until the caller sets `started`, a signal also raises `KeyboardInterrupt`, to interrupt the start. The exception
    alone is not enough: Python drops it if it is raised in a destructor or in a weak reference's callback.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.started = False
        self._read_end, self._write_end = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        # A signal handler must not take a lock: the main thread may hold it.
        self.asked = signal.Signals(number)
        os.write(self._write_end, b"!")
        if not self.started:
            raise KeyboardInterrupt

    def wait(self, processes: Iterable["subprocess.Popen[str]"], seconds: float | None = None) -> None:
        """Returns when a signal has arrived, even before this call, one of the processes has ended, or time is up.

        Each signal ends one wait only.
        """

        def watch(process: "subprocess.Popen[str]") -> None:
            process.wait()
            os.write(self._write_end, b"!")

        for process in processes:
            threading.Thread(target=watch, args=(process,), daemon=True).start()
        if seconds is not None:
            timer = threading.Timer(seconds, os.write, (self._write_end, b"!"))
            timer.daemon = True
            timer.start()
        os.read(self._read_end, 1)


def check_cores(cores: Iterable[int], text: str = "") -> None:
    """Raises `ProcessFailed` for cores that this machine, or this process, does not have.

    `text`: the cores as the user has named them.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ProcessFailed("this system cannot pin processes to cores: leave out the option for cores")
    allowed, wanted = os.sched_getaffinity(0), set(cores)
    if not wanted or not wanted <= allowed:
        raise ProcessFailed(f"cores {text or _listed(wanted)} are not all available: choose among {_listed(allowed)}")


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))


@contextlib.contextmanager
def pinned(cores: Iterable[int] | None) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores only; None leaves them all cores.

    Raises what `check_cores` raises.
    """
    if cores is None:
        yield
        return
    cores = set(cores)
    check_cores(cores)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def fleet(
    target: str,
    draft: str | None,
    *,
    listen: str | None = "127.0.0.1:0",
    target_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    bridge_options: Sequence[str] = (),
    target_cores: Sequence[int] | None = None,
    draft_cores: Sequence[int] | None = None,
    configured: bool = False,
) -> Iterator[Fleet]:
    """Runs a target, a bridge and, unless it is None, a draft. Yields when all are ready.

    `listen`: the bridge's address, None for that of its configuration. `target_cores`, `draft_cores`: the cores of a
    model server, all if None. `draft_options` are for a draft with an engine, so not for prompt lookup. `configured`:
    the processes read the user's configuration, except what only servers for others need; otherwise, the model servers
    read other variables but for their names, and the bridge reads nothing. Raises `ProcessFailed`.
    """
    from services.store.resolve import default_name  # takes a while, and few commands need it

    processes: dict[str, subprocess.Popen[str]] = {}
    environment = configured_environment() if configured else private_environment()

    def named(model: str) -> tuple[str, ...]:
        return () if configured else ("--name", default_name(model))

    with contextlib.ExitStack() as stack:
        stack.enter_context(as_interrupts())
        announced = Announcements()

        def start(name: str, *arguments: str, **variables: str) -> None:
            words = (*arguments, "--until-stdin-closes")
            processes[name] = process = _start(*words, environment={**environment, **variables})
            stack.callback(stop, process)
            announced.watch(name, process)

        common = ("--listen", "127.0.0.1:0", "--metrics", "")  # a file may name a port for metrics, too
        lock = dict[str, str]()
        if draft is not None:
            drafts = draft != SUFFIX  # prompt lookup has no engine
            lock = _start_lock(stack) if drafts else lock
            words = ("--role", "draft", *named(draft), *common, *(draft_options if drafts else ()))
            with pinned(draft_cores):
                start("draft", "serve", draft, *words, **lock)
            if not lock:
                announced.wait_for("draft")
        with pinned(target_cores):
            words = ("--role", "target", *named(target), *common, *target_options)
            start("target", "serve", target, *words, **lock)
        announced.wait_for(*processes)
        addresses = dict(announced.addresses)
        models = [word for name in processes for word in (f"--{name}", addresses[name])]
        place = () if listen is None else ("--listen", listen)
        start("bridge", "bridge", *models, *place, *bridge_options)
        announced.wait_for("bridge")
        address, _, http = announced.addresses["bridge"].partition(" and ")
        yield Fleet(address, processes=processes, http=http, **addresses)


def _start_lock(stack: contextlib.ExitStack) -> dict[str, str]:
    """Returns a variable for servers that are to load together; empty if its file cannot be made or locked.

    Without it they must start one after the other: each measures its passes, which loading makes thirty times as slow.
    """
    with contextlib.suppress(OSError):
        if together.possible:
            return {together.LOCK: stack.enter_context(tempfile.NamedTemporaryFile()).name}
    return {}


@contextlib.contextmanager
def serve(
    model: str, *options: str, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Runs a model server. Yields its address and process. Raises `ProcessFailed`."""
    words = ("serve", model, "--until-stdin-closes", "--listen", "127.0.0.1:0", *options)
    with launched(model, *words, environment=environment) as server:
        yield server


@contextlib.contextmanager
def launched(
    name: str, *arguments: str, module: str = "services.cli", environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Runs a module that prints its address and ends when its standard input closes. See `serve`."""
    process = _start(*arguments, module=module, environment=environment)
    try:
        announced = Announcements()
        announced.watch(name, process)
        announced.wait_for(name)
        yield announced.addresses[name], process
    finally:
        stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    """Ends a process with SIGTERM, and with SIGKILL if it has not ended after 10 seconds.

    Its standard input closes first, which leaves running requests 2 seconds, whatever its grace period.
    Its standard output is left to the thread that reads it: to close it here would mean to wait, beyond the reach of
    signals, for that thread's read, which lasts as long as any process has inherited the other end.
    """
    if process.stdin:
        process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(*arguments: str, module: str = "services.cli", environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**_HUGE_PAGES, **environment},
        # In a session of its own, a child does not receive Ctrl-C: this process stops the children in order.
        start_new_session=os.name == "posix",
    )


class Announcements:
    """The addresses that processes print when they are ready, by the names of the processes."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def watch(self, name: str, process: "subprocess.Popen[str]") -> None:
        """Reads what a process prints, in a thread, until it ends: it must never wait because a pipe is full."""
        self._processes[name] = process

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if READY in line:
                        self._news.put((name, line.split(READY, 1)[1].strip()))
            self._news.put((name, ""))

        threading.Thread(target=read, name=f"{name} output", daemon=True).start()

    def wait_for(self, *names: str) -> None:
        """Waits until processes are ready. Raises `ProcessFailed` for the first that has ended instead."""
        while any(name not in self.addresses for name in names):
            name, address = self._news.get()
            if address:
                self.addresses[name] = address
            elif name not in self.addresses:
                status = self._processes[name].wait()
                reason = f"it has ended {how_ended(status)}" if status < 0 else "see its message above"
                raise ProcessFailed(f"the {name} did not start: {reason}", process=name)


def how_ended(status: int) -> str:
    """Returns how a server has ended that should run, and what to do. `status`: as of `Popen.returncode`."""
    if status == -signal.SIGKILL:
        return (
            f"by signal {-status}, probably because memory ran out: free some, choose a smaller model, or set "
            "DRAFTBRIDGE_SERVE_KV_MEMORY, the GiB of each model's cache, to less than 2"
        )
    return f"by signal {-status}" if status < 0 else f"with status {status}: see its message above"
