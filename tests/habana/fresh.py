"""Runs functions in new processes, in which optimum-habana has not replaced transformers' models yet.

They are forked from a process that has imported both libraries, which saves the seconds of the imports.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.engines.engine import Row
from tests.habana.models import opened

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.habana.fresh", "optimum.habana.transformers.modeling_utils"])


def in_fresh_process(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns what a function of a module returns, or raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *args, **options).result(timeout=120)


def place(rank: int, count: int, port: int) -> dict[str, str]:
    """Returns the variables that a launcher sets for one of the processes that share a model."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return meeting | {"WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank)}


def free_port() -> int:
    """Returns a port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def in_two_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in two processes that share a model, and returns the first one's result. Both must end well."""
    receiving, sending = CONTEXT.Pipe(duplex=False)
    port = free_port()
    processes = [CONTEXT.Process(target=_run_rank, args=(rank, port, sending, function, args)) for rank in range(2)]
    for process in processes:
        process.start()
    sending.close()  # so that two processes that fail are noticed at once
    assert receiving.poll(120)
    found = receiving.recv()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return found


def _run_rank(rank: int, port: int, sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # The process that this one was forked from has the environment of the test that happened to start it.
    os.environ.update(place(rank, 2, port) | {"PT_HPU_LAZY_MODE": "1"})
    sending.send(function(*args))  # the follower's function does not return


def served(directory: Path) -> tuple[str, list[float]]:
    """Opens a model as a service does: self-test, replacement, warm-up. Returns its class and the logits of id 1."""
    engine = opened(directory, use_hpu_graphs=False)
    return type(engine._model).__name__, engine.forward([Row(0, 0, (1,), 0)])[0][0].tolist()
