"""Runs the commands that the documentation gives for certificates."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.commands import ROOT


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_of_the_documentation_pass_the_strict_checks_of_newer_pythons(tmp_path: Path) -> None:
    (script, *_) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/guides/security.md").read_text(), flags=re.S | re.M)
    options = {"cwd": tmp_path, "env": {"PATH": os.environ["PATH"]}, "text": True, "timeout": 200}
    subprocess.run(["sh", "-ec", script], check=True, capture_output=True, **options)
    servers = {path.name for path in tmp_path.glob("*.pem")} - {"ca.pem"}
    assert servers == {"gpu-host.pem", "cpu-host.pem"}
    # As `ssl.create_default_context` of Python 3.13 does.
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.pem", *sorted(servers)]
    done = subprocess.run(verify, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stderr
