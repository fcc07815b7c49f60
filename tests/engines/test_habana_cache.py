"""Compares the cells and masks of passes on a Gaudi with the cells that each token must see."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engines.engine import Row
from services.engines.habana.cache import Attended, Probe, SlotCache, attending
from services.engines.habana.shapes import Shapes, inputs_of, slots_of

CAPACITY = 256


@st.composite
def passes(draw: st.DrawFn) -> tuple[Shapes, list[Row]]:
    slot_count = draw(st.integers(1, 4))
    slots = draw(st.lists(st.integers(0, slot_count - 1), min_size=1, unique=True))
    rows = [Row(slot, draw(st.integers(0, 200)), (1,) * draw(st.integers(1, 20)), 0) for slot in slots]
    return Shapes(slot_count, CAPACITY, 64, draw(st.booleans())), rows


@settings(max_examples=40)
@given(passes(), st.sampled_from([0, 1, 7, 300]))
def test_a_token_sees_the_tokens_of_its_slot_up_to_itself(drawn: tuple[Shapes, list[Row]], window: int) -> None:
    """Keys hold the number of their cell, so that what a pass reads shows which cells they are."""
    shapes, rows = drawn
    cache = torch.arange(shapes.cell_count, dtype=torch.float32)[None, None, :, None]
    for shape, message, _ in shapes.passes(rows):
        _, slots, positions, cells = (torch.from_numpy(one) for one in inputs_of(message, shape)[0])
        attended = Attended(shape, shapes.slot_count, slots, positions, torch.from_numpy(slots_of(message)[:1]))
        read = attended.of(cache)[0, 0, :, 0].to(torch.int64)
        visible = attended.mask(window, torch.float32)[0, 0] == 0
        assert visible.shape == (shape.width, len(read))
        for index in np.flatnonzero(cells.numpy() < shapes.slot_count * CAPACITY):
            position, slot = int(positions[index]), int(slots[index])
            first = max(0, position + 1 - window) if window else 0
            expected = [one * shapes.slot_count + slot for one in range(first, position + 1)]
            assert sorted(read[visible[index]].tolist()) == expected
        assert bool(visible.any(dim=1).all()), "padding must see something, or it becomes NaN"


def test_a_cache_returns_what_was_written_and_copies_slots() -> None:
    cache, slot_count = SlotCache(), 2
    with attending(Probe("cpu")):
        new = torch.ones(1, 3, 1, 4)
        assert cache(new, 2, torch.tensor([1])) is new
    assert cache.token_byte_count == 3 * 4 * 4
    shapes = Shapes(slot_count, CAPACITY, 64, False)
    cache.allocate(shapes.cell_count)
    shape, message, _ = next(shapes.passes([Row(1, 3, (5, 6), 0)]))
    _, slots, positions, cells = (torch.from_numpy(one) for one in inputs_of(message, shape)[0])
    written = torch.randn(1, 3, shape.width, 4)
    with attending(Attended(shape, slot_count, slots, positions, torch.tensor([1]))):
        read = cache(written, 2, cells + 1)
    assert torch.equal(read[:, :, 3:5], written[:, :, :2])
    assert read.abs().sum() == pytest.approx(float(written[:, :, :2].abs().sum())), "padding was written to a slot"
    every = torch.arange(CAPACITY) * slot_count
    cache.copy(every + 1, every)
    assert cache.cache is not None
    assert torch.equal(cache.cache[:, :, every], cache.cache[:, :, every + 1])
