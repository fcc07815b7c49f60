"""Tests FP8 through the calls that optimum-habana's example makes to Intel Neural Compressor."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from habana_frameworks import observed

from services.engines.engine import Row
from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
from tests.habana.models import FAMILIES
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


def test_measurements_are_written_when_the_process_ends(tmp_path: Path) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    (tmp_path / "measure.json").write_text('{"mode": "MEASURE"}')
    script = f"""
import atexit, sys
sys.path.insert(0, {str(STANDIN)!r})
from pathlib import Path
from neural_compressor.torch import quantization
atexit.register(lambda: print("measured", len(quantization.measured) > 100, len(quantization.finalized)))
from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
path = Path({str(tmp_path)!r})
gaudi = GaudiOptions(bucket_size=64, use_hpu_graphs=False, quant_config=path / "measure.json")
HabanaEngine(path, device="cpu", dtype="float32", threads=1, slot_count=1, gaudi=gaudi)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["measured True 1"], done.stderr
