"""Proposes candidates: the port (`source`), each source, and all of a request (`source_set`).

To add a source that proposes at once, write its class in a new file and list it in `SOURCES`. At most one source of a
request may take time: the planner knows one draft, with its `DraftEstimates`.
"""

from bridge.sources.draft import DraftSource
from bridge.sources.grammar import GrammarSource
from bridge.sources.source import CandidateSource
from bridge.sources.suffix import SuffixSource

# The sources by name, in order of preference: an offer continues one source's bytes with those of the first that can.
SOURCES: dict[str, type[CandidateSource]] = {
    source.name: source for source in (GrammarSource, DraftSource, SuffixSource)
}
