"""A model on two "Gaudis": two processes, through the calls that optimum-habana's example makes to DeepSpeed."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from habana_frameworks import observed
from transformers import AutoConfig

from bridge.errors import UnusableModel
from draftbridge import Client
from services.cli.processes import serve
from services.engines.engine import Row
from services.engines.habana import engine
from services.engines.habana.engine import HabanaEngine
from services.engines.habana.model import load_sharded, prepare_process
from services.engines.habana.ranks import Ranks
from services.engines.habana.spec import HABANA
from services.engines.spec import GaudiOptions
from tests.habana.fresh import free_port, in_fresh_process, in_two_ranks, place
from tests.habana.models import FAMILIES, fix_mistral, opened
from tests.habana.oracle import Oracle
from tests.habana.test_end_to_end import bridged
from tests.support.engine_contract import expected


def logits_of_rows(directory: Path, use_hpu_graphs: bool) -> list[np.ndarray]:
    """Runs a prompt, a copy, a rollback, and rows of two slots."""
    fix_mistral()
    gaudi = GaudiOptions(bucket_size=64, use_hpu_graphs=use_hpu_graphs)
    divided = HabanaEngine(directory, device="cpu", dtype="float32", threads=1, slot_count=2, gaudi=gaudi)
    recorded = observed.graph_count
    assert bool(recorded) == use_hpu_graphs
    first = divided.forward([Row(0, 0, tuple(range(1, 41)), 39)])
    divided.copy(0, 1, 20)
    found = first + divided.forward([Row(0, 30, (7, 8), 0), Row(1, 20, (9,), 0)])
    assert observed.graph_count == recorded
    return found


# Recording takes seconds, so it is done for one family whose sums optimum-habana arranges, and for one of the others.
@pytest.mark.parametrize(
    ("family", "graphs"), [*((family, False) for family in FAMILIES), ("llama", True), ("mistral", True)]
)
def test_two_processes_give_the_logits_of_one(family: str, graphs: bool, tmp_path: Path) -> None:
    oracle = Oracle(FAMILIES[family] | ({"num_hidden_layers": 1} if graphs else {}), tmp_path)
    # Must not be read: unpickling can run code.
    (tmp_path / "pytorch_model.bin").write_bytes(b"unsafe")
    first, one, other = in_two_ranks(logits_of_rows, tmp_path, graphs)
    ids = list(range(1, 41))
    np.testing.assert_allclose(first, expected(oracle, ids)[-1:], atol=1e-4)
    np.testing.assert_allclose(one, expected(oracle, [*ids[:30], 7, 8])[-2:], atol=1e-4)
    np.testing.assert_allclose(other, expected(oracle, [*ids[:20], 9])[-1:], atol=1e-4)
    oracle.close()


def refusal(directory: Path, without_deepspeed: bool = False) -> str:
    """Returns why a model is not loaded, in a process without others."""
    os.environ.update(place(0, 1, free_port()))
    if without_deepspeed:
        sys.modules["deepspeed"] = None  # type: ignore[assignment]
    prepare_process(GaudiOptions())
    with pytest.raises(UnusableModel) as raised:
        load_sharded(directory, AutoConfig.from_pretrained(directory), torch.float32, False)
    return str(raised.value)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_weights_that_could_run_code_are_refused(family: str, tmp_path: Path) -> None:
    Oracle(FAMILIES[family], tmp_path).close()
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "safetensors" in in_fresh_process(refusal, tmp_path)


def test_a_missing_deepspeed_is_named(tmp_path: Path) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    assert "need Intel's DeepSpeed" in in_fresh_process(refusal, tmp_path, without_deepspeed=True)


def test_a_rank_without_other_processes_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for count, follows in (("0", False), ("1", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", count)
        assert HABANA.follows() == follows


def test_a_follower_that_fails_does_not_blame_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    monkeypatch.setattr(engine, "rank", lambda: 1)
    monkeypatch.setattr(Ranks, "follow", lambda self, execute: execute(None))
    with pytest.raises(TypeError):
        opened(tmp_path, use_hpu_graphs=False)


def test_the_first_process_serves_and_ends_the_other(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    options = ("--engine", "habana", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--slots", "2")
    # One address for both processes, as in the environment that a launcher gives them.
    metrics = ("--metrics", f"127.0.0.1:{free_port()}")
    arguments = (str(tiny_models[0]), "--role", "target", *options, "--no-use-hpu-graphs", *metrics)
    for name, value in place(0, 2, port).items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        follower = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", *arguments, "--listen", "127.0.0.1:0"],
            env=os.environ | place(1, 2, port),
        )
        stack.callback(follower.kill)
        with serve(*arguments) as (target, _), bridged(target) as (bridge, _), Client(bridge) as client:
            first = client.generate("The quick brown fox", max_tokens=20).token_ids
            for number in (signal.SIGINT, signal.SIGTERM):  # as from Ctrl-C, which reaches all processes
                follower.send_signal(number)
            assert first and client.generate("The quick brown fox", max_tokens=20).token_ids == first
            assert follower.poll() is None
        assert follower.wait(60) == 0
