"""Tests how the habana engine starts, in processes where nothing has been replaced yet, as in a service."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.errors import UnusableModel
from tests.habana.fresh import in_fresh_process, served
from tests.habana.models import FAMILIES, opened
from tests.habana.oracle import Oracle
from tests.support.engine_contract import expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_service_serves_each_family(family: str, tmp_path: Path) -> None:
    oracle = Oracle(FAMILIES[family], tmp_path)
    name, logits = in_fresh_process(served, tmp_path)
    assert name.startswith("Gaudi")
    np.testing.assert_allclose(logits, expected(oracle, [1])[0], atol=1e-4)
    oracle.close()


def refusal(directory: Path, mode: str, **options: Any) -> str:
    """Returns why a model is not opened where torch has imported Gaudi's library before, "" if it is."""
    import habana_frameworks.torch  # noqa: F401

    os.environ.pop("PT_HPU_LAZY_MODE", None)
    if mode:
        os.environ["PT_HPU_LAZY_MODE"] = mode
    try:
        opened(directory, **options)
    except UnusableModel as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("", {}, "export PT_HPU_LAZY_MODE=1"),
        ("0", {}, "export PT_HPU_LAZY_MODE=1"),
        ("0", {"use_hpu_graphs": False}, ""),
    ],
    ids=str,
)
def test_graphs_need_lazy_mode(mode: str, options: dict, words: str, tmp_path: Path) -> None:
    Oracle(FAMILIES["llama"], tmp_path).close()
    found = in_fresh_process(refusal, tmp_path, mode, **options)
    assert words in found
    assert bool(words) == bool(found)
