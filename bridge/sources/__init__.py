"""Proposes candidates: the port (`source`), each source, and all sources of a request together (`chain`).

To add a source, write its class in a new file and list it in `SOURCES`.
"""

from bridge.sources.draft import DraftSource
from bridge.sources.source import CandidateSource
from bridge.sources.suffix import SuffixSource

# The sources by name, in order of preference: an offer may continue one source's bytes with those of a later one.
SOURCES: dict[str, type[CandidateSource]] = {source.name: source for source in (DraftSource, SuffixSource)}
