"""Forwards with branches: each has the logits of the text that it continues, and the cache does not keep it."""

from pathlib import Path

import numpy as np
import pytest

from services.engines.engine import Branching, Row
from services.engines.torch.engine import TorchEngine
from tests.support.engine_contract import FAMILIES, expected, family, random_ids, saved

# One in the window of the first tokens and one beyond it; two in place of one token; one in place of the first.
BRANCHES = [(0, 7), (2, 11), (2, 12), (5, 13)]


# The numbers of tokens that a slot holds before the row. With the last one, the row reaches into the next span.
HELD = (0, 3, 61)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_branch_has_the_models_own_logits(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model, directory = family(name, tmp_path_factory)
    engine = TorchEngine(directory, dtype="float32", slot_count=2)
    assert isinstance(engine, Branching)
    for held in HELD:
        ids = random_ids(3, held + 8)
        if held:
            engine.forward([Row(1, 0, tuple(ids[:held]), held)])
        row = tuple(ids[held : held + 6])
        found = engine.forward_branches(Row(1, held, row, 1), BRANCHES).copy()
        assert found.shape == (5 + len(BRANCHES), 120)
        np.testing.assert_allclose(found[:5], expected(model, ids[: held + 6])[held + 1 :], atol=1e-4)
        for (index, id_), logits in zip(BRANCHES, found[5:], strict=True):
            np.testing.assert_allclose(logits, expected(model, [*ids[: held + index], id_])[-1], atol=1e-4)
        after = engine.forward([Row(1, held + 6, tuple(ids[held + 6 :]), 0)])[0]
        np.testing.assert_allclose(after, expected(model, ids)[held + 6 :], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2"])
def test_in_a_deterministic_engine_it_has_them_to_the_last_bit(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, directory = family(name, tmp_path_factory)
    engine = TorchEngine(directory, dtype="float32", slot_count=2)
    # A processor may have other kernels; as in `test_invariant`, there is nothing to test then.
    if not engine.make_invariant():
        pytest.skip("the product with packed weights rounds differently by width on this processor")
    for held in HELD[1:]:
        ids = random_ids(3, held + 6)
        engine.forward([Row(1, 0, tuple(ids[:held]), held)])
        row = tuple(ids[held:])
        found = engine.forward_branches(Row(1, held, row, 0), BRANCHES).copy()
        assert found[:6].tobytes() == engine.forward([Row(1, held, row, 0)])[0].tobytes()
        for (index, id_), logits in zip(BRANCHES, found[6:], strict=True):
            alone = engine.forward([Row(1, held, (*row[:index], id_), index)])[0]
            assert logits.tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("branch", [(-1, 5), (3, 5), (0, -1), (0, 120)])
def test_a_branch_that_cannot_be_is_refused_and_does_no_harm(branch: tuple[int, int], tmp_path: Path) -> None:
    model = saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=1)
    engine.forward([Row(0, 0, (7, 8, 9), 3)])
    with pytest.raises(ValueError, match="branch"):
        engine.forward_branches(Row(0, 3, (1, 2, 3), 0), [(1, 4), branch])
    after = engine.forward([Row(0, 3, (10,), 0)])[0]
    np.testing.assert_allclose(after[0], expected(model, [7, 8, 9, 10])[-1], atol=1e-4)
