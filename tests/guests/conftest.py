"""Real engines in environments of their own; `make test-guests` builds them and names them in variables."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.guests)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Returns the Python of an environment with vLLM."""
    name = os.environ.get("DRAFTBRIDGE_TEST_VLLM")
    if not name:
        pytest.skip("DRAFTBRIDGE_TEST_VLLM does not name the Python of an environment with vLLM: make test-guests")
    return Path(name)
