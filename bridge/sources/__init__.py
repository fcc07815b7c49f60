"""Where candidates come from: the port (`source`), each source, and all sources of a request together (`chain`).

A new source is a file with a class and a function that opens it, and a line in `SOURCES`.
"""

from collections.abc import Callable

from bridge.sources.draft import open_draft
from bridge.sources.source import CandidateSource, Opening
from bridge.sources.suffix import open_suffix

# By name, in order of preference: where two can be chained, the earlier one comes first.
SOURCES: dict[str, Callable[[Opening], CandidateSource | None]] = {"draft": open_draft, "suffix": open_suffix}
