"""Tests the habana engine on optimum-habana's own classes, on a CPU, by the contract of all engines."""

from collections.abc import Iterator

import pytest

from tests.habana.models import FAMILIES, opened
from tests.habana.oracle import Oracle
from tests.support.engine_contract import EngineContract


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    directory = tmp_path_factory.mktemp(request.param)
    oracle = Oracle(FAMILIES[request.param], directory)
    # Recording takes seconds, so only one family is recorded: Gemma 2, which has masks of two kinds.
    yield oracle, opened(directory, bucket_internal=True, use_hpu_graphs=request.param == "gemma2")
    oracle.close()


class TestHabana(EngineContract):
    """Runs the contract over the families."""
