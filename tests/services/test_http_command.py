"""Tests `draftbridge http`, a door in a separate process, for a bridge that may be away or secured."""

import json
from pathlib import Path

import httpx2 as httpx

from draftbridge import Client
from services.cli.processes import Fleet, launched
from tests.support.certificates import authority, issue
from tests.support.doors import LONG, raw
from tests.support.ports import free_address
from tests.support.secure import ALICE, KEYS
from tests.support.waiting import eventually, held

OPTIONS = ("--listen", "127.0.0.1:0", "--until-stdin-closes")
BODY = {"prompt": "The quick brown", "max_tokens": 8, "temperature": 0}


def test_a_secured_bridge_that_starts_later(tiny_fleet: Fleet, tmp_path: Path) -> None:
    ca, keys, token = tmp_path / "ca.pem", tmp_path / "keys.toml", tmp_path / "token"
    pair = issue(authority(ca), tmp_path, "bridge")
    keys.write_text(KEYS)
    token.write_text("not-the-token-0123456789")
    bridge = ("bridge", "--target", tiny_fleet.target, "--keys", str(keys), *pair.options, *OPTIONS)
    with launched("bridge", *bridge, "--listen", free_address()) as (address, _):
        pass
    shown = ("--bridge-ca", str(ca), "--bridge-token-file", str(token))
    metrics = ("--metrics", "127.0.0.1:0")
    with launched("http", "http", "--bridge", address, *shown, *metrics, *OPTIONS) as (url, _):
        away = httpx.post(f"{url}/v1/completions", json=BODY)
        assert away.status_code == 503 and address in away.json()["error"]["message"]
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["services"][0]["address"] == address
        with launched("bridge", *bridge, "--listen", address):
            # A wrong token of the door is not reported as a fault of its client either.
            eventually(lambda: "--bridge-token-file" in httpx.get(f"{url}/health").json()["services"][0]["problem"])
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 503
            token.write_text(ALICE)
            eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
            answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
            expected = httpx.post(f"{tiny_fleet.http}/v1/completions", json=BODY, timeout=60).json()
            assert answer["choices"] == expected["choices"]
            assert 'http_route="/v1/completions"' in httpx.get(f"{url}/metrics").text


def test_a_prompt_that_is_too_large_for_a_message_to_the_bridge_is_not_to_be_sent_again(tiny_fleet: Fleet) -> None:
    bridge = ("bridge", "--target", tiny_fleet.target, "--message-limit", "1", *OPTIONS)
    with (
        launched("bridge", *bridge) as (address, _),
        launched("http", "http", "--bridge", address, "--body", "4", *OPTIONS) as (url, _),
    ):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * (2 << 20)}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt") and "--message-limit" in error["message"]


def test_a_client_that_leaves_frees_its_sequences_on_the_bridge(tiny_fleet: Fleet, client: Client) -> None:
    long = json.dumps(LONG | {"n": 2, "stream": True}).encode()
    with launched("http", "http", "--bridge", tiny_fleet.bridge, "--grace", "1", *OPTIONS) as (url, process):
        before = client.status().cancelled_count
        with held(tiny_fleet.processes["target"].pid):  # so that no request ends by itself
            connection = raw(url, long)
            eventually(lambda: client.status().active_count == 2)
            connection.close()
            eventually(lambda: client.status().cancelled_count == before + 2)
        # Stopping the door cancels requests, too, and ends in time.
        connection = raw(url, long)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert process.wait(60) == 0
        connection.close()
        eventually(lambda: client.status().active_count == 0)


def test_its_own_keys_hold(tiny_fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with launched("http", "http", "--bridge", tiny_fleet.bridge, "--keys", str(keys), *OPTIONS) as (url, _):
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 401
        assert httpx.get(f"{url}/metrics").status_code == 401
        bearer = {"Authorization": f"Bearer {ALICE}"}
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=bearer, timeout=60).status_code == 200
