"""Runs the commands that the documentation gives for certificates."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.commands import ROOT

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
(SCRIPT, *_) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/guides/security.md").read_text(), flags=re.S | re.M)


def run(directory: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        command, capture_output=True, check=False, cwd=directory, env=environment, text=True, timeout=200
    )


def test_certificates_of_the_documentation_pass_the_strict_checks_of_newer_pythons(tmp_path: Path) -> None:
    made = run(tmp_path, "sh", "-ec", SCRIPT)
    assert made.returncode == 0, made.stderr
    servers = {path.name for path in tmp_path.glob("*.pem")} - {"ca.pem"}
    assert servers == {"gpu-host.pem", "cpu-host.pem"}
    # As `ssl.create_default_context` of Python 3.13 does.
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.pem", *sorted(servers)]
    done = run(tmp_path, *verify)
    assert done.returncode == 0, done.stderr


def test_the_certificate_of_kubernetes_is_valid_for_commands_in_its_pods(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (certificate all .*)$", (ROOT / "deploy/README.md").read_text(), flags=re.M)
    functions = SCRIPT[: SCRIPT.index("certificate gpu-host")]
    made = run(tmp_path, "sh", "-ec", f"{functions}\n{command}")
    assert made.returncode == 0, made.stderr
    for name in (
        "-verify_hostname bridge",
        "-verify_hostname target",
        "-verify_hostname draft",
        "-verify_ip 127.0.0.1",
    ):
        done = run(tmp_path, "openssl", "verify", "-CAfile", "ca.pem", *name.split(), "all.pem")
        assert done.returncode == 0, done.stderr
