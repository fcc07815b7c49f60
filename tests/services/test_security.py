"""TLS, keys and limits of running servers, and of the clients that connect to them."""

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftbridge import AsyncClient, CallError, Client, Credentials
from draftbridge.security import open_aio_channel, open_channel
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc
from services.cli.processes import Fleet, ProcessFailed, launched, serve
from tests.support.certificates import Pair, authority, issue
from tests.support.waiting import eventually

ALICE, BOB, OLD, MODEST = (f"{name}-token-0123456789" for name in ("alice", "bob", "old", "modest"))
KEYS = f"""
[alice]
token = "{ALICE}"

[bob]
token-sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
concurrent-requests = 1

[old]
token = "{OLD}"
expires = 2020-01-01T00:00:00Z

[modest]
token = "{MODEST}"
tokens-per-minute = 10
"""
PROMPT = "The quick brown fox"


@dataclass(frozen=True)
class Secured:
    """A target and a bridge with TLS and keys; the target also asks for a certificate."""

    bridge: str
    target: str
    directory: Path
    ca: Path

    def client(self, token: str = ALICE) -> Client:
        return Client(self.bridge, Credentials(ca=self.ca, token=token))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path]) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    ca = directory / "ca.pem"
    by = authority(ca)
    server, own = issue(by, directory, "server"), issue(by, directory, "bridge")
    keys, token = directory / "keys.toml", directory / "token"
    keys.write_text(KEYS)
    token.write_text(f"{ALICE}\n")
    tls = (*server.options, "--keys", str(keys))
    service = ("--service-ca", ca, "--service-certificate", own.certificate, "--service-key", own.key)
    with (
        serve(
            str(tiny_models[0]), "--dtype", "float32", "--threads", "1", "--role", "target", *tls,
            "--tls-client-ca", str(ca),
        ) as (target, _),
        launched(
            "bridge", "bridge", "--target", target, *map(str, service), "--service-token-file", str(token), *tls,
            "--listen", "127.0.0.1:0", "--until-stdin-closes", "--suffix-memory", "1", "--prompt-limit", "8",
        ) as (bridge, _),
    ):  # fmt: skip
        yield Secured(bridge, target, directory, ca)


def failure(client: Client) -> CallError:
    with client, pytest.raises(CallError) as caught:
        client.generate(PROMPT, max_tokens=4)
    return caught.value


async def test_the_text_is_the_same_with_tls_and_keys(secured: Secured, tiny_fleet: Fleet) -> None:
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with Client(tiny_fleet.bridge) as plain, secured.client() as client:
        expected = plain.generate(PROMPT, **options).token_ids
        assert client.generate(PROMPT, **options).token_ids == expected
    async with AsyncClient(secured.bridge, Credentials(ca=secured.ca, token=BOB)) as asynchronous:
        assert (await asynchronous.generate(PROMPT, **options)).token_ids == expected
        assert [one.role for one in await asynchronous.models()] == [model_pb2.ROLE_TARGET]


def test_an_unknown_authority_is_refused(secured: Secured, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    authority(other)
    error = failure(Client(secured.bridge, Credentials(ca=other, token=ALICE)))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "TLS_FAILED")
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)


def test_a_client_without_tls_is_told_to_use_it(secured: Secured) -> None:
    error = failure(Client(secured.bridge))
    assert error.reason == "SERVICE_UNREACHABLE"
    assert "TLS" in str(error)


def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    pair = issue(authority(ca), tmp_path, "server", "elsewhere.example")
    with suffix_server(*pair.options) as address:
        error = failure(Client(address, Credentials(ca=ca)))
    assert error.reason == "TLS_FAILED" and "Hostname Verification Check failed" in str(error)


def describe(address: str, credentials: Credentials) -> model_pb2.Model:
    with open_channel(address, credentials, ()) as channel:
        return model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=10).model


def test_mutual_tls_needs_the_clients_certificate(secured: Secured) -> None:
    own = {"certificate": secured.directory / "bridge.pem", "key": secured.directory / "bridge.key"}
    assert describe(secured.target, Credentials(ca=secured.ca, token=ALICE, **own)).name == "tiny-target"
    with pytest.raises(grpc.RpcError) as caught:
        describe(secured.target, Credentials(ca=secured.ca, token=ALICE))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.contextmanager
def suffix_server(*options: str) -> Iterator[str]:
    """Runs a model server that starts fast."""
    with serve("suffix", "--role", "draft", *options) as (address, _):
        yield address


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


def test_a_client_takes_over_a_changed_certificate(tmp_path: Path) -> None:
    ca, trusted = tmp_path / "ca.pem", tmp_path / "trusted.pem"
    by, first, second = authority(ca), authority(trusted), authority(tmp_path / "second.pem")
    own = issue(first, tmp_path, "own")
    options = (*issue(by, tmp_path, "server").options, "--tls-client-ca", str(trusted))
    credentials = Credentials(ca=ca, certificate=own.certificate, key=own.key)
    with contextlib.ExitStack() as stack:
        with suffix_server(*options) as address:
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
            async with asyncio.timeout(20):
                while not renewed:  # until a call has a connection of its own with the new certificate
                    await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
                    renewed = len(channel._retired)  # type: ignore[attr-defined]
            await stream.write(proposing("abcabcab", 2))
            assert (await stream.read()).epoch == 2


def proposing(text: str, epoch: int) -> draft_pb2.DraftRequest:
    ids = list(text.encode())
    return draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(epoch=epoch, token_ids=ids, credit=3))


@pytest.mark.parametrize(
    ("token", "words"), [("", "has no token"), ("wrong-token-0123456789", "not known"), (OLD, "expired on 2020-01-01")]
)
def test_a_call_needs_a_valid_token(secured: Secured, token: str, words: str) -> None:
    error = failure(secured.client(token))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert words in str(error) and "token" in str(error)


def test_health_is_open_and_reflection_is_not(secured: Secured) -> None:
    with grpc.secure_channel(secured.bridge, grpc.ssl_channel_credentials(secured.ca.read_bytes())) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        wanted = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter([wanted]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ALICE}"),)
        answer = next(stub.ServerReflectionInfo(iter([wanted]), metadata=metadata, timeout=10))
        assert "draftbridge.v1.BridgeService" in {one.name for one in answer.list_services_response.service}


def retry_seconds(error: grpc.RpcError) -> float:
    """Returns the delay of the error's RetryInfo."""
    data = next(value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    for detail in status_pb2.Status.FromString(data).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    raise AssertionError("the status has no RetryInfo")


def test_concurrent_requests_are_limited_for_each_key(secured: Secured) -> None:
    with secured.client(BOB) as bob, secured.client(ALICE) as alice:
        held = bob.stream(PROMPT, max_tokens=200, ignore_eos=True)
        next(held)
        with pytest.raises(CallError, match="bob has reached its limit of 1 concurrent requests") as caught:
            bob.generate(PROMPT, max_tokens=1)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KEY_LIMIT_REACHED")
        assert bob.status().active_count == 1  # calls that generate nothing do not count
        assert alice.generate(PROMPT, max_tokens=1).token_ids
        held.close()

        def free() -> bool:
            with contextlib.suppress(CallError):
                return bool(bob.generate(PROMPT, max_tokens=1).token_ids)
            return False

        eventually(free)


def test_generated_tokens_are_limited_for_each_key(secured: Secured) -> None:
    with secured.client(MODEST) as modest, secured.client(ALICE) as alice:
        assert len(modest.generate(PROMPT, max_tokens=30, ignore_eos=True).token_ids) == 30  # 20 more than it has left
        credentials = Credentials(ca=secured.ca, token=MODEST)
        with open_channel(secured.bridge, credentials, ()) as channel:
            call = bridge_pb2_grpc.BridgeServiceStub(channel).Generate(bridge_pb2.GenerateRequest(prompt=PROMPT))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 60 < retry_seconds(caught.value) <= 126  # 21 tokens at 10 a minute
        assert alice.generate(PROMPT, max_tokens=30).token_ids


def test_a_changed_keys_file_is_used_and_an_invalid_one_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    def accepted(token: str) -> bool:
        try:
            return describe(address, Credentials(token=token)).name == "suffix"
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

    with suffix_server("--keys", str(keys)) as address:
        assert accepted(ALICE) and not accepted("carol-token-0123456789")
        keys.write_text('[carol]\ntoken = "carol-token-0123456789"\n')
        eventually(lambda: accepted("carol-token-0123456789"))
        assert not accepted(ALICE)
        keys.write_text("[broken")
        logged = ""

        def kept() -> bool:
            nonlocal logged
            assert accepted("carol-token-0123456789")
            logged += capfd.readouterr().err
            return "the previous keys stay in use" in logged

        eventually(kept)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("[a]\n", "give either token or token-sha256"),
        ('[a]\ntoken = "short-secret"\n', "a.token: "),
        ('[a]\ntoken = "a-secret-of-some-length"\nlimit = 3\n', "a.limit: Extra inputs"),
        ('[a]\ntoken = "a-secret-of-some-length"\nexpires = 2030-01-01T00:00:00\n', "a.expires: "),
        ('["a b"]\ntoken = "a-secret-of-some-length"\n', "a b"),
    ],
)
def test_an_invalid_keys_file_is_refused_without_showing_tokens(tmp_path: Path, text: str, words: str) -> None:
    from services.config import InvalidConfiguration
    from services.rpc.keys import Keys

    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration, match=words) as caught:
        Keys(path)
    assert "secret" not in str(caught.value)


def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"COLUMNS": "200"} | environment,
    )  # fmt: skip


def test_commands_connect_with_tls_and_a_token(secured: Secured) -> None:
    token = str(secured.directory / "token")
    options = ("--server", secured.bridge, "--ca", str(secured.ca), "--token-file", token)
    with secured.client() as client:
        expected = client.generate(PROMPT, max_tokens=8).text
    done = command("generate", PROMPT, "--max-tokens", "8", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected.split()
    assert "tiny-target" in command("models", *options).stdout
    words = command("translate", "fox", "--from", "tiny-target", "--to", "tiny-target", "--json", *options)
    assert words.returncode == 0, words.stderr
    settings = {"DRAFTBRIDGE_CLIENT_CA": str(secured.ca), "DRAFTBRIDGE_CLIENT_TOKEN_FILE": token}
    assert "tiny-target" in command("models", "--server", secured.bridge, **settings).stdout
    refused = command("models", "--server", secured.bridge, "--ca", str(secured.ca))
    assert refused.returncode == 1 and "has no token" in refused.stderr


def test_a_token_does_not_leave_the_machine_unencrypted() -> None:
    with pytest.raises(CallError, match="unencrypted: use TLS") as caught:
        Client("bridge.example:50050", Credentials(token=ALICE))
    assert caught.value.reason == "INVALID_CREDENTIALS"
    Client("bridge.example:50050", Credentials(token=ALICE, insecure=True)).close()
    Client("[::1]:50050", Credentials(token=ALICE)).close()
    assert ALICE not in repr(Credentials(token=ALICE))


def test_a_bridge_without_its_token_does_not_start(secured: Secured, capfd: pytest.CaptureFixture[str]) -> None:
    own = ("--service-certificate", secured.directory / "bridge.pem", "--service-key", secured.directory / "bridge.key")
    options = ("--target", secured.target, "--listen", "127.0.0.1:0", "--service-ca", secured.ca)
    with pytest.raises(ProcessFailed), launched("bridge", "bridge", *map(str, (*options, *own))):
        pass
    assert "refuses the bridge's token" in " ".join(capfd.readouterr().err.split())
    with (
        pytest.raises(ProcessFailed),
        launched("bridge", "bridge", *map(str, options), "--connect-timeout", "1"),
    ):
        pass
    assert "no usable service answers" in " ".join(capfd.readouterr().err.split())
    other = secured.directory / "other.pem"
    authority(other)
    options = ("--target", secured.target, "--listen", "127.0.0.1:0", "--service-ca", other)
    with (
        pytest.raises(ProcessFailed),
        launched("bridge", "bridge", *map(str, options), "--connect-timeout", "1"),
    ):
        pass
    assert "CERTIFICATE_VERIFY_FAILED" in capfd.readouterr().err


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
    assert ("cannot be read" if which == "missing" else "give files that belong together") in " ".join(
        capfd.readouterr().err.split()
    )


def test_what_a_call_may_carry_is_limited(secured: Secured) -> None:
    with secured.client() as client:
        with pytest.raises(CallError, match="the prompt must be at most 8192 bytes") as caught:
            client.generate("x" * 8193, max_tokens=1)
        assert caught.value.reason == "INVALID_FIELD"
        with pytest.raises(CallError, match="at most 8192 bytes"):
            client.generate(messages=[{"role": "user", "content": "x", "name": "y" * 8193}], max_tokens=1)
        with pytest.raises(CallError, match="at most 8192 bytes"):
            client.translate("x" * 8193, source="tiny-target", target="tiny-target")
        with pytest.raises(CallError) as caught:
            client.generate("x" * (17 << 20), max_tokens=1)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with open_channel(secured.bridge, Credentials(ca=secured.ca, token=ALICE), ()) as channel:
        stub = bridge_pb2_grpc.BridgeServiceStub(channel)
        stub.ListModels(bridge_pb2.ListModelsRequest(), metadata=(("x-filler", "x" * (8 << 10)),))
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(bridge_pb2.ListModelsRequest(), metadata=(("x-filler", "x" * (17 << 10)),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_at_once_are_limited(tiny_fleet: Fleet) -> None:
    options = ("--target", tiny_fleet.target, "--listen", "127.0.0.1:0", "--until-stdin-closes", "--call-limit", "2")
    with launched("bridge", "bridge", *options) as (address, _), Client(address) as client:
        held = [client.stream(PROMPT, max_tokens=200, ignore_eos=True) for _ in range(2)]
        for one in held:
            next(one)
        with pytest.raises(CallError, match="already runs 2 calls") as caught:
            client.models()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        with grpc.insecure_channel(address) as channel:  # health is not counted
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        for one in held:
            one.close()
        eventually(lambda: lists(client))


def lists(client: Client) -> bool:
    with contextlib.suppress(CallError):
        return bool(client.models())
    return False


def test_keys_do_not_share_tenants(secured: Secured) -> None:
    for token in (ALICE, BOB):
        with secured.client(token) as client:
            client.generate(PROMPT, max_tokens=8, ignore_eos=True, tenant="same")
            tenants = client.status().suffix_memory.tenant_count
    assert tenants == 2


MARKER = "xyzzy7391"


def test_nothing_that_clients_send_is_logged(tiny_models: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.support.debug_cli"
    common = ("--listen", "127.0.0.1:0", "--until-stdin-closes")
    options = (*common, "--dtype", "float32", "--threads", "1")
    with contextlib.ExitStack() as stack:
        target, draft = (
            stack.enter_context(launched(role, "serve", str(path), "--role", role, *options, module=module))[0]
            for role, path in zip(("target", "draft"), tiny_models, strict=True)
        )
        models = ("--target", target, "--draft", draft, "--suffix-memory", "1")
        address, _ = stack.enter_context(launched("bridge", "bridge", *models, *common, module=module))
        client = stack.enter_context(Client(address, Credentials(token=f"{MARKER}-token")))
        said = {"max_tokens": 8, "stop": [MARKER], "tenant": MARKER}
        assert client.generate(f"{PROMPT} {MARKER}", **said).token_ids
        client.generate(messages=[{"role": "user", "content": MARKER, "name": MARKER}], **said)
        client.translate(MARKER, source="tiny-target", target="tiny-draft")
        for wrong in ({"target": MARKER}, {"draft": MARKER}, {"sources": [MARKER]}, {"max_tokens": 2**31}):
            with pytest.raises(CallError):
                client.generate(MARKER, **said | wrong)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(f"/draftbridge.v1.BridgeService/{MARKER}")(MARKER.encode())
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/draftbridge.v1.ModelService/GetModel")(b"\xff" + MARKER.encode())
    logged = capfd.readouterr().err
    assert "DEBUG asyncio" in logged  # the level is DEBUG
    assert MARKER not in logged


def test_tracebacks_leave_out_what_an_exception_says() -> None:
    import logging

    from services.discreet import DiscreetFormatter

    try:
        try:
            raise KeyError(MARKER)
        except KeyError as error:
            raise ValueError(f"no {MARKER}") from error
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    text = DiscreetFormatter("%(message)s").format(record)
    assert MARKER not in text.replace("raise KeyError(MARKER)", "")
    assert "KeyError" in text and "ValueError" in text and "test_security.py" in text
    record = logging.LogRecord(
        "asyncio", logging.ERROR, "", 1, f"never retrieved\nfuture: {MARKER}", (), record.exc_info
    )
    assert f"future: {MARKER}" not in DiscreetFormatter("%(message)s").format(record)
