"""Proposes candidates: the port (`source`), each source, and all of a request (`source_set`).

To add a source that proposes at once, write its class in a new file and list it in `SOURCES`.
"""

from collections.abc import Callable

from bridge.sources.grammar import GrammarSource
from bridge.sources.learned import LearnedSource
from bridge.sources.source import DRAFT, CandidateSource, Opening
from bridge.sources.suffix import SuffixSource

# By name, what opens each source for a request, or returns None if the request cannot use it. The order is that of
# preference: an offer continues one source's bytes with those of the first that can. A draft, which comes before all
# others, is opened by `SourceSet`.
SOURCES: dict[str, Callable[[Opening], CandidateSource | None] | None] = {
    GrammarSource.name: GrammarSource.open,
    DRAFT: None,
    SuffixSource.name: SuffixSource.open,
    LearnedSource.name: LearnedSource.open,
}


def open_sources(opening: Opening, allows: Callable[[str], bool]) -> list[CandidateSource]:
    """Returns the sources that propose at once, as far as their names are allowed and the request can use them."""
    found = [open_(opening) for name, open_ in SOURCES.items() if open_ and allows(name)]
    return [source for source in found if source]
