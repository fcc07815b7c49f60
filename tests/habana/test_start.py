"""Tests how the habana engine starts, in processes where nothing has been replaced yet, as in a service."""

from pathlib import Path

import numpy as np
import pytest

from tests.habana.fresh import in_fresh_process, served
from tests.habana.models import FAMILIES
from tests.habana.oracle import Oracle
from tests.support.engine_contract import expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_service_serves_each_family(family: str, tmp_path: Path) -> None:
    oracle = Oracle(FAMILIES[family], tmp_path)
    name, logits = in_fresh_process(served, tmp_path)
    assert name.startswith("Gaudi")
    np.testing.assert_allclose(logits, expected(oracle, [1])[0], atol=1e-4)
    oracle.close()
