"""How thoroughly a run tests: `make test` looks at a part of the cases, `make test-deep` at all of them."""

import os

DEEP = bool(os.environ.get("DRAFTBRIDGE_TEST_DEEP"))


def examples(count: int) -> int:
    """Returns the number of examples that a property is tried with: `count` in a deep run, otherwise a third."""
    return count if DEEP else count // 3
