"""Tests who may read a process's metrics, and from where."""

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from services.config import InvalidConfiguration, ServerConfig
from services.metrics import ServerMetrics
from services.rpc.metrics_server import MetricsPortTaken, serving_metrics
from tests.support.certificates import admitted_around, authority, issue
from tests.support.secure import ALICE, KEYS
from tests.support.waiting import eventually


def scrape(url: str, **options: object) -> httpx.Response:
    return httpx.get(url, timeout=60, **options)  # type: ignore[arg-type]


def test_on_this_machine_everyone_may_read_them() -> None:
    with serving_metrics(ServerConfig(metrics="127.0.0.1:0"), ServerMetrics().registry) as url:
        for accepted in (
            "*/*",
            "application/openmetrics-text;version=1.0.0",
            "application/openmetrics-text;version=abc",
        ):
            assert "draftbridge_build_info" in scrape(url, headers={"Accept": accepted}).text
        with pytest.raises(MetricsPortTaken, match="choose another"):
            config = ServerConfig(metrics=url.removeprefix("http://").removesuffix("/metrics"))
            serving_metrics(config, ServerMetrics().registry).__enter__()


def get(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("secure", [False, True])
def test_silent_connections_keep_nobody_out(secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.metrics_server._MAX_CONNECTIONS", 2)
    config, options = ServerConfig(metrics="127.0.0.1:0"), dict[str, object]()
    if secure:
        pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "server")
        config = config.model_copy(update={"tls_certificate": pair.certificate, "tls_key": pair.key})
        options["verify"] = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with serving_metrics(config, ServerMetrics().registry) as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/metrics")))
        first, second = (stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(2))
        if not secure:
            second.sendall(b"GET /metrics")  # a part of a request is none
        assert scrape(url, **options).status_code == 200
        assert first.recv(1) == b"", "the oldest one was closed"
        third = stack.enter_context(socket.create_connection(address, timeout=60))
        if not secure:
            assert b"build_info" in get(third)
        assert scrape(url, **options).status_code == 200


def test_connections_with_a_request_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.metrics_server._MAX_CONNECTIONS", 2)
    registry, arrived, go_on = ServerMetrics().registry, threading.Semaphore(0), threading.Event()

    class Slow(Collector):
        def collect(self) -> list[Metric]:
            arrived.release()
            assert go_on.wait(10)
            return []

    with serving_metrics(ServerConfig(metrics="127.0.0.1:0"), registry) as url, ExitStack() as stack:
        registry.register(Slow())
        address = ("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/metrics")))
        with ThreadPoolExecutor(2) as pool:
            answers = []
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(address, timeout=60))
                answers.append(pool.submit(get, connection))
                assert arrived.acquire(timeout=10)
            beyond = stack.enter_context(socket.create_connection(address, timeout=60))
            assert beyond.recv(1) == b"", "closed at once"
            go_on.set()
            assert all(b"build_info" in answer.result() for answer in answers)

        def is_served() -> bool:
            with suppress(httpx.TransportError):
                return scrape(url).status_code == 200
            return False

        eventually(is_served)


def test_connections_that_got_no_thread_take_up_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.metrics_server._MAX_CONNECTIONS", 2)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving_metrics(ServerConfig(metrics="127.0.0.1:0"), ServerMetrics().registry) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/metrics")))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(3):
                with socket.create_connection(address, timeout=60) as connection:
                    assert connection.recv(1) == b"", "closed at once"
        assert scrape(url).status_code == 200


def test_a_start_does_not_wait_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda name="": pytest.fail("it looks up this machine's name"))
    with serving_metrics(ServerConfig(metrics="0.0.0.0:0", insecure=True), ServerMetrics().registry) as url:
        assert scrape(url.replace("0.0.0.0", "127.0.0.1")).status_code == 200


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_may_not_unless_it_is_secured(listen: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = ServerMetrics().registry
    with pytest.raises(InvalidConfiguration, match="--insecure"):
        serving_metrics(ServerConfig(metrics=listen), registry).__enter__()
    with serving_metrics(ServerConfig(metrics=listen, insecure=True), registry) as url:
        assert scrape(url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")).status_code == 200
    assert "is open to everything that can reach it" in caplog.text


def test_the_certificate_and_the_keys_of_the_process_hold(tmp_path: Path) -> None:
    ca, keys = tmp_path / "ca.pem", tmp_path / "keys.toml"
    pair = issue(authority(ca), tmp_path, "server")
    keys.write_text(KEYS)
    config = ServerConfig(metrics="0.0.0.0:0", tls_certificate=pair.certificate, tls_key=pair.key, keys=keys)
    context = ssl.create_default_context(cafile=str(ca))
    with serving_metrics(config, ServerMetrics().registry) as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        refused = scrape(url, verify=context)
        assert refused.status_code == 401 and "build_info" not in refused.text
        bearer = {"Authorization": f"Bearer {ALICE}"}
        assert "draftbridge_build_info" in scrape(url, verify=context, headers=bearer).text
        # Clients that stall in the handshake, or do not speak TLS, do not block others.
        address = ("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/metrics")))
        with socket.create_connection(address), socket.create_connection(address) as plain:
            plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert scrape(url, verify=context, headers=bearer).status_code == 200
            assert b"build_info" not in plain.recv(4096)
        # A changed certificate is used by new connections.
        other = tmp_path / "other.pem"
        replaced = issue(authority(other), tmp_path, "replaced")
        replaced.key.replace(pair.key)
        replaced.certificate.replace(pair.certificate)
        trusting = ssl.create_default_context(cafile=str(other))
        assert scrape(url, verify=trusting, headers=bearer).status_code == 200


# TLS 1.2 is refused, because its sessions could be resumed.
@pytest.mark.parametrize(("version", "admitted"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
def test_a_client_cannot_resume_a_session_after_its_authority_was_removed(
    tmp_path: Path, version: ssl.TLSVersion, admitted: bool
) -> None:
    ca, clients, others = (tmp_path / name for name in ("ca.pem", "clients.pem", "others.pem"))
    pair, own = issue(authority(ca), tmp_path, "server"), issue(authority(clients), tmp_path, "own")
    authority(others)
    config = ServerConfig(
        metrics="127.0.0.1:0", tls_certificate=pair.certificate, tls_key=pair.key, tls_client_ca=clients
    )
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(own.certificate, own.key)
    context.maximum_version = version
    with serving_metrics(config, ServerMetrics().registry) as url:
        assert admitted_around(lambda: others.replace(clients), url, context) == [admitted, False]
