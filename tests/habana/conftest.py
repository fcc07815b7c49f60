"""`make test-habana` runs these tests in an environment of their own; elsewhere there is nothing to collect."""

from importlib.util import find_spec

import pytest

from services.cli import processes
from tests.support.warm import cold_start

collect_ignore_glob = [] if find_spec("habana_frameworks") else ["test_*.py"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts each process with the Python that a test chooses, in lazy mode."""
    monkeypatch.setattr(processes, "_start", cold_start)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
