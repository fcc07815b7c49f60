"""Tests static shapes of passes on a Gaudi: every row runs in its cell and in a shape that was warmed up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engines.engine import Row
from services.engines.habana.shapes import MAX_LOGITS, MESSAGE_SIZE, Shapes, inputs_of, shape_of, slots_of

SIZES = st.tuples(
    st.integers(1, 9), st.sampled_from([48, 256, 512, 1024]), st.sampled_from([1, 20, 128, 512]), st.booleans()
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Shapes, list[Row]]:
    slot_count, capacity, bucket_size, bucketed = draw(SIZES)
    slots = draw(st.lists(st.integers(0, slot_count - 1), min_size=1, max_size=slot_count, unique=True))
    rows = []
    for slot in slots:
        count = draw(st.integers(1, min(capacity, 700)))
        ids = tuple(range(slot * 1000, slot * 1000 + count))
        rows.append(Row(slot, draw(st.integers(0, capacity - count)), ids, draw(st.integers(0, count))))
    return Shapes(slot_count, capacity, bucket_size, bucketed), rows


@given(workloads())
def test_passes_run_all_tokens_in_order_in_shapes_that_were_warmed_up(workload: tuple[Shapes, list[Row]]) -> None:
    shapes, rows = workload
    tokens, wanted = [], []
    for shape, message, count in shapes.passes(rows):
        assert shape in shapes.all()
        assert shape == shape_of(message)
        assert count <= MAX_LOGITS
        inputs, logits = inputs_of(message, shape)
        real = inputs[3] < shapes.slot_count * shapes.capacity
        assert set(inputs[0]) == set(inputs[0][real]), "FP8 would measure an id that no text has"
        assert len(set(inputs[3])) == shape.width, "two tokens of a pass have the same cell"
        assert inputs[3].max() < shapes.cell_count
        assert inputs[2].max() < shape.length
        if shape.alone:
            assert set(inputs[1][real]) == {slots_of(message)[0]}
        wanted += [int(inputs[0][index]) for index in logits[:count]]
        tokens += inputs[:, real].T.tolist()
    assert tokens == [
        [id_, row.slot, row.keep + index, (row.keep + index) * shapes.slot_count + row.slot]
        for row in rows
        for index, id_ in enumerate(row.token_ids)
    ]
    assert wanted == [id_ for row in rows for id_ in row.token_ids[row.logits_from :]]


@given(SIZES)
def test_each_shape_has_an_example(sizes: tuple[int, int, int, bool]) -> None:
    shapes = Shapes(*sizes)
    for shape in shapes.all():
        rows = shapes.example(shape, 1000)
        assert [one for one, _, _ in shapes.passes(rows)] == [shape]
        assert all(len(set(row.token_ids)) == len(row.token_ids) for row in rows), "FP8 would measure one id"


@pytest.mark.parametrize(("bucketed", "length"), [(False, 512), (True, 256)])
def test_a_copy_moves_at_least_what_is_asked_for(bucketed: bool, length: int) -> None:
    message = Shapes(3, 512, 128, bucketed).copying(2, 1, 129)
    assert message[2] == length
    assert slots_of(message).tolist() == [2, 1]
    assert message.shape == (MESSAGE_SIZE,)
    assert message.dtype == np.int64
