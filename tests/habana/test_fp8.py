"""Tests FP8 through the calls that optimum-habana's example makes to Intel Neural Compressor."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from habana_frameworks import observed

from bridge.errors import UnusableModel
from services.engines.engine import Row
from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
from tests.habana.fresh import in_fresh_process
from tests.habana.models import FAMILIES, opened
from tests.habana.oracle import Oracle
from tests.support.engine_contract import expected

STANDIN = Path(__file__).parent / "standin_fp8"


def test_weights_are_rounded_and_logits_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STANDIN)
    monkeypatch.setenv("QUANT_CONFIG", "")
    oracle = Oracle(FAMILIES["llama"], tmp_path)
    (tmp_path / "quantize.json").write_text('{"mode": "QUANTIZE"}')
    gaudi = GaudiOptions(bucket_size=64, quant_config=tmp_path / "quantize.json")
    engine = HabanaEngine(tmp_path, device="cpu", dtype="float32", threads=1, slot_count=1, gaudi=gaudi)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    reference = expected(oracle, [1, 2, 3, 4])
    oracle.close()
    assert engine.dtype == "fp8"
    assert 0 < np.linalg.norm(logits - reference) < 0.1 * np.linalg.norm(reference)
    # The environment first, then the model's constants.
    assert observed.inference_calls[-2:] == ["hpu_set_env", "hpu_initialize"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mode": "QUANTIZE"}', "needs Intel Neural Compressor"),
        ('{"mode": ', "cannot be read"),
        ('{"mode": "MEASURE", "dump_stats_path": "/proc/hqt_output/measure"}', "change dump_stats_path"),
    ],
    ids=["not installed", "not JSON", "not writable"],
)
def test_what_prevents_fp8_is_named_at_the_start(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STANDIN)
    if "Compressor" in words:
        monkeypatch.setitem(sys.modules, "neural_compressor.torch.quantization", None)
    monkeypatch.setenv("QUANT_CONFIG", "")
    Oracle(FAMILIES["llama"], tmp_path).close()
    (tmp_path / "fp8.json").write_text(text)
    with pytest.raises(UnusableModel, match=words):
        opened(tmp_path, quant_config=tmp_path / "fp8.json")


def measuring(directory: Path) -> str:
    """Returns the dtype of a model that is opened with a file that asks for measurements."""
    sys.path.insert(0, str(STANDIN))
    return opened(directory, use_hpu_graphs=False, quant_config=directory / "measure.json").dtype


def test_a_model_that_measures_does_not_compute_in_fp8(tmp_path: Path) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    measured = {"mode": "MEASURE", "dump_stats_path": str(tmp_path / "measured")}
    (tmp_path / "measure.json").write_text(json.dumps(measured))
    assert in_fresh_process(measuring, tmp_path) == "float32"


def test_each_process_of_a_model_writes_its_measurements(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    """With torch's launcher, as the guide starts and stops a service on several Gaudis."""
    measured = {"mode": "MEASURE", "dump_stats_path": str(tmp_path / "measured")}
    (tmp_path / "measure.json").write_text(json.dumps(measured))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "services.cli")
    options = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--slots", "2", "--no-use-hpu-graphs")
    serving = ("serve", str(tiny_models[0]), "--engine", "habana", "--role", "target", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        [sys.executable, *launcher, *serving, *options, "--quant-config", str(tmp_path / "measure.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        try:
            assert any(line.startswith("listening on") for line in process.stdout)
            process.terminate()
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for rank in range(2):
        assert len(json.loads((tmp_path / f"measured_{rank}.json").read_text())) > 10
