"""Combines the sources of a request: makes offers of what they propose, and drops a source that fails."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from bridge.errors import DraftBridgeError, Unreachable
from bridge.ports import TextGrammar
from bridge.sources.draft import DraftSource
from bridge.sources.source import (
    DRAFT,
    MAX_OFFERED_BYTES,
    CandidateSource,
    Continuation,
    DraftPace,
    DraftState,
    Offer,
    Outcome,
    offer_of,
)
from bridge.text.models import Model

_log = logging.getLogger(__name__)

# After this many passes without any candidate, another draft is tried.
_UNUSED_PASSES = 64
# Finds another draft for the rest of a request, given the error of the present one, or None if that gains nothing.
FindDraft: TypeAlias = Callable[[DraftBridgeError | None], Awaitable[DraftSource | None]]
_ALONE = "the target went on without it"
# The most continuations of one offer. With a grammar, two sources may continue each other by single characters.
_MAX_PARTS = 8


class SourceSet:
    """Combines sources in order of preference, a draft before all others.

    A source that fails is dropped, which costs speed, never text. `end_id` is the target's id for a proposed end of the
    text, or None if the target has no such id. What the request's `grammar` refuses is not offered. `on_draft` is
    called when a draft takes over, at the start or in place of another one.
    """

    def __init__(
        self,
        sources: Sequence[CandidateSource],
        model: Model,
        end_id: int | None,
        grammar: TextGrammar | None = None,
        on_draft: Callable[[DraftSource], None] = lambda draft: None,
    ) -> None:
        self.draft: DraftSource | None = None
        self._sources = list(sources)
        self._model, self._end_id, self._grammar, self._on_draft = model, end_id, grammar, on_draft
        self._find_draft: FindDraft | None = None
        # A draft that is being opened, or has not taken over.
        self.seeking: asyncio.Future[DraftSource | None] | None = None
        self._unused_pass_count = 0
        # Whether the present search is for a replacement of a draft that failed, and an error that came during one.
        self._failed = False
        self._missed: DraftBridgeError | None = None
        self._notify: Callable[[], None] | None = None
        # The first problem, or a bug, and what came of it; "" if that depends on the draft.
        self._problem = self._ending = ""
        # What other sources than the draft offer until the next pass, by the limit of bytes.
        self._known = dict[tuple[CandidateSource, int], Offer]()

    @property
    def note(self) -> str:
        """Returns what went wrong with a source, "" if nothing did."""
        ending = self._ending or ("another draft replaced it" if self.draft else _ALONE)
        return self._problem and f"{self._problem}; {ending}"

    @property
    def empty(self) -> bool:
        """Returns whether no source is left."""
        return not self._sources

    @property
    def state(self) -> DraftState | None:
        """Returns how far the draft is; None without one."""
        return self.draft.state if self.draft else None

    @property
    def stale(self) -> bool:
        """Returns whether the draft's present work has become useless."""
        return self.draft is not None and self.draft.stale

    def start(self, notify: Callable[[], None]) -> None:
        """Starts the draft, and later ones; `notify` is called when one has news."""
        self._notify = notify
        if self.draft:
            self.draft.start(notify)

    def offers(self, limit_bytes: int = MAX_OFFERED_BYTES) -> list[Offer]:
        """Returns one offer for each source that proposes, continued by the other sources that can continue it.

        Between two passes, only a draft has something new to propose.
        """
        offers = []
        for source in tuple(self._sources):
            offer = self._known.get((source, limit_bytes))
            if offer is None:
                offer = self._offer(source, limit_bytes)
                if source is not self.draft:
                    self._known[source, limit_bytes] = offer
            offers.append(offer)
        return [offer for offer in offers if offer.token_ids]

    def _offer(self, source: CandidateSource, limit_bytes: int) -> Offer:
        parts: list[Continuation] = []
        with self._dropping(source):
            parts = self._parts(source, limit_bytes)
        if not parts:
            return Offer()
        branches = self._model.branches and not self._grammar
        try:
            return offer_of(self._model.vocabulary, parts, self._end_id, limit_bytes, branches=branches)
        except Exception as error:  # of the target's tokenizer, or a bug: the source is not to blame, but of no use
            self._remove(source)
            self._note_bug("translation of candidates", error)
            return Offer()

    def observe(self, outcome: Outcome) -> None:
        """Passes on to all sources what the target committed."""
        self._known.clear()
        if self._grammar:
            self._grammar.commit(b"".join(outcome.data))
        for source in tuple(self._sources):
            with self._dropping(source):
                source.observe(outcome)
        if self.draft:
            self._judge(self.draft, outcome)

    async def advance(self, pace: DraftPace) -> None:
        """Lets the draft work on what follows the tape."""
        if draft := self.draft:
            with self._dropping(draft):
                await draft.advance(pace)

    def close(self) -> None:
        """Closes the draft, also one that is being opened. May be called twice."""
        self._stop_seeking()
        if self.draft:
            self.draft.close()

    def remove_draft(self) -> None:
        """Removes the draft, also one that is being opened."""
        self._stop_seeking()
        if self.draft:
            self._remove(self.draft)

    def _remove(self, source: CandidateSource) -> None:
        self._sources.remove(source)
        self._known.clear()
        if source is self.draft:
            self.draft.close()
            self.draft = None

    async def use_drafts(self, find_draft: FindDraft) -> None:
        """Waits for the first draft. Later, another one takes its place while the other sources go on.

        An unexpected error of a search costs the drafts that it might have found, and ends all searches.
        """
        try:
            draft = await find_draft(None)
        except Exception as error:
            self._note_bug("search for a draft", error)
            return
        if draft:
            self.insert(draft)
            self._find_draft = find_draft

    def note_refusal(self, error: DraftBridgeError) -> None:
        """Notes that a draft could not take the request, unless another one takes part."""
        if self._find_draft is None:
            self._problem = self._problem or f"the draft could not take the request ({error})"

    def open_draft(self, opening: Awaitable[DraftSource | None]) -> None:
        """Lets a draft take over when it is open."""
        self.seeking = asyncio.ensure_future(opening)
        self.seeking.add_done_callback(lambda _: self._notify and self._notify())

    def _stop_seeking(self) -> None:
        task, self.seeking = self.seeking, None
        if task and not task.cancel() and not task.cancelled() and not task.exception() and (found := task.result()):
            found.close()  # it was opened, and has not taken over

    def _judge(self, draft: DraftSource, outcome: Outcome) -> None:
        """Looks for another draft if this one has not answered in time, or its candidates are not worth verifying."""
        if DRAFT in outcome.tried.sources:
            self._unused_pass_count = 0
        elif not outcome.tried.sources:  # a pass that another source served does not count against the draft
            self._unused_pass_count += 1
        if draft.overdue:
            self._seek(Unreachable("the draft", "it did not answer in time"))
        elif self._unused_pass_count >= _UNUSED_PASSES:
            self._seek(None)

    def _seek(self, error: DraftBridgeError | None) -> None:
        if self.seeking:
            self._missed = error
        elif self._find_draft:
            self._unused_pass_count, self._failed = 0, error is not None
            self.open_draft(self._find_draft(error))

    def take_over(self) -> None:
        """Puts a draft that was opened in the meantime in place of the one that it replaces."""
        if self.seeking is None or not self.seeking.done():
            return
        task, self.seeking = self.seeking, None
        missed, self._missed = self._missed, None
        if error := task.exception():
            self._note_bug("search for another draft", error)
            self._find_draft = None
        elif draft := task.result():
            self.insert(draft)
        elif self._failed:  # no draft is left
            self._find_draft = None
        elif missed:  # the draft failed while a better one was sought
            self._seek(missed)

    def insert(self, draft: DraftSource) -> None:
        """Lets a draft take part from now on, in place of the present one."""
        self.remove_draft()
        self.draft, self._unused_pass_count = draft, 0
        self._sources.insert(0, draft)
        self._on_draft(draft)
        if self._notify:
            draft.start(self._notify)

    @contextmanager
    def _dropping(self, source: CandidateSource) -> Iterator[None]:
        """Drops and closes a source that fails, and notes the reason. An unexpected error is a bug, and is logged."""
        try:
            yield
        except Exception as error:
            if source not in self._sources:
                return
            self._remove(source)
            if isinstance(error, DraftBridgeError):
                if not self._problem:
                    self._problem = f"the {source.name} stopped ({error.reason})"
                    self._ending = "" if source.name == DRAFT else _ALONE
                if source.name == DRAFT:
                    self._seek(error)
                return
            self._note_bug(f"{source.name} source", error)

    def _note_bug(self, stopped: str, error: BaseException) -> None:
        _log.error("a bug in the bridge stopped the %s", stopped, exc_info=error)
        self._problem = f"a bug in the bridge stopped the {stopped} (INTERNAL, see its log)"
        self._ending = "the text is unaffected"

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
