"""How long threads of a forward wait for one another before they sleep, as OpenMP's library itself reports it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.processes import READY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")


def spin_counts(model: Path, **settings: str) -> list[str]:
    """Starts a server with the torch engine. Returns the spin count of each OpenMP library that it loads."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    arguments = ("serve", str(model), "--threads", "2", "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **settings},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        assert server.stdin and server.stdout
        printed = []
        for line in server.stdout:
            printed.append(line)
            if line.startswith(READY):
                break
        server.stdin.close()
        server.stdout.read()
    assert printed and printed[-1].startswith(READY)
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", "".join(printed))


def test_a_server_limits_them(tiny_models: tuple[Path, Path]) -> None:
    assert set(spin_counts(tiny_models[0])) == {"10000"}


def test_a_user_decides(tiny_models: tuple[Path, Path]) -> None:
    assert set(spin_counts(tiny_models[0], GOMP_SPINCOUNT="777")) == {"777"}
