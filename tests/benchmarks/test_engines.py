"""Tests what `benchmarks.engines` compares with each other."""

from pathlib import Path

import pytest

from benchmarks.engines import bare_model
from services.engines.torch import engine, packed


@pytest.mark.parametrize("computes", [True, False])
def test_the_library_alone_computes_in_the_type_of_the_engine(
    computes: bool, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engine, packed):
        monkeypatch.setattr(module, "computes_bfloat16", lambda: computes)
    monkeypatch.setattr(engine, "pack", lambda model: False)  # not every processor can pack bfloat16
    own = engine.TorchEngine(tiny_models[0], threads=1, slot_count=1)
    assert str(bare_model(str(tiny_models[0]), "cpu").dtype) == f"torch.{own.dtype}"
