"""Starts service processes quickly: forks them from one process per test run that has already imported torch.

They are processes of their own, with their own pipes and environment, and differ from `python -m services.cli ...` in
nothing but the time that imports take, threads that are bound to cores, and freeing all objects at the end. Where they
would import other modules than those that are loaded, they start anew. Tests of the start itself use `subprocess` or
`cold_start`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from services.cli import processes
from services.engines import registry

_MAX_MESSAGE_BYTES = 1 << 20
_START_SECONDS = 240.0
# What the processes would import, except the modules that read the environment: some engines, and the terminal's.
_IMPORTED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "draftbridge",
    "grpc_channelz.v1.channelz",
    "grpc_reflection.v1alpha.reflection",
    "rich.progress",
    "services.bridge.server",
    "services.config_reading",
    "services.http.app",
    "services.model.server",
    "typer",
)
cold_start = processes._start
# What a test adds to it is not meant for the processes of others.
_environment = dict(os.environ)


class WarmProcess:
    """The part of `subprocess.Popen` that the project uses, for a child of the server."""

    def __init__(self, server: "_Server", pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._ended = server.ended(pid)

    def poll(self) -> int | None:
        if self._ended.is_set():
            self.returncode = self._ended.code
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        self.returncode = self._ended.code
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Ended(threading.Event):
    code = 0


class _Server:
    """The server's end in the tests: sends commands, receives process ids and exit codes."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(other.fileno(), True)
        command = [sys.executable, "-m", __name__, str(other.fileno())]
        self._process = subprocess.Popen(
            command, close_fds=False, stdin=subprocess.DEVNULL, start_new_session=True, env=_environment
        )
        other.close()
        self._lock, self._ended = threading.Lock(), dict[int, _Ended]()
        self._started, self._pid = threading.Semaphore(0), 0
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Returns the id of a new process, whose standard streams are the descriptors."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            # The first process waits until the server has imported everything.
            assert self._started.acquire(timeout=_START_SECONDS), "the server of processes does not answer"
            assert self._pid, "the server of processes has ended: see its message on standard error"
            return self._pid

    def ended(self, pid: int) -> _Ended:
        return self._ended[pid]

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # it has ended with a command unread
            while data := self._socket.recv(_MAX_MESSAGE_BYTES):
                message = json.loads(data)
                if "started" in message:
                    self._pid = message["started"]
                    # In a long run, numbers come again: the end of an earlier process is not that of this one.
                    self._ended[self._pid] = _Ended()
                    self._started.release()
                else:
                    ended = self.ended(message["ended"])
                    ended.code = message["code"]
                    ended.set()
        self._pid = 0
        self._started.release()


_starting = threading.Lock()


@functools.cache
def _server() -> _Server:
    return _Server()


def install() -> None:
    """Makes the functions of `services.cli.processes` start processes this way."""
    processes._start = start  # type: ignore[assignment]


def start(
    *arguments: str, module: str = "services.cli", stderr: int = 2, environment: Mapping[str, str] = os.environ
) -> WarmProcess:
    """Runs `python -m module arguments` with pipes for standard input and output."""
    child_in, stdin = os.pipe()
    stdout, child_out = os.pipe()
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "directory": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    with _starting:  # two threads must not make two servers
        server = _server()
    pid = server.start(request, [child_in, child_out, stderr])
    os.close(child_in)
    os.close(child_out)
    return WarmProcess(server, pid, os.fdopen(stdin, "w"), os.fdopen(stdout))


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs `draftbridge arguments` to its end, without input, with some variables in addition to the environment."""
    with tempfile.TemporaryFile("w+") as errors:
        process = start(*arguments, stderr=errors.fileno(), environment=os.environ | environment)
        process.stdin.close()
        with process.stdout:
            output = process.stdout.read()
        status = process.wait(120)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, status, output, errors.read())


def run_bound(program: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
    """Runs the module of a `bound_command`, whose output goes to standard error, as `subprocess.run` would."""
    module, *arguments = program[program.index("services.child") + 2 :]
    process = start(*arguments, module=module)
    process.stdin.close()
    with process.stdout:
        sys.stderr.write(process.stdout.read())
    return subprocess.CompletedProcess(program, process.wait(120))


def _serve(connection: socket.socket) -> None:
    """Forks a process for each request until the tests end."""
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # a collection in a child would touch, and so copy, all pages
    children: set[int] = set()
    wakeup, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([connection, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(4096)
            for pid in tuple(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    connection.send(json.dumps({"ended": pid, "code": code}).encode())
        if connection in ready:
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
            if not data:
                return
            if (pid := os.fork()) == 0:
                for one in (connection, wakeup, waker):
                    one.close()
                _become(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            children.add(pid)
            connection.send(json.dumps({"started": pid}).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turns this process into the requested one, which ends here unless an exception does so."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    paths = [environment.get("PYTHONPATH") for environment in (os.environ, request["environment"])]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["directory"])
    old, new = ([path for path in (value or "").split(os.pathsep) if path] for value in paths)
    if old != new:
        added = [path for path in new if path not in old]
        names = {module.name for module in pkgutil.iter_modules(added)} if added else set()
        if not set(old) <= set(new) or names & {*sys.modules, "sitecustomize", "usercustomize"}:
            os.execv(sys.executable, [sys.executable, "-m", request["module"], *request["arguments"]])
        sys.path[1:1] = [path for path in added if path not in sys.path]
        registry.engines.cache_clear()  # what was added may bring engines
    sys.argv = [request["module"], *request["arguments"]]
    status = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        status = end.code or 0
    # The interpreter's own end would also free each object of torch: 0.4 s.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
