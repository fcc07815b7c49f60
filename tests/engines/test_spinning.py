"""How long threads of a forward wait for one another before they sleep, as OpenMP's library itself reports it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.processes import READY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")


def test_a_server_limits_them(tiny_models: tuple[Path, Path]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    arguments = ("serve", str(tiny_models[0]), "--threads", "2", "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
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
    # More than one OpenMP library may be loaded.
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", "".join(printed))) == {"10000"}


@pytest.mark.parametrize(("given", "used"), [({}, "5"), ({"GOMP_SPINCOUNT": "777"}, "777")])
def test_a_user_decides(given: dict[str, str], used: str) -> None:
    program = "from services.engines.spinning import limit_spinning as l; import os; l(9); l(5); print(os.environ)"
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert f"'GOMP_SPINCOUNT': '{used}'" in printed.stdout
