"""Where candidates come from: the port (`source`), each source, and all sources of a request together (`chain`).

A new source is a file with a class, and its name in `SOURCES`.
"""

from bridge.sources.draft import DraftSource
from bridge.sources.source import CandidateSource
from bridge.sources.suffix import SuffixSource

# By name, in order of preference: where two can be chained, the earlier one comes first.
SOURCES: dict[str, type[CandidateSource]] = {source.name: source for source in (DraftSource, SuffixSource)}
