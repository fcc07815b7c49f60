"""`draftbridge health`, which containers use as their health check."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftbridge import CallError, Client
from services.cli.app import app
from services.cli.processes import launched
from tests.support.certificates import authority, issue
from tests.support.secure import KEYS, suffix_server


def health(*arguments: object) -> tuple[int, str]:
    """Returns the exit status of the command and what it printed."""
    result = CliRunner().invoke(app, ["health", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split()) or str(result.exception)


def test_a_server_that_can_serve(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with suffix_server("--keys", str(keys)) as address:
        assert health(address) == (0, "SERVING"), "without a token"
        assert health(address, "--service", "draftbridge.v1.DraftService") == (0, "SERVING")
        assert health(address, "--timeout", "inf") == health(address, "--timeout", "1e30") == (0, "SERVING")
        for option in ("--service", "--server-name"):
            assert f"{option} must be valid UTF-8" in health(address, option, "\udcff")[1]
        status, text = health(address, "--service", "draftbridge.v1.TargetService")
        assert status == 1 and "has no service" in text
    status, text = health(address, "--timeout", 0.5)
    assert status == 1 and "that a server is running there" in text, "it may be one of a model, too"


def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    """A probe inside a container connects to 127.0.0.1, which is not the name in the certificate."""
    ca = tmp_path / "ca.pem"
    pair = issue(authority(ca), tmp_path, "server", "target.example")
    with suffix_server(*pair.options) as address:
        assert health(address, "--timeout", 1)[0] == 1
        assert health(address, "--ca", ca, "--timeout", 1)[0] == 1
        assert health(address, "--ca", ca, "--server-name", "target.example") == (0, "SERVING")


def test_a_bridge_without_a_target_serves_guests_only() -> None:
    with (
        launched("bridge", "bridge", "--listen", "127.0.0.1:0", "--until-stdin-closes") as (address, _),
        Client(address) as client,
    ):
        assert health(address) == (0, "SERVING")
        with pytest.raises(CallError, match="start it with --target") as caught:
            client.generate("Once")
        assert caught.value.reason == "MODEL_NOT_FOUND"
