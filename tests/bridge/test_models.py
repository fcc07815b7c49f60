"""Tests what follows from what models report of themselves."""

from dataclasses import replace

import pytest

from tests.support import tiny


@pytest.mark.parametrize(
    ("target", "draft", "competes"),
    [(({"a/0", "a/1"}, 2), ({"a/0", "a/1"}, 2), True), (({"a/0"}, 1), ({"a/1"}, 1), False),
     (({"a/0", "a/1"}, 1), ({"a/0", "a/1"}, 1), False), (({"a/0", "a/1"}, 2), ({"b/0", "b/1"}, 2), False),
     (({"a/gpu"}, 1), ({"a/0", "a/gpu"}, 1), False), (({"a/gpu"}, 1), ({"a/gpu"}, 1), True),
     ((set(), 0), (set(), 0), False)],
)  # fmt: skip
def test_models_compete_for_more_cores_than_there_are(
    target: tuple[set[str], int], draft: tuple[set[str], int], competes: bool
) -> None:
    one, other = (
        replace(tiny.model("byte_level"), compute_units=frozenset(units), compute_unit_count=count)
        for units, count in (target, draft)
    )
    assert one.competes_with(other) is other.competes_with(one) is competes
