"""The torch engine's invariant forwards: what they compute, which models have them, and that the check can fail.

`test_fixed_width` tests that their logits are the same bit for bit.
"""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.engines.engine import Row
from services.engines.fixed_width import made_invariant
from services.engines.torch.cache import attention
from services.engines.torch.engine import TorchEngine
from services.engines.torch.invariant import SIZES, divided, size_of
from services.engines.torch.packed import PackedLinear
from tests.support.engine_contract import FAMILIES, EngineContract, expected, family, saved

DENSE = ["llama", "mistral", "gemma3", "gemma2", "opt", "gpt_bigcode"]


def invariant(engine: TorchEngine) -> TorchEngine:
    # A processor may have other kernels; servers then run passes as they come, and there is nothing to test here.
    if not rows_round_alike():
        pytest.skip("the product with packed weights rounds differently by width on this processor")
    assert engine.make_invariant()
    return engine


@cache
def rows_round_alike() -> bool:
    """Returns whether a product with packed weights is the same bit for bit with 4 to 32 rows, measured by itself."""
    torch.manual_seed(0)
    layer, rows = PackedLinear(torch.nn.Linear(32, 48)), torch.randn(1, 32, 32)
    whole = layer(rows)
    return all(torch.equal(layer(rows[:, :count]), whole[:, :count]) for count in SIZES if count <= 32)


def check_parts(engine: TorchEngine, model: Any, count: int) -> None:
    """Asserts that a text has the model's logits, and the same ones bit for bit if it is read in parts of 7 tokens."""
    ids = [int(id_) for id_ in np.random.default_rng(1).integers(0, 120, count)]
    (whole,) = engine.forward([Row(0, 0, tuple(ids), 0)])
    np.testing.assert_allclose(whole, expected(model, ids), atol=1e-4)
    parts = [engine.forward([Row(1, start, tuple(ids[start : start + 7]), 0)])[0] for start in range(0, count, 7)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


class TestInvariant(EngineContract):
    """Runs the contract of all engines."""

    @pytest.fixture(scope="class", params=DENSE)
    @classmethod
    def pair(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
        model, directory = family(request.param, tmp_path_factory)
        return model, invariant(TorchEngine(directory, dtype="float32", slot_count=3))


@pytest.mark.parametrize("name", ["gpt2", "phimoe", "gpt_oss"])
def test_products_that_are_not_packed_and_experts_are_not_invariant(name: str, tmp_path: Path) -> None:
    saved(FAMILIES[name], tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=2)
    assert not made_invariant(engine)
    assert engine.logit_tolerance > 0


@pytest.mark.parametrize(("odd", "place"), [(4, 0), (6, -1), (12, 0), (24, -1), (32, 0), (48, -1), (128, 0)])
def test_a_product_that_rounds_differently_at_one_size_is_found(
    odd: int, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest change of one layer's output for one token counts."""
    saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    layer = engine._model.get_output_embeddings()  # whose smallest change does not get lost in another layer's rounding
    assert isinstance(layer, PackedLinear)
    plain = PackedLinear.product

    def product(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        found = plain(self, rows)
        if self is layer and rows.shape[-2] == odd:
            found[..., place, :] = torch.nextafter(found[..., place, :], torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(PackedLinear, "product", product)
    assert engine.make_invariant() is (odd > 32), "then products are smaller"
    assert engine.logit_tolerance == 0.0 or odd <= 32


def test_a_product_that_rounds_differently_above_32_rows_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AMX does in bfloat16. Forwards are as wide as before."""
    model = saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    plain, counts = PackedLinear.product, set[int]()

    def product(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        counts.add(rows.shape[-2])
        return plain(self, rows) * (1 + (rows.shape[-2] > 32) * torch.finfo(torch.float32).eps)

    monkeypatch.setattr(PackedLinear, "product", product)
    assert engine.make_invariant() and max(counts) == 48 and engine._invariant_width == SIZES[-1]
    counts.clear()
    check_parts(engine, model, 100)
    assert max(counts) == 32


def test_an_activation_that_rounds_differently_in_a_wide_forward_makes_forwards_narrower(tmp_path: Path) -> None:
    """Torch does so if a thread's share of the elements is not a multiple of the processor's vector width."""
    model = saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    rounded = engine._model.model.layers[-1].mlp
    plain, widths = rounded.act_fn.forward, set[int]()

    def activation(rows: torch.Tensor) -> torch.Tensor:
        widths.add(rows.shape[-2])
        return plain(rows) * (1 + (rows.shape[-2] > 64) * 1e-3)

    rounded.act_fn.forward = activation
    assert engine.make_invariant() and max(widths) == 96
    widths.clear()
    check_parts(engine, model, 150)
    assert max(widths) == 64
    rounded.act_fn.forward = lambda rows: activation(rows) * (1 + (rows.shape[-2] > 12) * 1e-3)
    assert not engine.make_invariant()


@pytest.mark.parametrize(("count", "branch_count"), [(3, 9), (31, 1), (31, 2), (32, 70), (64, 5), (100, 33)])
def test_branches_that_do_not_fit_into_a_forward_have_the_same_logits(
    count: int, branch_count: int, tmp_path: Path
) -> None:
    saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    ids = [int(id_) for id_ in np.random.default_rng(1).integers(0, 120, count)]
    branches = [(index % count, 5 + index) for index in range(branch_count)]
    row = Row(0, 0, tuple(ids), count - 1)
    engine._invariant_width = 32
    found = engine.forward_branches(row, branches)
    assert len(found) == 1 + branch_count
    assert found[0].tobytes() == engine.forward([Row(1, 0, tuple(ids), count - 1)])[0].tobytes()
    for logits, (index, id_) in zip(found[1:], branches, strict=True):
        text = (*ids[:index], id_)
        assert logits.tobytes() == engine.forward([Row(1, 0, text, index)])[0].tobytes()
    engine.forward([Row(1, 0, tuple(ids), count)])
    after = [engine.forward([Row(slot, count, (7, 8), 0)])[0].tobytes() for slot in (0, 1)]
    assert after[0] == after[1], "the slot holds the row"


def test_a_model_that_is_not_invariant_after_all_keeps_its_wide_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    monkeypatch.setattr(engine, "_passes_agree", lambda: False)
    assert not engine.make_invariant()
    assert {part.row_limit for part in engine._model.modules() if isinstance(part, PackedLinear)} == {None}


def test_a_long_text_in_windows_has_the_models_own_logits(tmp_path: Path) -> None:
    model = saved(FAMILIES["mistral"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))
    ids = [int(id_) for id_ in np.random.default_rng(1).integers(0, 120, 150)]
    found = engine.forward([Row(1, 0, tuple(ids), 7), Row(0, 0, tuple(ids[:5]), 5)])
    np.testing.assert_allclose(found[0], expected(model, ids)[7:], atol=1e-4)
    assert found[1].shape == (0, engine.vocabulary_size)


@torch.inference_mode()
def test_what_a_slot_held_before_does_not_matter(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=3))
    first = engine.forward([Row(0, 0, (1, 2, 3, 4, 5), 0)])[0].copy()
    for pair in engine._caches._layers.values():
        for held in pair:
            held[1:] = torch.nan
    assert engine.forward([Row(1, 0, (1, 2, 3), 0)])[0].tobytes() == first[:3].tobytes()
    assert engine.forward([Row(1, 3, (4, 5), 0)])[0].tobytes() == first[3:].tobytes()
    long = tuple(range(1, 71))
    whole = engine.forward([Row(0, 0, long, 0)])[0].copy()
    engine.copy(0, 2, 66)
    assert engine.forward([Row(2, 66, long[66:], 0)])[0].tobytes() == whole[66:].tobytes()


def test_attention_after_many_keys_is_found_to_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may compute attention over more than 512 keys in another way for one block than for several."""
    config = deepcopy(FAMILIES["llama"])
    config.max_position_embeddings = 1024
    saved(config, tmp_path)
    engine = invariant(TorchEngine(tmp_path, dtype="float32", slot_count=2))

    def odd(query: torch.Tensor, keys: torch.Tensor, *others: Any) -> torch.Tensor:
        found = attention(query, keys, *others)
        return torch.nextafter(found, torch.tensor(torch.inf)) if len(query) == 1 and keys.shape[2] > 512 else found

    monkeypatch.setattr("services.engines.torch.invariant.attention", odd)
    assert not engine.make_invariant()


@pytest.mark.parametrize(("count", "size"), [(1, 4), (5, 6), (33, 48), (64, 64), (97, 128)])
def test_tokens_are_padded_to_a_size(count: int, size: int) -> None:
    assert size_of(count) == size


def test_a_forward_is_divided_in_the_order_of_its_tokens() -> None:
    rows = [Row(1, 10, (1, 2, 3, 4, 5), 3), Row(0, 0, (6, 7), 2), Row(2, 4, (8,), 0)]
    assert divided(rows, (), 4) == [
        ([Row(1, 10, (1, 2, 3, 4), 3)], ()),
        ([Row(1, 14, (5,), 0), Row(0, 0, (6, 7), 2), Row(2, 4, (8,), 0)], ()),
    ]
    assert divided(rows[:1], ((4, 20), (0, 21)), 4)[1:] == [([Row(1, 14, (5,), 0)], [(0, 20), (-4, 21)])]
    branches = ((4, 20), (0, 21), (1, 22), (2, 23))
    again = [Row(1, 14, (5,), 1)]
    assert divided(rows[:1], branches, 4)[2:] == [(again, [(0, 20), (-4, 21), (-3, 22)]), (again, [(-2, 23)])]


@pytest.mark.parametrize("name", [*DENSE, "gpt2", "phimoe", "gpt_oss"])
def test_an_engine_knows_whether_its_model_has_experts(name: str, tmp_path: Path) -> None:
    saved(FAMILIES[name], tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=2)
    assert engine.routes_tokens() is (name in ("phimoe", "gpt_oss"))


def test_layers_that_get_only_some_tokens_are_experts(tmp_path: Path) -> None:
    """As in the models' own code, where each expert is a module."""
    saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=2)
    layer = engine._model.model.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda rows: torch.cat([plain(rows[:, :1]), plain(rows[:, 1:])], dim=1)
    assert engine.routes_tokens()
