"""Combines the sources of a request: makes offers of what they propose, and drops a source that fails."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bridge.errors import DraftBridgeError
from bridge.sources.source import (
    MAX_OFFERED_BYTES,
    CandidateSource,
    Continuation,
    DraftPace,
    Offer,
    Outcome,
    SourceState,
    offer_of,
)
from bridge.tape import Tape
from bridge.text.models import Model

_log = logging.getLogger(__name__)


class SourceSet:
    """Combines sources in order of preference. A source that fails is dropped, which costs speed, never text.

    `end_id` is the target's id for a proposed end of the text, or None if the target has no such id.
    """

    def __init__(self, sources: Sequence[CandidateSource], model: Model, tape: Tape, end_id: int | None) -> None:
        self._sources = list(sources)
        self._model, self._tape, self._end_id = model, tape, end_id
        self.note = ""

    @property
    def empty(self) -> bool:
        """Returns whether no source is left."""
        return not self._sources

    @property
    def state(self) -> SourceState | None:
        """Returns the state of the source that takes time to propose; None without one."""
        return next((source.state for source in self._sources if source.takes_time), None)

    def start(self, notify: Callable[[], None]) -> None:
        """Starts all sources; they call `notify` when they have news."""
        for source in self._sources:
            source.start(notify)

    def offers(self, limit_bytes: int = MAX_OFFERED_BYTES) -> list[Offer]:
        """Returns one offer for each source that proposes, continued by the next source that can continue its bytes."""
        offers, sources = [], tuple(self._sources)
        for index, source in enumerate(sources):
            with self._dropping(source):
                if parts := self._parts(source, [one for one in sources[index + 1 :] if one in self._sources]):
                    offers.append(offer_of(self._model.vocabulary, parts, self._end_id, limit_bytes))
        return [offer for offer in offers if offer.token_ids]

    def observe(self, outcome: Outcome) -> None:
        """Passes on to all sources what the target committed."""
        for source in tuple(self._sources):
            with self._dropping(source):
                source.observe(outcome)

    async def advance(self, pace: DraftPace) -> None:
        """Lets all sources work on what follows the tape."""
        for source in tuple(self._sources):
            with self._dropping(source):
                await source.advance(self._tape, pace)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    @contextmanager
    def _dropping(self, source: CandidateSource) -> Iterator[None]:
        """Drops and closes a source that fails, and notes the reason. An unexpected error is a bug, and is logged."""
        try:
            yield
        except Exception as error:
            if source not in self._sources:
                return
            self._sources.remove(source)
            source.close()
            if isinstance(error, DraftBridgeError):
                self.note = self.note or f"the {source.name} was lost ({error.reason}); the target went on without it"
                return
            _log.error("a bug in the bridge stopped the %s source", source.name, exc_info=error)
            self.note = f"a bug in the bridge stopped the {source.name} (INTERNAL, see its log); the text is unaffected"

    def _parts(self, source: CandidateSource, others: Sequence[CandidateSource]) -> list[Continuation]:
        first = source.propose(self._tape)
        if first is None or not (first.data or first.closes):
            return []
        for other in () if first.closes else others:
            with self._dropping(other):
                if (more := other.propose(self._tape, first.data)) and more.data:
                    return [first, more]
        return [first]
