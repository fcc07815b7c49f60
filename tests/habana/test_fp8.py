"""Tests FP8 through the calls that optimum-habana's example makes to Intel Neural Compressor."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from habana_frameworks import observed

from bridge.errors import UnusableModel
from services.engines.engine import Row
from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
from tests.habana.fresh import in_two_ranks
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


def measuring(directory: Path) -> None:
    """Opens a model with a file that asks for measurements, and runs a prompt."""
    sys.path.insert(0, str(STANDIN))
    gaudi = GaudiOptions(bucket_size=64, use_hpu_graphs=False, quant_config=directory / "measure.json")
    engine = HabanaEngine(directory, device="cpu", dtype="float32", threads=1, slot_count=1, gaudi=gaudi)
    engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])
    assert engine.dtype == "float32"  # measured as it is, not in FP8


def test_each_process_of_a_model_writes_its_measurements(tmp_path: Path) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    statistics = tmp_path / "measured"
    (tmp_path / "measure.json").write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(statistics)}))
    in_two_ranks(measuring, tmp_path)
    assert len(json.loads((tmp_path / "measured_1.json").read_text())) > 10
