"""Checks what an engine reports of itself."""

from collections.abc import Sequence

from bridge.errors import InvalidField
from bridge.sources import SOURCES
from draftbridge.v1 import model_pb2


def check_engine(model: model_pb2.Model, sources: Sequence[str]) -> None:
    """Raises `InvalidField` for a model that cannot exist, and for unknown sources."""
    for field in ("context_length", "vocabulary_size"):
        if getattr(model, field) == 0:
            raise InvalidField(f"open.model.{field}", "at least 1", 0)
    if unknown := set(sources) - set(SOURCES):
        raise InvalidField("open.sources", f"a selection of {', '.join(SOURCES)}", ", ".join(sorted(unknown)))
