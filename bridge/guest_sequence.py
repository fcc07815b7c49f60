"""Holds one sequence of a guest: its tape, its sources and its planner, which are those of our own loop."""

import asyncio
import logging
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns

from bridge.errors import DraftBridgeError, InvalidRequest, PromptTooLong, UnusableModel
from bridge.guest_step import Answer, Proposed
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import MAX_CANDIDATES, Planner, SpeculationParameters
from bridge.planning.prediction import Plan, Prediction, expected_count
from bridge.ports import Pass
from bridge.sources import open_sources
from bridge.sources.draft import DraftSource, open_draft
from bridge.sources.ngrams import NgramMemory
from bridge.sources.source import Draft, Offer, Opening, Outcome
from bridge.sources.source_set import SourceSet
from bridge.speculation import Speculation
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.text.chat import chat_threads, end_of_turn, render_chat, render_ids_for
from bridge.text.chat_reading import read_chat
from bridge.text.common_prefix import common_prefix_length
from bridge.text.models import Model
from bridge.text.vocabulary import Rendering

_log = logging.getLogger(__name__)

# Answers whose candidates a forward may still have verified.
_REMEMBERED_ANSWERS = 8
# The bytes that are translated for one considered candidate, and for a sequence that is alone in its forward.
_BYTES_PER_CANDIDATE, _ALONE_BYTES = 8, 160
# A sequence whose draft failed goes this number of forwards without one, twice as many each time, up to the second.
_PAUSED_FORWARDS, _MAX_PAUSED_FORWARDS = 32, 4096
# An answer has candidates for this many forwards, for an engine that receives it late.
_OFFERED_FORWARDS = 3
_NOTHING = Offer()


@dataclass(frozen=True)
class GuestOpening:
    """The parts of a sequence that all sequences of an engine share. `memory`, `tenant`: see `Opening`."""

    model: Model
    estimates: TargetEstimates
    sources: tuple[str, ...] = ()
    memory: NgramMemory | None = None
    tenant: Hashable = ""


def _render(model: Model, ids: Sequence[int], source: Model) -> Rendering:
    """Returns an engine's prompt in a draft's tokens: a chat in the draft's own template, other text as it is."""
    if chat := read_chat(source, ids):
        try:
            return render_chat(model, chat)
        except (InvalidRequest, UnusableModel):  # the draft's template may refuse what the engine's accepts
            pass
    return render_ids_for(model, ids, source)


class GuestSequence:
    """Follows one sequence of an engine, and proposes what continues it. A draft may join it later.

    `max_width`: the most candidates that its next forward can verify. To create a sequence takes time, because its
    prompt is indexed.
    """

    def __init__(self, shared: GuestOpening, ids: Sequence[int], generated_token_count: int) -> None:
        model, split = shared.model, len(ids) - generated_token_count
        self.tape = Tape(model.vocabulary, ids[:split])
        self._model = model
        self._opening = Opening(
            self.tape,
            partial(_render, ids=ids[:split], source=model),
            memory=shared.memory,
            tenant=shared.tenant,
            threads=partial(chat_threads, byte_count=4 * split),
        )
        self.tape.commit(ids[split:])
        parameters = SpeculationParameters(sources=shared.sources)
        sources = open_sources(self._opening, parameters.allows)
        self._estimates = RequestEstimates(shared.estimates, sources)
        self._sources = SourceSet(
            sources, model, end_of_turn(model), on_draft=lambda draft: self._estimates.use_draft(draft.times)
        )
        self._news = asyncio.Event()
        self._sources.start(self._news.set)
        planner = Planner(parameters, self._estimates)
        planner.max_wait_ns = 0.0
        self._speculation = Speculation(self._sources, planner, Statistics(), self.room)
        self.limit(None)
        self._answers: dict[int, tuple[int, Offer]] = {}
        # Whether the engine may hold candidates of an earlier answer.
        self._offered = False
        self._rest = _NOTHING
        self._observed: tuple[Outcome, Plan, Sequence[Offer]] | None = None
        # The plan of the last choice, which the next forward follows, and how many candidates it has.
        self._plan, self._width = self._speculation.plan, 0
        self._planned = self._refreshed = self._timed_out = False
        self._waited_ns = 0
        # The forwards until it can use a draft; None if it was given one.
        self._forwards_to_draft: int | None = 0
        self._paused_forwards = _PAUSED_FORWARDS
        self._draft: Draft | None = None

    @property
    def statistics(self) -> Statistics:
        """Returns what its forwards have counted."""
        return self._speculation.statistics

    @property
    def room(self) -> int:
        """Returns how many more tokens its context has place for, besides the one that each forward chooses itself."""
        return max(self._model.context_length - len(self.tape.ids) - 1, 0)

    @property
    def has_draft(self) -> bool:
        """Returns whether a draft proposes for it."""
        return self._sources.draft is not None

    @property
    def awaits_draft(self) -> bool:
        """Returns whether it could use a draft: none was connected, others used them all, or its own failed."""
        return self._forwards_to_draft == 0

    def observe_end(self) -> None:
        """Records the length of its text, which has ended."""
        self._estimates.shared.observe_text(self.tape.generated_token_count)

    def add_draft(self, draft: Draft) -> None:
        """Lets a draft take part once it has its prompt. Must be called in the event loop."""
        self._draft, self._forwards_to_draft = draft, None
        self._sources.open_draft(self._open(draft))

    def release_draft(self) -> None:
        """Goes on without its draft, if it has one. May be called twice."""
        self._sources.remove_draft()
        if self._draft:
            self._draft.drafter.close()  # also if it is still being opened
        self._forwards_to_draft = 0

    async def _open(self, draft: Draft) -> DraftSource | None:
        try:
            return await open_draft(draft, self._opening)
        except DraftBridgeError as error:
            if isinstance(error, PromptTooLong):  # the next attempts would fail as well
                self._paused_forwards = _MAX_PAUSED_FORWARDS
            _log.info("a sequence of an engine goes without its draft: %s", error.reason)
            return None

    def limit(self, max_candidate_count: int | None) -> None:
        """Sets how many candidates the next forward can verify: the engine's own limit, if any, and the context's."""
        asked = MAX_CANDIDATES if max_candidate_count is None else max_candidate_count
        self.max_width, self._width = min(asked, self.room, MAX_CANDIDATES), 0
        # A forward that verifies nothing, because it reads a prompt, does not limit later ones.
        self._speculation.planner.max_candidate_count = self.max_width or MAX_CANDIDATES

    def commit(self, ids: Sequence[int], step: int, count: int, engine_ns: int | None) -> Outcome:
        """Appends tokens that the engine produced in a forward with the first `count` candidates of answer `step`.

        An engine may have verified fewer: vLLM does not report to its proposer which candidates it left out.
        `engine_ns`: what the forward took, if it is known and ran no other sequence.
        """
        base, (start, offer) = len(self.tape.ids), self._answers.get(step, (0, _NOTHING))
        tried = offer.part(base - start, base - start + count) if base >= start and count else _NOTHING
        accepted = common_prefix_length(tried.token_ids, ids)
        if accepted == len(ids):  # the last id is the engine's own choice: it verified only the candidates before it
            accepted -= 1
            tried = tried.part(0, accepted)
        result = Pass(
            base, tuple(ids), accepted, len(tried.token_ids), step, forward_ns=engine_ns or 0, waited_ns=self._waited_ns
        )
        elapsed_ns = None if engine_ns is None else engine_ns + self._waited_ns
        outcome = Outcome(result, tried, self.tape.commit(ids), elapsed_ns, self._timed_out)
        self._timed_out, self._waited_ns = False, 0
        rest = self._rest
        self._rest = rest.part(len(ids)) if rest.token_ids[: len(ids)] == result.token_ids else _NOTHING
        self._sources.observe(outcome)
        offers = self._speculation.offers if self._refreshed else [rest]
        self._observed = outcome, self._plan, [offer for offer in offers if offer.token_ids]
        self._planned = self._refreshed = False
        return outcome

    def propose(self, answer: Answer, id_: int, offer: Offer, width: int) -> None:
        """Adds an offer to an answer, and remembers it.

        Without a width, withdraws what an earlier answer offered, unless the deadline has ended a wait for the draft.
        """
        if not width:
            if self._offered and not self._timed_out:
                answer.withdrawn.append(id_)
                self._offered = False
            return
        self._offered = True
        base, sent = len(self.tape.ids), offer.part(0, min(_OFFERED_FORWARDS * width, self.room))
        self._answers[answer.number] = base, sent
        if len(self._answers) > _REMEMBERED_ANSWERS:
            del self._answers[next(iter(self._answers))]
        answer.proposed.append(Proposed(id_, base, sent, width))

    async def choose(self, deadline_ns: int) -> tuple[Offer, int]:
        """Chooses candidates for the sequence alone, as our own loop does. Returns them, and how many a forward takes.

        If the plan is to wait for the draft, it waits until `deadline_ns` at most.
        """
        speculation, clock = self._speculation, perf_counter_ns
        now = clock()
        speculation.planner.max_wait_ns = float(max(deadline_ns - now, 0))
        self._refresh()
        choice = speculation.choose()
        if self.has_draft and (speculation.plan.pace.turns or not choice.width):
            await self.settle(alone=True)
            if self._news.is_set():  # the draft's answer came meanwhile
                self._refresh()
            choice = speculation.choose()
            until, has_waited = min(deadline_ns, now + int(speculation.plan.patience_ns)), False
            while choice.awaited and not choice.width and (left := until - clock()) > 0:
                has_waited = True
                with suppress(TimeoutError):
                    async with asyncio.timeout(left / 1e9):
                        await self._news.wait()
                self._refresh()
                choice = speculation.choose()
            # A draft that has not answered in time may have something to propose, and one that nobody waited for is
            # not late.
            self._timed_out = speculation.plan.pace.turns and choice.awaited and has_waited
            self._waited_ns = clock() - now if has_waited or not choice.awaited else 0
        self._plan, self._width = speculation.plan, min(choice.width, self.max_width)
        return choice.offer, self._width

    def best_offer(self, considered: int) -> tuple[Offer, list[float]]:
        """Returns the best offer for a shared forward, and the chances of its first candidates.

        It is that with the most right candidates, as expected.
        """
        limit = min(considered, self.max_width)
        if self.has_draft or len(self._rest.token_ids) < limit:
            offers = self._sources.offers(_BYTES_PER_CANDIDATE * considered)
        else:
            offers = [self._rest]  # what was offered before goes on
        found = [(offer, self._estimates.chances_of(offer, limit)) for offer in offers]
        best, chances = max(found, key=lambda one: expected_count(one[1]), default=(_NOTHING, []))
        self._rest = best
        return best, chances

    async def settle(self, *, alone: bool) -> None:
        """Learns from the last forward, and lets the draft go on from there; once after each `commit`.

        `alone`: the forward ran no other sequence, so the planner plans it. Otherwise it plans only for a draft.
        """
        speculation = self._speculation
        if self._observed:
            outcome, plan, *_ = self._observed
            self._estimates.observe(*self._observed)
            speculation.statistics.observe(outcome, plan)
            self._observed = None
            self._look_after_draft()
        if not self._planned and (alone or self.has_draft or self._sources.seeking):
            self._planned = True
            speculation.planner.is_shared = not alone
            if not alone:
                speculation.planner.max_wait_ns = 0.0
            elif self._plan.is_trial and self._plan is speculation.plan:  # the engine reports it only later
                self._estimates.observe_trial(self._plan.source)
            if not self._refreshed:
                self._refresh()
            await speculation.replan(self.room)
            plan = speculation.plan
            if alone and plan.source and not (plan.pace.lead or self._width):
                # Nothing was sent: it was chosen before this plan was made, or the engine could verify nothing.
                plan = replace(plan, name="plain", source="", prediction=Prediction(1.0, plan.plain_ns))
            # A trial, and a draft's turn, begin with the next choice.
            if not alone or not (plan.is_trial or plan.pace.turns or self._plan.is_trial):
                self._plan = plan

    def _look_after_draft(self) -> None:
        """Notes that it can use another draft some time after its own has failed, or could not be opened."""
        if self._forwards_to_draft:
            self._forwards_to_draft -= 1
        elif self._forwards_to_draft is None and not (self.has_draft or self._sources.seeking):
            self._forwards_to_draft = self._paused_forwards
            self._paused_forwards = min(2 * self._paused_forwards, _MAX_PAUSED_FORWARDS)

    def _refresh(self) -> None:
        self._news.clear()
        self._refreshed = True
        self._speculation.refresh(_ALONE_BYTES)
