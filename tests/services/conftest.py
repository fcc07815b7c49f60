"""Fixtures: both doors for HTTP, and an engine's client of a bridge that proposes numbers."""

from collections.abc import Iterator

import httpx2 as httpx
import pytest

from draftbridge.candidates import CandidateClient
from services.cli.processes import Fleet, launched
from tests.support.counting_bridge import MODEL, Counting, serving


@pytest.fixture(scope="session")
def doors(tiny_fleet: Fleet) -> Iterator[dict[str, str]]:
    """The door in the bridge's own process, and one in a process before it."""
    options = ("--bridge", tiny_fleet.bridge, "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with launched("http", "http", *options) as (url, _):
        yield {"bridge": tiny_fleet.http, "http": url}


@pytest.fixture(params=["bridge", "http"])
def http(request: pytest.FixtureRequest, doors: dict[str, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=doors[request.param], timeout=60) as client:
        yield client


@pytest.fixture
def counting() -> Counting:
    """A bridge that proposes numbers."""
    return Counting()


@pytest.fixture
def connected(counting: Counting) -> Iterator[CandidateClient]:
    """An engine's client of it."""
    with serving(counting) as address:
        client = CandidateClient(address, MODEL, b"{}")
        assert client.connect(60)
        yield client
        client.close()
