"""Tests several worker processes that share one address."""

import asyncio
import io
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from benchmarks.scripted_service import expected
from bridge.errors import InvalidField
from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc
from services.cli import servers, workers
from services.cli.options import as_options
from services.cli.processes import ProcessFailed, launched
from services.config import BridgeServerConfig
from services.config_reading import load
from services.rpc.server import PortTaken, Stop
from tests.support.waiting import eventually


def test_options_give_the_same_configuration_whatever_the_environment_is() -> None:
    config = BridgeServerConfig(
        target=("a:1", "b:2"), listen="127.0.0.1:7", insecure=True, connect_timeout=3.5, service_ca=Path("ca.pem")
    )
    words = as_options(config)
    assert words[words.index("--target") :][:4] == ["--target", "a:1", "--target", "b:2"]
    flags = {
        name: getattr(config, name) for name in BridgeServerConfig.model_fields if getattr(config, name) is not None
    }
    environment = {"DRAFTBRIDGE_BRIDGE_LISTEN": "127.0.0.1:8", "DRAFTBRIDGE_BRIDGE_CHANNELZ": "true"}
    assert load(BridgeServerConfig, flags, None, environment).values == config
    assert {"--insecure", "--no-channelz", "--service-ca"} <= set(words)


def test_systems_that_do_not_share_out_connections_have_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    config = BridgeServerConfig(target=("a:1",), listen="127.0.0.1:0", workers=2)
    with pytest.raises(InvalidField, match="1 on this system, which cannot share a port"):
        workers.run_workers(config, True, print)


@contextmanager
def filtered(look: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Calls `look` with each record of the log during the block."""
    workers._log.addFilter(look)
    try:
        yield
    finally:
        workers._log.removeFilter(look)


async def test_a_worker_reads_neither_a_file_nor_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CONFIG", "changed.toml")
    monkeypatch.setenv("DRAFTBRIDGE_BRIDGE_DRAFT", "b:2")
    stop, worker = Stop(), workers._Worker(0, BridgeServerConfig(target=("a:1",)))
    worker._arguments = ["sh", "-c", 'echo "listening on a:2$DRAFTBRIDGE_CONFIG$DRAFTBRIDGE_BRIDGE_DRAFT"; exec cat']
    task = asyncio.create_task(worker.run(stop))
    assert await worker.ready == "a:2"
    stop.set()
    await task


async def test_a_worker_that_the_system_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_RESTART_SECONDS", 0.0)
    stop, missing = Stop(), ["/nowhere/python"]
    first = workers._Worker(0, BridgeServerConfig(target=("a:1",)))
    first._arguments = missing
    await first.run(stop)
    with pytest.raises(ProcessFailed, match="worker 0 did not start: No such file"):
        await first.ready
    later = workers._Worker(1, BridgeServerConfig(target=("a:1",)))
    later._arguments = ["echo", "listening on a:2"]
    task = asyncio.create_task(later.run(stop))
    assert await later.ready == "a:2"
    later._arguments = missing

    def end(record: logging.LogRecord) -> bool:
        if "worker 1 could not be started (No such file" in record.getMessage():
            stop.set()
        return True

    with filtered(end):
        await task


async def test_a_worker_is_tried_more_seldom_until_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "_RESTART_SECONDS", 0.002)
    monkeypatch.setattr(workers, "_MAX_RESTART_SECONDS", 0.005)
    stop, worker, pauses = Stop(), workers._Worker(0, BridgeServerConfig(target=("a:1",))), list[float]()
    serves = 'echo >> "$0"; case $(wc -l < "$0") in 1|5) echo listening on a:2;; esac'
    worker._arguments = ["sh", "-c", serves, str(tmp_path / "runs")]

    def note(record: logging.LogRecord) -> bool:
        pauses.append(record.args[2])  # type: ignore[index,arg-type]
        if len(pauses) == 6:
            stop.set()
        return True

    with filtered(note):
        await worker.run(stop)
    assert pauses == [0.002, 0.004, 0.005, 0.005, 0.002, 0.004]


async def test_a_worker_is_started_again_when_nobody_reads_the_output_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(workers, "_RESTART_SECONDS", 0.0)
    stop, worker = Stop(), workers._Worker(0, BridgeServerConfig(target=("a:1",)))
    worker._arguments = ["sh", "-c", "echo listening on a:2; echo metrics at a:3"]
    restarts = 0

    def count(record: logging.LogRecord) -> bool:
        nonlocal restarts
        restarts += 1
        if restarts == 2:
            stop.set()
        return True

    with filtered(count):
        await worker.run(stop)
    assert restarts == 2


async def test_a_worker_that_is_killed_is_waited_for() -> None:
    # Otherwise its pipes may outlive the event loop, and asyncio prints a traceback for each.
    worker = workers._Worker(0, BridgeServerConfig(target=("a:1",)))
    worker._arguments = ["sh", "-c", "echo listening on a:2; exec cat"]  # runs until it is killed
    task = asyncio.create_task(worker.run(Stop()))
    await worker.ready
    task.cancel()
    await asyncio.wait([task])
    await worker.kill()
    assert worker._process is not None and worker._process.returncode == -signal.SIGKILL


def test_workers_and_up_share_the_port_of_another_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--share-port", "--until-stdin-closes")
    with launched("bridge", "bridge", "--listen", "127.0.0.1:0", *options) as (address, _):
        with pytest.raises(PortTaken):
            workers.run_workers(BridgeServerConfig(listen=address, workers=2), True, print)
        with launched("bridge", "bridge", "--listen", address, "--workers", "2", *options) as (same, _):
            assert same == address
        with pytest.raises(PortTaken):
            servers._check_addresses(address, "")
        monkeypatch.setenv("DRAFTBRIDGE_BRIDGE_SHARE_PORT", "true")
        servers._check_addresses(address, "")
        monkeypatch.setenv("DRAFTBRIDGE_BRIDGE_METRICS", address)  # which no server shares
        with pytest.raises(PortTaken):
            servers._check_addresses("127.0.0.1:0", "")


def is_bridge(process: psutil.Process) -> bool:
    """Returns whether a process is a bridge that has not ended."""
    with suppress(psutil.Error):  # it has ended, perhaps just now
        return "bridge" in process.cmdline()
    return False


def test_a_worker_that_has_ended_is_no_bridge_any_more() -> None:
    with subprocess.Popen(["sh", "-c", ":", "bridge"]) as ended:
        process = psutil.Process(ended.pid)
        eventually(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert not is_bridge(process)
    assert not is_bridge(process)


def test_workers_share_the_work_and_one_that_dies_is_replaced() -> None:
    with ExitStack() as stack:
        scripted = ("--role", "target", "--slots", "16")
        target, _ = stack.enter_context(launched("target", *scripted, module="benchmarks.scripted_service"))
        words = ("--target", target, "--workers", "2", "--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        listen = ("--listen", "127.0.0.1:0", "--until-stdin-closes")
        announced, process = stack.enter_context(launched("bridge", "bridge", *words, *listen))
        address, _, url = announced.partition(" and ")
        assert url.startswith("http://127.0.0.1:")
        port, text = int(address.rpartition(":")[2]), expected("shared", 20)

        def running() -> list[psutil.Process]:
            return [one for one in psutil.Process(process.pid).children() if is_bridge(one)]

        def serving() -> int:
            """Returns how many workers have connections of clients."""
            return sum(
                any(
                    one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in worker.net_connections()
                )
                for worker in running()
            )

        for _ in range(40):
            # Otherwise all clients of this process share one connection.
            channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]))
            stub = bridge_pb2_grpc.BridgeServiceStub(channel)
            assert len(stub.ListModels(bridge_pb2.ListModelsRequest(), timeout=60).models) == 1
            if serving() == 2:
                break
        assert serving() == 2
        before = {one.pid for one in running()}
        psutil.Process(min(before)).kill()
        eventually(lambda: len({one.pid for one in running()} | before) == 3)

        def works() -> bool:
            try:
                with Client(address) as fresh:
                    return fresh.generate("shared", max_tokens=20).text == text
            except CallError:
                return False

        assert works(), "the other worker serves meanwhile"
        last = running()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not any(one.is_running() for one in last)
