"""Combines the sources of a request: makes offers of what they propose, and drops a source that fails."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from bridge.errors import DraftBridgeError, Unreachable
from bridge.ports import TextGrammar
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
from bridge.text.models import Model

_log = logging.getLogger(__name__)

# After this many passes without any candidate, another draft is tried.
_UNUSED_PASSES = 64
# A source and a function to call when it takes over, or None if no source is left to take over.
Opened: TypeAlias = tuple[CandidateSource, Callable[[], None]] | None
# Opens a source in place of one that failed with an error, or that does not pay (None). An error ends all searches.
Substitute: TypeAlias = Callable[[Exception | None], Awaitable[Opened]]
# The most continuations of one offer, of sources that continue each other.
_MAX_PARTS = 8


class SourceSet:
    """Combines sources in order of preference. A source that fails is dropped, which costs speed, never text.

    `end_id` is the target's id for a proposed end of the text, or None if the target has no such id. `substitute`
    opens another source in place of one that takes time, while the others go on. What the request's
    `grammar` refuses is not offered.
    """

    def __init__(
        self,
        sources: Sequence[CandidateSource],
        model: Model,
        end_id: int | None,
        substitute: Substitute | None = None,
        grammar: TextGrammar | None = None,
    ) -> None:
        self._sources = list(sources)
        self._model, self._end_id, self._grammar = model, end_id, grammar
        self._substitute = substitute
        self._seeking: asyncio.Future[Opened] | None = None
        # Whether the present search is for a replacement of a draft that failed.
        self._unused_pass_count, self._failed = 0, False
        self._notify: Callable[[], None] = lambda: None
        self.note = ""
        # All sources that took part, in order, also those that were dropped or replaced.
        self.opened = list(sources)

    @property
    def empty(self) -> bool:
        """Returns whether no source is left."""
        return not self._sources

    @property
    def seeking(self) -> bool:
        """Returns whether a source that takes time is being opened, or has not taken over."""
        return self._seeking is not None

    @property
    def state(self) -> SourceState | None:
        """Returns the state of the source that takes time to propose; None without one."""
        return next((source.state for source in self._sources if source.takes_time), None)

    @property
    def lost_slow(self) -> bool:
        """Returns whether such a source took part, and none does or is being opened."""
        return self.state is None and not self.seeking and any(source.takes_time for source in self.opened)

    def start(self, notify: Callable[[], None]) -> None:
        """Starts all sources; they call `notify` when they have news."""
        self._notify = notify
        for source in self._sources:
            source.start(notify)

    def offers(self, limit_bytes: int = MAX_OFFERED_BYTES) -> list[Offer]:
        """Returns one offer for each source that proposes, continued by the other sources that can continue it."""
        offers = []
        for source in tuple(self._sources):
            with self._dropping(source):
                if parts := self._parts(source, limit_bytes):
                    offers.append(offer_of(self._model.vocabulary, parts, self._end_id, limit_bytes))
        return [offer for offer in offers if offer.token_ids]

    def observe(self, outcome: Outcome) -> None:
        """Passes on to all sources what the target committed."""
        if self._grammar:
            self._grammar.commit(b"".join(outcome.data))
        for source in tuple(self._sources):
            with self._dropping(source):
                source.observe(outcome)
                if source.takes_time:
                    self._judge(source, outcome)

    async def advance(self, pace: DraftPace) -> None:
        """Lets all sources work on what follows the tape."""
        for source in tuple(self._sources):
            with self._dropping(source):
                await source.advance(pace)

    def close(self) -> None:
        self._stop_seeking()
        for source in self._sources:
            source.close()

    def remove_slow(self) -> None:
        """Removes the source that takes time, also one that is being opened."""
        self._stop_seeking()
        for source in [one for one in self._sources if one.takes_time]:
            self._sources.remove(source)
            source.close()

    def add_slow(self, opening: Awaitable[Opened]) -> None:
        """Lets a source that takes time take over when it is open."""
        self._seeking = asyncio.ensure_future(opening)
        self._seeking.add_done_callback(lambda _: self._notify())

    def _stop_seeking(self) -> None:
        task, self._seeking = self._seeking, None
        if task and not task.cancel() and not task.cancelled() and not task.exception() and (found := task.result()):
            found[0].close()  # it was opened, and has not taken over

    def _judge(self, source: CandidateSource, outcome: Outcome) -> None:
        """Looks for another source if this one has not answered in time, or its candidates are not worth verifying."""
        if source.name in outcome.tried.sources:
            self._unused_pass_count = 0
        elif not outcome.tried.sources:  # a pass that another source served does not count against the draft
            self._unused_pass_count += 1
        if source.state and source.state.overdue:
            self._seek(Unreachable("the draft", "it did not answer in time"))
        elif self._unused_pass_count >= _UNUSED_PASSES:
            self._seek(None)

    def _seek(self, error: Exception | None) -> None:
        if self._substitute and not self._seeking:
            self._unused_pass_count, self._failed = 0, error is not None
            self.add_slow(self._substitute(error))

    def take_over(self) -> None:
        """Puts a source that was opened in the meantime in place of the one that it replaces."""
        if self._seeking is None or not self._seeking.done():
            return
        task, self._seeking = self._seeking, None
        if error := task.exception():
            _log.error("a bug in the bridge stopped the search for another draft", exc_info=error)
        found = None if error else task.result()
        if found is None:
            if error or self._failed:  # no draft is left
                self._substitute = None
            return
        source, on_take_over = found
        self.remove_slow()
        self._sources.insert(0, source)
        self.opened.append(source)
        on_take_over()
        self.note = self.note.replace("the target went on without it", "another draft replaced it")
        source.start(self._notify)

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
                if source.takes_time:
                    self._seek(error)
                self.note = self.note or f"the {source.name} was lost ({error.reason}); the target went on without it"
                return
            _log.error("a bug in the bridge stopped the %s source", source.name, exc_info=error)
            self.note = f"a bug in the bridge stopped the {source.name} (INTERNAL, see its log); the text is unaffected"

    def _parts(self, source: CandidateSource, limit: int) -> list[Continuation]:
        """Returns what a source proposes, and what others add to it, as long as one of them can continue the bytes."""
        parts: list[Continuation] = []
        data = b""
        more = self._proposed(source, data, limit)
        while more and len(parts) < _MAX_PARTS:
            parts.append(more)
            data += more.data
            if more.closes or more.cut or len(data) >= limit:
                break
            more = self._continued(more.source, data, limit - len(data))
        return parts

    def _continued(self, last: str, data: bytes, limit: int) -> Continuation | None:
        for source in tuple(self._sources):
            if source.name != last:
                with self._dropping(source):
                    if more := self._proposed(source, data, limit):
                        return more
        return None

    def _proposed(self, source: CandidateSource, after: bytes, limit: int) -> Continuation | None:
        """Returns what a source proposes after the text and `after`, as far as the grammar allows it."""
        part = source.propose(after, limit)
        if part and self._grammar and (part.data or part.closes):
            count, may_end = self._grammar.accepted(after, part.data)
            whole = count == len(part.data)
            closes, cut, token_ids = part.closes and may_end, part.cut and whole, part.token_ids if whole else ()
            part = replace(part, data=part.data[:count], closes=closes, cut=cut, token_ids=token_ids)
        return part if part and (part.data or part.closes) else None
