"""TLS, keys and limits of running servers, and of the clients that connect to them."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftbridge import AsyncClient, CallError, Client, Credentials
from draftbridge.security import open_channel
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.cli.processes import Fleet, ProcessFailed, launched, serve
from services.cli.servers import example_call
from services.config import BridgeServerConfig
from services.config_reading import load
from tests.support import warm
from tests.support.certificates import authority, issue
from tests.support.secure import ALICE, BOB, KEYS, MODEST, OLD, describe, suffix_server
from tests.support.unread import UNREAD, hold_unread
from tests.support.waiting import eventually

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
            "--listen", "127.0.0.1:0", "--until-stdin-closes", "--ngram-memory", "1", "--prompt-limit", "8",
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


def test_mutual_tls_needs_the_clients_certificate(secured: Secured) -> None:
    own = {"certificate": secured.directory / "bridge.pem", "key": secured.directory / "bridge.key"}
    assert describe(secured.target, Credentials(ca=secured.ca, token=ALICE, **own)).name == "tiny-target"
    with pytest.raises(grpc.RpcError) as caught:
        describe(secured.target, Credentials(ca=secured.ca, token=ALICE))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("token", "words"), [("", "has no token"), ("wrong-token-0123456789", "not known"), (OLD, "expired on 2020-01-01")]
)
def test_a_call_needs_a_valid_token(secured: Secured, token: str, words: str) -> None:
    error = failure(secured.client(token))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert words in str(error) and "token" in str(error)


def test_health_is_open_and_reflection_is_not(secured: Secured) -> None:
    with grpc.secure_channel(secured.bridge, grpc.ssl_channel_credentials(secured.ca.read_bytes())) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        wanted = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter([wanted]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ALICE}"),)
        answer = next(stub.ServerReflectionInfo(iter([wanted]), metadata=metadata, timeout=60))
        assert "draftbridge.v1.BridgeService" in {one.name for one in answer.list_services_response.service}


def retry_seconds(error: grpc.RpcError) -> float:
    """Returns the delay of the error's RetryInfo."""
    data = next(value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    for detail in status_pb2.Status.FromString(data).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    raise AssertionError("the status has no RetryInfo")


def test_concurrent_requests_are_limited_for_each_key(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_unread(monkeypatch)
    with secured.client(BOB) as bob, secured.client(ALICE) as alice:
        held = bob.stream(PROMPT, **UNREAD)
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
        (
            f'[a]\ntoken = "{ALICE}"\n[b]\ntoken-sha256 = "{sha256(ALICE.encode()).hexdigest()}"\n',
            r"line 3: \[b\] has the same token as \[a\]: give each key a token of its own",
        ),
        *(
            (f'[a]\ntoken = "{token}"\n', r"line 2: \[a\] token must be at least 16 printable ASCII .* without spaces")
            for token in ("short-secret", "a-secret with-a-space", "a-secret-with-a-line\\n", "секрет-secret-секрет")
        ),
        ('[a]\ntoken = ["a-secret-of-some-length"]\n', r"line 2: \[a\] token must be a valid string"),
        ('[a]\ntoken-sha256 = "ABC"\n', r"line 2: \[a\] token-sha256 must be 64 digits and letters from a to f"),
        ('\n[a]\ntokn = "a-secret-of-some-length"\n', r"line 3: \[a\] tokn: unknown setting: did you mean token\?"),
        ('[a]\ntoken_sha256 = "x"\n', r"line 2: \[a\] token_sha256: unknown .* did you mean token-sha256\?"),
        ('[a]\ntoken = "a-secret-of-some-length"\nlimit = 3\n', r"\[a\] limit: unknown .* are token, token-sha256"),
        (
            '[a]\ntoken = "a-secret-of-some-length"\nexpires = 2030-01-01T00:00:00\n',
            r"line 3: \[a\] expires must be a time with its zone, such as 2030-01-01T00:00:00Z",
        ),
        *(
            (
                f'[a]\ntoken = "a-secret-of-some-length"\nexpires = {time}\n',
                r"line 3: \[a\] expires must be a time with",
            )
            for time in ("20300101", "2030-01-01", '"2030-01-01T00:00:00Z"')
        ),
        *(
            (f'[a]\ntoken = "a-secret-of-some-length"\n{limit} = true\n', rf"\[a\] {limit} must be a valid integer")
            for limit in ("concurrent-requests", "tokens-per-minute")
        ),
        ('["a b"]\ntoken = "a-secret-of-some-length"\n', r"line 1: \[a b\] must be a name of 1 to 64 ASCII letters"),
        ('a = "a-secret-of-some-length"\n', r"line 1: \[a\] must be a table, as \[NAME\]"),
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
    return warm.run(*arguments, COLUMNS="200", **environment)


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


async def test_a_proxy_is_not_used_within_this_machine(tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    for credentials in (None, Credentials(token="a-token")):
        with Client(tiny_fleet.bridge, credentials) as client:
            assert client.models()
        async with AsyncClient(tiny_fleet.bridge, credentials) as client_of_loop:
            assert await client_of_loop.models()


def test_a_bridge_without_its_token_does_not_start(secured: Secured, capfd: pytest.CaptureFixture[str]) -> None:
    own = ("--service-certificate", secured.directory / "bridge.pem", "--service-key", secured.directory / "bridge.key")
    options = ("--target", secured.target, "--listen", "127.0.0.1:0", "--service-ca", secured.ca)
    with pytest.raises(ProcessFailed), launched("bridge", "bridge", *map(str, (*options, *own))):
        pass
    assert "refuses the token of the process that asks it" in " ".join(capfd.readouterr().err.split())
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


def test_calls_at_once_are_limited(tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_unread(monkeypatch)
    options = ("--target", tiny_fleet.target, "--listen", "127.0.0.1:0", "--until-stdin-closes", "--call-limit", "2")
    with launched("bridge", "bridge", *options) as (address, _), Client(address) as client:
        held = [client.stream(PROMPT, **UNREAD) for _ in range(2)]
        for one in held:
            next(one)
        with pytest.raises(CallError, match="already runs 2 calls") as caught:
            client.models()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        with grpc.insecure_channel(address) as channel:  # health is not counted
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
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
            tenants = client.status().ngram_memory.tenant_count
    assert tenants == 2


TLS = {"tls_certificate": "a.pem", "tls_key": "a.key"}


@pytest.mark.parametrize(
    ("listen", "settings", "server"),
    [
        ("127.0.0.1:1", {}, "127.0.0.1:1"),
        ("0.0.0.0:1", {"insecure": True}, "localhost:1"),
        ("[::]:1", TLS | {"keys": "keys.toml"}, "HOST:1 --ca CA.PEM --token-file FILE"),
        ("a:1", TLS | {"tls_client_ca": "ca.pem"}, "a:1 --ca CA.PEM --certificate CLIENT.PEM --key CLIENT.KEY"),
        ("127.0.0.1:1", {"keys": "keys.toml"}, "127.0.0.1:1 --token-file FILE"),
        ("a:1", {"keys": "keys.toml", "insecure": True}, "a:1 --token-file FILE --insecure"),
    ],
)
def test_the_call_that_up_proposes_has_what_its_bridge_asks_for(
    listen: str, settings: dict[str, object], server: str
) -> None:
    config = load(BridgeServerConfig, {"listen": listen, **settings}, environment={}).values
    assert example_call(config, listen) == f'draftbridge generate "Once upon a time" --server {server}'
