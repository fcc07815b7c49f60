"""All sources of a request together: what they offer, alone and one after the other, and what losing one costs."""

import logging
from collections.abc import Callable, Sequence

from bridge.errors import DraftBridgeError
from bridge.models import Model
from bridge.sources.source import CandidateSource, Continuation, Offer, Outcome, Pace, SourceState, offer_of
from bridge.tape import Tape

_log = logging.getLogger(__name__)


class SourceChain:
    """Sources in order of preference. A source that fails is dropped: that costs speed, never text.

    `end_id`: the target's id for a proposed end of the text; None if it has none.
    """

    def __init__(self, sources: Sequence[CandidateSource], model: Model, tape: Tape, end_id: int | None) -> None:
        self._sources = list(sources)
        self._all = tuple(sources)
        self._model, self._tape, self._end_id = model, tape, end_id
        self.note = ""

    @property
    def all(self) -> Sequence[CandidateSource]:
        """Every source that the request began with."""
        return self._all

    @property
    def empty(self) -> bool:
        """Whether no source is left."""
        return not self._sources

    @property
    def state(self) -> SourceState | None:
        """Where the source stands that takes time to propose; None without one."""
        return next((source.state for source in self._sources if source.state), None)

    def start(self, notify: Callable[[], None], fail: Callable[[CandidateSource, Exception], None]) -> None:
        """Lets all sources listen; they report news with `notify`, and what makes them unusable with `fail`."""
        for source in self._sources:
            source.start(notify, lambda error, source=source: fail(source, error))  # type: ignore[misc]

    def offers(self, max_tokens: int) -> list[Offer]:
        """What each source offers, continued by the next source that knows how its bytes go on."""
        offers = []
        for index, source in enumerate(list(self._sources)):
            try:
                if parts := self._parts(source, self._sources[index + 1 :]):
                    offers.append(offer_of(self._model.vocabulary, parts, max_tokens, self._end_id))
            except Exception as error:
                self.drop(source, error)
        return [offer for offer in offers if offer.token_ids]

    def observe(self, outcome: Outcome) -> None:
        """Tells all sources what the target committed."""
        for source in list(self._sources):
            try:
                source.observe(outcome)
            except Exception as error:
                self.drop(source, error)

    async def advance(self, pace: Pace) -> None:
        """Lets all sources work towards the tape's end and beyond."""
        for source in list(self._sources):
            try:
                await source.advance(self._tape, pace)
            except Exception as error:
                self.drop(source, error)

    def drop(self, source: CandidateSource, error: Exception) -> None:
        """Goes on without a source, closes it and notes why. A bug of ours is logged and named as such."""
        if source not in self._sources:
            return
        self._sources.remove(source)
        source.close()
        if isinstance(error, DraftBridgeError):
            self.note = self.note or f"the {source.name} was lost ({error.reason}); the target went on without it"
        else:
            _log.error("a bug in the bridge stopped the %s source", source.name, exc_info=error)
            self.note = f"a bug in the bridge stopped the {source.name} (INTERNAL, see its log); the text is unaffected"

    def close(self) -> None:
        """Closes all sources."""
        for source in self._sources:
            source.close()

    def _parts(self, source: CandidateSource, others: Sequence[CandidateSource]) -> list[Continuation]:
        first = source.propose(self._tape)
        if first is None or not (first.data or first.closes):
            return []
        found = (None if first.closes else one.propose(self._tape, first.data) for one in others)
        more = next((one for one in found if one and one.data), None)
        return [first, more] if more else [first]
