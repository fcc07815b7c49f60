"""A model on two "Gaudis": two processes, through the calls that optimum-habana's example makes to DeepSpeed."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from draftbridge import Client
from services.cli.processes import serve
from tests.habana.models import FAMILIES
from tests.habana.oracle import Oracle
from tests.habana.test_end_to_end import bridged
from tests.support.engine_contract import expected


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("family", ["llama", "mistral"])  # loaded without weights first, and with them
def test_two_processes_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    oracle = Oracle(FAMILIES[family], tmp_path)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.habana.sharded_process", str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [error[-2000:] for _, error in outputs]
    first, one, other = (np.array(table) for table in json.loads(outputs[0][0].splitlines()[-1]))
    ids = list(range(1, 41))
    np.testing.assert_allclose(first, expected(oracle, ids)[-1:], atol=1e-4)
    np.testing.assert_allclose(one, expected(oracle, [*ids[:30], 7, 8])[-2:], atol=1e-4)
    np.testing.assert_allclose(other, expected(oracle, [*ids[:20], 9])[-1:], atol=1e-4)
    oracle.close()


def test_the_first_process_serves_and_ends_the_other(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    options = ("--engine", "habana", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--slots", "2")
    arguments = (str(tiny_models[0]), "--role", "target", *options, "--no-use-hpu-graphs")
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    with ExitStack() as stack:
        follower = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", *arguments, "--listen", "127.0.0.1:0"],
            env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"},
        )
        stack.callback(follower.kill)
        with serve(*arguments) as (target, _), bridged(target) as (bridge, _), Client(bridge) as client:
            assert client.generate("The quick brown fox", max_tokens=20).token_ids
            assert follower.poll() is None
        assert follower.wait(60) == 0
