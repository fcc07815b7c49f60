"""The HTTP door with keys and TLS: the same clients, limits and rules as at the gRPC door."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from draftbridge import CallError, Client
from draftbridge.security import Credentials
from services.cli.processes import Fleet, launched
from tests.support.certificates import Pair, admitted_around, authority, issue
from tests.support.doors import door
from tests.support.waiting import held

TOKENS = {"ann": "a" * 32, "bob": "b" * 32, "cid": "d" * 32}
BODY = {"model": "tiny-target", "prompt": "The quick brown", "max_tokens": 20}


@pytest.fixture(scope="module")
def secured(tiny_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """Addresses of both doors of a bridge with keys and TLS, and its authority."""
    directory = tmp_path_factory.mktemp("secured")
    ca = directory / "ca.pem"
    pair = issue(authority(ca), directory, "bridge")
    keys = directory / "keys.toml"
    keys.write_text(
        f'[ann]\ntoken = "{TOKENS["ann"]}"\n[bob]\ntoken = "{TOKENS["bob"]}"\ntokens-per-minute = 10\n'
        f'[cid]\ntoken = "{TOKENS["cid"]}"\nconcurrent-requests = 2\n'
    )
    options = (
        "--target",
        tiny_fleet.target,
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--until-stdin-closes",
    )
    with ExitStack() as stack:
        started, _ = stack.enter_context(launched("bridge", "bridge", *options, "--keys", str(keys), *pair.options))
        grpc_address, _, url = started.partition(" and ")
        yield grpc_address, url, ca


def client(secured: tuple[str, str, Path], name: str | None, receive_bytes: int | None = None) -> httpx.Client:
    _, url, ca = secured
    headers = {"Authorization": f"Bearer {TOKENS.get(name, name)}"} if name else {}
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)] if receive_bytes else None
    context = ssl.create_default_context(cafile=str(ca))
    transport = httpx.HTTPTransport(verify=context, socket_options=options)
    return httpx.Client(base_url=url, headers=headers, transport=transport, timeout=60)


def broken(http: httpx.Client) -> list[httpx.Response]:
    """Returns the answers to a body that is not JSON."""
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/segmentations")
    return [http.post(path, content=b"{", headers={"content-type": "application/json"}) for path in paths]


def test_a_token_opens_it_over_tls(secured: tuple[str, str, Path]) -> None:
    assert secured[1].startswith("https://")
    with client(secured, "ann") as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny-target"
        assert http.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] > 0
        metrics = http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        odd = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=abc"})
        assert odd.headers["content-type"].startswith("text/plain")
        counted = 'http_request_method="POST",http_response_status_code="200",http_route="/v1/completions"'
        assert f"draftbridge_http_server_request_duration_seconds_count{{{counted}}} 1.0" in metrics.text
        # The first internal error is an increase only of a series that exists before.
        assert f"_count{{{counted.replace('200', '500')}}} 0.0" in metrics.text


@pytest.mark.parametrize("name", [None, "c" * 32])
def test_without_a_known_token_it_generates_and_lists_nothing(secured: tuple[str, str, Path], name: str | None) -> None:
    with client(secured, name) as http:
        for response in (
            http.get("/v1/models"),
            http.get("/v1/models/tiny-target"),
            http.get("/metrics"),
            http.post("/v1/completions", json=BODY),
            http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
        ):
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert "tiny-target" not in response.text
        assert http.get("/health").json() == {"status": "ok"}
    with client(secured, "ann") as http:
        assert http.get("/health").json()["services"]


def test_a_key_has_one_limit_for_both_doors(secured: tuple[str, str, Path]) -> None:
    grpc_address, _, ca = secured
    with client(secured, "bob") as http:
        assert http.post("/v1/completions", json=BODY | {"ignore_eos": True}).status_code == 200
        refused = http.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "10 tokens a minute" in refused.json()["error"]["message"]
        assert [answer.status_code for answer in broken(http)] == [429, 429, 400], "the body is not even parsed"
        segmented = http.post("/v1/segmentations", json={"text": "a", "models": ["tiny-target"]})
        assert segmented.status_code == 200, "it needs no tokens"
    with (
        Client(grpc_address, Credentials(ca=ca, token=TOKENS["bob"])) as talking,
        pytest.raises(CallError, match="10 tokens a minute"),
    ):
        talking.generate("The quick", max_tokens=2)


def test_each_choice_counts_as_a_request_of_the_key(tiny_fleet: Fleet, secured: tuple[str, str, Path]) -> None:
    # More text than a small connection holds, so that both go on as long as nobody reads it.
    several = BODY | {"n": 2, "max_tokens": 230, "ignore_eos": True, "stream": True, "logprobs": 100}
    with client(secured, "cid") as http, client(secured, "cid", 4096) as reader:
        assert all(answer.status_code == 400 for answer in broken(http))
        never = http.post("/v1/completions", json=BODY | {"n": 3})
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"
        target = tiny_fleet.processes["target"]
        with reader.stream("POST", "/v1/completions", json=several) as running, held(target.pid):
            assert running.status_code == 200
            for path, body in (
                ("/v1/completions", BODY),
                ("/v1/segmentations", {"text": "a", "models": ["tiny-target"]}),
            ):
                beyond = http.post(path, json=body)
                assert beyond.status_code == 429 and "2 concurrent requests" in beyond.json()["error"]["message"]
            assert all(answer.status_code == 429 for answer in broken(http)), "the body is not even parsed"


def test_a_client_that_does_not_trust_the_authority_does_not_connect(secured: tuple[str, str, Path]) -> None:
    with httpx.Client(base_url=secured[1], timeout=60) as http, pytest.raises(httpx.ConnectError):
        http.get("/health")


def test_it_does_not_listen_beyond_this_machine_without_both(tiny_fleet: Fleet) -> None:
    from tests.services.test_cli import command, refused

    options = ("--target", tiny_fleet.target, "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0")
    assert "--insecure" in refused(command("bridge", *options))


def accepted_with(url: str, context: ssl.SSLContext) -> bool:
    """Returns whether the server and a client with this context trust each other in a new connection."""
    try:
        with httpx.Client(base_url=url, verify=context, timeout=60) as http:
            return http.get("/v1/models").status_code == 200
    except httpx.TransportError:
        return False


def trusting(ca: Path, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if own:
        context.load_cert_chain(own.certificate, own.key)
    return context


async def test_it_takes_over_a_changed_certificate(
    tiny_fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old.pem", tmp_path / "new.pem"
    first, second = authority(old), authority(new)
    pair = issue(first, tmp_path, "server")
    async with door(tiny_fleet, tls_certificate=pair.certificate, tls_key=pair.key) as (url, _):

        def trusted() -> list[bool]:
            return [accepted_with(url, trusting(ca)) for ca in (old, new)]

        assert await asyncio.to_thread(trusted) == [True, False]
        replaced = issue(second, tmp_path, "replaced")
        replaced.key.replace(pair.key)  # as between two writes: the key is not that of the certificate
        assert await asyncio.to_thread(trusted) == [True, False]
        assert "the previous certificate stays in use" in caplog.text
        replaced.certificate.replace(pair.certificate)
        assert await asyncio.to_thread(trusted) == [False, True]


async def test_it_takes_over_changed_authorities_of_clients(tiny_fleet: Fleet, tmp_path: Path) -> None:
    ca, clients, others = (tmp_path / name for name in ("ca.pem", "clients.pem", "others.pem"))
    first, second = authority(clients), authority(others)
    pair, own, other = (
        issue(authority(ca), tmp_path, "server"),
        issue(first, tmp_path, "own"),
        issue(second, tmp_path, "b"),
    )
    options = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": clients}
    async with door(tiny_fleet, **options) as (url, _):

        def accepted() -> list[bool]:
            return [accepted_with(url, trusting(ca, one)) for one in (own, other, None)]

        assert await asyncio.to_thread(accepted) == [True, False, False]
        others.replace(clients)
        assert await asyncio.to_thread(accepted) == [False, True, False]


# TLS 1.2 is refused, because its sessions could be resumed.
@pytest.mark.parametrize(("version", "admitted"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
async def test_a_client_cannot_resume_a_session_after_its_authority_was_removed(
    tiny_fleet: Fleet, tmp_path: Path, version: ssl.TLSVersion, admitted: bool
) -> None:
    ca, clients, others = (tmp_path / name for name in ("ca.pem", "clients.pem", "others.pem"))
    pair, own = issue(authority(ca), tmp_path, "server"), issue(authority(clients), tmp_path, "own")
    authority(others)
    context = trusting(ca, own)
    context.maximum_version = version
    options = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": clients}
    async with door(tiny_fleet, **options) as (url, _):
        found = await asyncio.to_thread(admitted_around, lambda: others.replace(clients), url, context)
    assert found == [admitted, False]
