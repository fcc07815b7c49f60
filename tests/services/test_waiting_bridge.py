"""Tests what a bridge logs while it waits for its first target, and when it stops waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from draftbridge import Credentials
from draftbridge.v1 import model_pb2
from services.bridge import connection, entry
from services.bridge.connection import Connection
from services.bridge.endpoint import ModelReader
from services.bridge.entry import Entry
from services.bridge.zoo import Zoo
from services.errors import TlsFailed
from services.rpc.channel import open_channel
from tests.support.certificates import authority, issue
from tests.support.ports import free_address
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, pause in ((connection, "_ASK_SECONDS"), (entry, "_RETRY_SECONDS")):
        monkeypatch.setattr(module, pause, 0.02)
        monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)


@asynccontextmanager
async def zoo_of(target: str, seconds: float, credentials: Credentials | None = None) -> AsyncIterator[Zoo]:
    zoo = Zoo([target], [], seconds, credentials)
    try:
        yield zoo
    finally:
        await zoo.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_no_target_is_waited_for_whose_certificate_is_refused(host: str, tmp_path: Path) -> None:
    """Of localhost, gRPC reports only that nothing listens on ::1."""
    right, wrong = tmp_path / "ca.pem", tmp_path / "other.pem"
    pair = issue(authority(right), tmp_path, "server", host)
    authority(wrong)
    server = aio.server()
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        async with zoo_of(f"{host}:{port}", 200.0, Credentials(ca=wrong)) as zoo:
            with pytest.raises(TlsFailed, match=f"{host}:{port} .*CERTIFICATE_VERIFY_FAILED"):
                await asyncio.wait_for(zoo.connect(), 100)
    finally:
        await server.stop(None)


async def test_why_a_target_is_waited_for_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address, asked, describe = free_address(), asyncio.Semaphore(0), ModelReader.describe

    async def counted(*arguments: Any, **options: Any) -> tuple[model_pb2.Model, int]:
        try:
            return await describe(*arguments, **options)
        finally:
            asked.release()

    monkeypatch.setattr(ModelReader, "describe", counted)
    async with zoo_of(address, 200.0) as zoo:
        connecting = asyncio.create_task(zoo.connect())
        for _ in range(5):
            await asked.acquire()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith(
        f"the target at {address} is waited for, up to 200 s: no usable service answers at {address}"
    )


async def test_a_target_that_is_refused_is_logged_while_another_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, absent = free_address(), free_address()

    async def describe(self: ModelReader, channel: aio.Channel, address: str, *_: object, **__: object) -> object:
        if address == refused:
            raise TlsFailed(address, "CERTIFICATE_VERIFY_FAILED")
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ModelReader, "describe", describe)
    zoo = Zoo([refused, absent], [], 200.0)
    connecting = asyncio.create_task(zoo.connect())
    await asyncio.to_thread(eventually, lambda: bool(caplog.records))
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await zoo.close()
    (line,) = [one.getMessage() for one in caplog.records if refused in one.getMessage()]
    assert line.startswith(f"the target at {refused} cannot be used: no secure connection")


async def test_a_name_without_addresses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([*[[]] * 5, ["127.0.0.5"]])

    async def resolver(host: str) -> list[str]:
        return next(answers)

    channel = open_channel("targets.example:1")
    one = Connection("x", model_pb2.ROLE_TARGET, channel, channel, ModelReader(), 1.0, lambda new, old: None)
    await Entry("targets.example:1", lambda ip: one, lambda address: None, resolver).find(200.0, wait=True)
    await channel.close()
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("the host name targets.example has no address yet, and is waited for, up to 200 s")
