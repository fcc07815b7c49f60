"""Certificates are renewed without a restart, refused if they do not fit, and required beyond this machine."""

import asyncio
import contextlib
import re
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from draftbridge import CallError, Client, Credentials, security
from draftbridge.security import open_aio_channel, open_channel
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc
from services.cli.processes import ProcessFailed
from services.rpc.security import Certificates, warn_of_expiry
from tests.services.test_cli import command, refused
from tests.support.certificates import Pair, authority, issue
from tests.support.observed import observed
from tests.support.ports import free_address
from tests.support.secure import ALICE, KEYS, describe, suffix_server
from tests.support.waiting import eventually


def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    pair = issue(authority(ca), tmp_path, "server", "elsewhere.example")
    with (
        suffix_server(*pair.options) as address,
        Client(address, Credentials(ca=ca)) as client,
        pytest.raises(CallError) as caught,
    ):
        client.models()
    error = caught.value
    assert error.reason == "TLS_FAILED" and "Hostname Verification Check failed" in str(error)


def test_an_expired_certificate_is_told_with_its_remedy(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    pair = issue(authority(ca), tmp_path, "server", not_after=datetime.now(UTC) - timedelta(1))
    with (
        suffix_server(*pair.options) as address,
        Client(address, Credentials(ca=ca)) as client,
        pytest.raises(CallError, match=r"has expired.*its certificate is valid now") as caught,
    ):
        client.models()
    assert caught.value.reason == "TLS_FAILED"


def test_the_end_of_a_certificate_is_logged_and_measured(tmp_path: Path) -> None:
    by, now = authority(tmp_path / "ca.pem"), datetime.now(UTC).replace(microsecond=0)
    pair = issue(by, tmp_path, "server", not_after=now - timedelta(1))
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    server = observed(tmp_path, "draft", "serve", "suffix", "--role", "draft", *pair.options, torch=False)
    with server as running, httpx.Client(verify=unverified) as client:

        def end() -> datetime:
            text = client.get(running.metrics).text
            (value,) = re.findall(r"^draftbridge_tls_certificate_not_after_seconds{.*} (.*)$", text, re.M)
            return datetime.fromtimestamp(float(value), UTC)

        assert end() == now - timedelta(1)
        issue(by, tmp_path, "server", not_after=now + timedelta(30))
        assert end() == now + timedelta(30), "it is that of the files, which new connections get"
        further = issue(by, tmp_path, "further", not_after=now + timedelta(60))
        further.certificate.replace(pair.certificate)  # as between two writes: the key is that of the previous one
        assert end() == now + timedelta(30), "new connections get the previous one"
        pair.certificate.write_text("no certificate")
        assert end() == now + timedelta(30)
        assert "server.pem is valid until" in running.log.read_text()


@pytest.mark.parametrize(("days", "warns"), [(-1, True), (6, True), (8, False)])
def test_a_server_warns_of_a_certificate_that_ends_within_a_week(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, warns: bool
) -> None:
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "server", not_after=datetime.now(UTC) + timedelta(days))
    warn_of_expiry(pair.certificate, Certificates(pair.certificate, pair.key, None).end())
    assert ("clients refuse it after that: replace the file" in caplog.text) == warns


def test_a_certificate_in_a_form_that_only_openssl_reads_has_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "server")
    pair.certificate.write_text(pair.certificate.read_text().replace(" CERTIFICATE", " TRUSTED CERTIFICATE"))
    end = Certificates(pair.certificate, pair.key, None).end()
    warn_of_expiry(pair.certificate, end)
    assert isnan(end) and not caplog.text


def test_a_file_that_is_not_pem_is_named_before_the_connection(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    token, ca = tmp_path / "token", tmp_path / "ca.pem"
    token.write_text(ALICE)
    one, other = (issue(authority(ca), tmp_path, name) for name in ("one", "other"))
    for wrong, words in (
        (Credentials(ca=token), f"{token} has no certificate in PEM"),
        (Credentials(ca=one.key), f"{one.key} has no certificate in PEM"),
        (Credentials(ca=ca, certificate=token, key=one.key), f"{token} and {one.key} are not a certificate and its"),
        (Credentials(certificate=one.certificate, key=token), f"{one.certificate} and {token} are not a certificate"),
        (Credentials(certificate=one.certificate, key=other.key), "give files that belong together"),
    ):
        with pytest.raises(CallError, match=words) as caught:
            Client("127.0.0.1:1", wrong)
        assert caught.value.reason == "INVALID_CREDENTIALS"
    assert capfd.readouterr().err == ""
    for options in (
        ("bridge", "--target", "127.0.0.1:1", "--service-ca", str(token)),
        ("http", "--bridge", "127.0.0.1:1", "--bridge-ca", str(token)),
    ):
        assert f"{token} has no certificate in PEM" in refused(command(*options, "--listen", "127.0.0.1:0"))


def trusts(address: str, ca: Path) -> bool:
    try:
        return describe(address, Credentials(ca=ca)).name == "suffix"
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False


def test_a_server_takes_over_a_changed_certificate(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pem", tmp_path / "new.pem"
    first, second = authority(old), authority(new)
    pair = issue(first, tmp_path, "server")
    with (
        suffix_server(*pair.options) as address,
        open_channel(address, Credentials(ca=old), ()) as channel,
    ):
        stub = model_pb2_grpc.ModelServiceStub(channel)
        stub.GetModel(model_pb2.GetModelRequest())
        assert trusts(address, old) and not trusts(address, new)
        replaced = issue(second, tmp_path, "replaced")
        replaced.key.replace(pair.key)  # as between two writes: the key is not that of the certificate
        assert trusts(address, old)
        replaced.certificate.replace(pair.certificate)
        assert trusts(address, new) and not trusts(address, old)
        stub.GetModel(model_pb2.GetModelRequest())  # a connection outlives the change


def test_files_that_change_while_they_are_checked_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = authority(tmp_path / "ca.pem")
    pair, replaced = issue(by, tmp_path, "server"), issue(by, tmp_path, "replaced")
    files = Certificates(pair.certificate, pair.key, None)
    check = files._load
    monkeypatch.setattr(files, "_load", lambda: (replaced.key.replace(pair.key), check())[1])
    replaced.certificate.replace(pair.certificate)
    assert not files.renew(), "the certificate is new and the key that was read is old"
    monkeypatch.undo()
    assert files.renew() and not files.renew()


def test_a_client_takes_over_a_changed_certificate(tmp_path: Path) -> None:
    ca, trusted = tmp_path / "ca.pem", tmp_path / "trusted.pem"
    by, first, second = authority(ca), authority(trusted), authority(tmp_path / "second.pem")
    own = issue(first, tmp_path, "own")
    options = (*issue(by, tmp_path, "server").options, "--tls-client-ca", str(trusted))
    credentials = Credentials(ca=ca, certificate=own.certificate, key=own.key)
    with contextlib.ExitStack() as stack:
        with suffix_server(*options, "--listen", free_address()) as address:
            channel = stack.enter_context(open_channel(address, credentials, ()))
            stub = model_pb2_grpc.ModelServiceStub(channel)

            def answers() -> bool:
                with contextlib.suppress(grpc.RpcError):
                    return bool(stub.GetModel(model_pb2.GetModelRequest(), timeout=5).model.name)
                return False

            assert answers()
        # The server returns and trusts only the new authority, so the channel needs the new certificate to reconnect.
        (tmp_path / "second.pem").replace(trusted)
        with suffix_server(*options, "--listen", address):
            assert not answers()
            issue(second, tmp_path, "own")
            eventually(answers)


async def test_a_stream_outlives_a_change_of_its_channels_certificate(tmp_path: Path) -> None:
    ca, trusted = tmp_path / "ca.pem", tmp_path / "trusted.pem"
    by, first, second = authority(ca), authority(trusted), authority(tmp_path / "second.pem")
    own = issue(first, tmp_path, "own")
    options = (*issue(by, tmp_path, "server").options, "--tls-client-ca", str(trusted))
    credentials = Credentials(ca=ca, certificate=own.certificate, key=own.key)
    with suffix_server(*options) as address:
        async with open_aio_channel(address, credentials, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            stream = draft_pb2_grpc.DraftServiceStub(channel).Draft()
            await stream.write(draft_pb2.DraftRequest(open=draft_pb2.DraftOpen()))
            await stream.write(proposing("abcabcab", 1))
            assert (await stream.read()).epoch == 1
            (tmp_path / "second.pem").replace(trusted)
            own = issue(second, tmp_path, "own")
            renewed = 0
            async with asyncio.timeout(60):
                while not renewed:  # until a call opens a connection with the new certificate
                    await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
                    renewed = len(channel._retired)  # type: ignore[attr-defined]
            await stream.write(proposing("abcabcab", 2))
            assert (await stream.read()).epoch == 2


def test_a_stream_of_the_synchronous_client_outlives_changes_of_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "_CHECK_SECONDS", 0.0)
    ca, going_on = tmp_path / "ca.pem", threading.Event()
    pair = issue(authority(ca), tmp_path, "server")

    class Waiting(bridge_pb2_grpc.BridgeServiceServicer):
        def Generate(  # noqa: N802
            self, request: bridge_pb2.GenerateRequest, context: Any
        ) -> Iterator[bridge_pb2.GenerateResponse]:
            yield bridge_pb2.GenerateResponse(started=bridge_pb2.GenerateStarted())
            going_on.wait(60)
            yield bridge_pb2.GenerateResponse(finished=bridge_pb2.GenerateFinished())

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(Waiting(), server)
        content = (pair.key.read_bytes(), pair.certificate.read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([content]))
        server.start()
        with Client(f"127.0.0.1:{port}", Credentials(ca=ca)) as client:
            events = client.stream("a prompt")
            next(events)
            for _ in range(2):
                authority(ca)
                with pytest.raises(CallError, match="CERTIFICATE_VERIFY_FAILED"):
                    client.status()
            going_on.set()
            assert isinstance(next(events), bridge_pb2.GenerateFinished)
        server.stop(None)


def proposing(text: str, epoch: int) -> draft_pb2.DraftRequest:
    ids = list(text.encode())
    return draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=epoch, token_ids=ids, credit=3))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "*:0"])
def test_other_machines_connect_only_to_a_secured_server(
    listen: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    authority(tmp_path / "ca.pem")
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    pair = issue(authority(tmp_path / "ca.pem"), tmp_path, "server")
    for options, words in (
        ((), "TLS (--tls-certificate and --tls-key) and clients' keys"),
        (pair.options, "needs clients' keys (--keys)"),
        (("--keys", str(keys)), "needs TLS"),
    ):
        with pytest.raises(ProcessFailed), suffix_server("--listen", listen, *options):
            pass
        assert words in " ".join(capfd.readouterr().err.split())


def test_insecure_warns(capfd: pytest.CaptureFixture[str]) -> None:
    with suffix_server("--listen", "0.0.0.0:0", "--insecure") as address:
        assert describe(f"127.0.0.1:{address.rpartition(':')[2]}", Credentials()).name == "suffix"
    assert "is open to everything that can reach it" in capfd.readouterr().err


def test_a_server_with_tls_and_keys_listens_everywhere(tmp_path: Path) -> None:
    ca, keys = tmp_path / "ca.pem", tmp_path / "keys.toml"
    pair = issue(authority(ca), tmp_path, "server")
    keys.write_text(KEYS)
    with suffix_server("--listen", "0.0.0.0:0", "--keys", str(keys), *pair.options) as address:
        port = address.rpartition(":")[2]
        assert describe(f"127.0.0.1:{port}", Credentials(ca=ca, token=ALICE)).name == "suffix"


@pytest.mark.parametrize("which", ["foreign key", "no PEM", "missing"])
def test_unusable_certificates_are_refused_at_the_start(
    which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    by = authority(tmp_path / "ca.pem")
    pair = issue(by, tmp_path, "server")
    if which == "foreign key":
        pair = Pair(pair.certificate, issue(by, tmp_path, "other").key)
    elif which == "no PEM":
        pair.certificate.write_text("no certificate")
    else:
        pair.key.unlink()
    with pytest.raises(ProcessFailed), suffix_server(*pair.options):
        pass
    assert ("must be a readable file" if which == "missing" else "give files that belong together") in " ".join(
        capfd.readouterr().err.split()
    )
