"""How thoroughly a run tests: `make test` looks at a part of the cases, `make test-deep` at all of them."""

import os

import pytest

DEEP = bool(os.environ.get("DRAFTBRIDGE_TEST_DEEP"))
# Marks tests that take long and whose subject other tests touch, too.
deep_only = pytest.mark.skipif(not DEEP, reason="it takes long: make test-deep runs it")


def examples(count: int) -> int:
    """Returns the number of examples that a property is tried with: `count` in a deep run, otherwise a fifth."""
    return count if DEEP else max(count // 5, 1)
