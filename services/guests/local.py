"""Gives an engine candidates from its own text, in its own process: `bridge.guest` without a bridge, and so no draft.

Used in place of a `CandidateClient` by adapters whose bridge is "local". No message is sent, and no thread waits, so a
step costs less than a millisecond for one sequence. Open it after a fork, not before: it has an event loop.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from bridge.errors import DraftBridgeError
from bridge.guest import Answer, Guest, SequenceUpdate, StepUpdate
from bridge.guest_sequence import GuestOpening, GuestSequence, open_sequence
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.sources.source import Draft
from bridge.text.vocabulary import Vocabulary
from draftbridge.candidate_stream import CandidateCounts, Candidates, SequenceStep
from draftbridge.candidates import DEFAULT_DEADLINE_SECONDS
from draftbridge.v1 import model_pb2
from services.guests.budget import Budget, GuestLimits
from services.guests.opening import check_engine
from services.rpc import codec

T = TypeVar("T")

_log = logging.getLogger("draftbridge")

# Turns of the event loop in which a sequence that was prepared in a thread begins to take part.
_TURNS_TO_OPEN = 3
# With more sequences, what follows a step is done in a thread while the engine computes. With fewer it takes less time
# than moving everything to another core's cache.
_MAX_SETTLED_AT_ONCE = 8
# Sequences that the guest has forgotten and whose engine may still name them are remembered up to this number.
_MAX_FORGOTTEN = 1024
# The weight of a new value in the average time of a step that the guest does not measure itself, and the part of a
# deadline that is kept as a reserve.
_FRESH, _RESERVE = 0.1, 0.1


class LocalCandidates:
    """Has the methods of `CandidateClient`, and the same promise: `step` never raises.

    `model` describes the engine's model, and `tokenizer_json` is the content of that file. `sources`: those that may
    propose, by default all that need no draft.
    """

    def __init__(self, model: model_pb2.Model, tokenizer_json: bytes, sources: Sequence[str] = ()) -> None:
        self.counts = CandidateCounts()
        self._description, self._tokenizer_json, self._sources = model, tokenizer_json, tuple(sources)
        self._guest: Guest | None = None
        self._budget = Budget(GuestLimits())
        # Not used by two threads at once: an engine may close it while another thread of it generates.
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # One thread opens sequences: several would only take turns, and hold up the engine's.
        self._loop.set_default_executor(ThreadPoolExecutor(1, "draftbridge-opening"))
        # Runs the event loop where the engine's thread cannot or should not; only one of them at a time does.
        self._beside = ThreadPoolExecutor(1, "draftbridge-candidates")
        self._settled: Future[None] | None = None
        self._overhead_seconds = 0.0
        self._number = 0
        self._returned_at = 0.0
        self._failed = self._closed = self._tried = self._noted = False
        # By sequence: how many of its tokens the guest has; the step that last returned candidates, and their number.
        self._kept: dict[int, int] = {}
        self._returned: dict[int, tuple[int, int]] = {}

    def connect(self, timeout: float = 0.0) -> bool:
        """Reads the tokenizer, which takes a second or two. Returns whether that worked; if not, the log has why."""
        with self._lock:
            self._connect()
        return self.connected

    def _connect(self) -> None:
        if self._guest is None and not self._closed:
            self._tried = True
            try:
                self._guest = self._open()
                self.counts.connection_count += 1
            except DraftBridgeError as error:
                _log.warning("no candidates; the engine goes on without: %s", error)
            except Exception:
                _log.exception("a bug in DraftBridge; the engine goes on without candidates")

    @property
    def connected(self) -> bool:
        """Whether there can be candidates."""
        return self._guest is not None

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        ended: Iterable[int] = (),
        deadline: float = DEFAULT_DEADLINE_SECONDS,
        engine_seconds: float | None = None,
        forward_token_count: int = 0,
    ) -> dict[int, Candidates]:
        """Reports a forward, and returns candidates by sequence id; see `CandidateClient.step`."""
        with self._lock:
            return self._step(sequences, ended, deadline, engine_seconds, forward_token_count)

    def _step(
        self,
        sequences: Sequence[SequenceStep],
        ended: Iterable[int],
        deadline: float,
        engine_seconds: float | None,
        forward_token_count: int,
    ) -> dict[int, Candidates]:
        began = time.monotonic()
        try:
            self.counts.step_count += 1
            if not self._tried:
                self._connect()
            if self._guest is None:
                return {}
            if engine_seconds is None:
                engine_seconds = began - self._returned_at if self._returned_at else 0.0
            if settled := self._settled:
                self._settled = None
                settled.result()
            self._number += 1
            update = StepUpdate(
                self._number,
                tuple(map(self._update, sequences)),
                tuple(ended),
                max(int(((1 - _RESERVE) * deadline - self._overhead_seconds) * 1e9), 0),
                int(engine_seconds * 1e9),
                forward_token_count,
            )
            for id_ in update.ended:
                self._kept.pop(id_, None)
                self._returned.pop(id_, None)
            guest = self._guest
            later = len(update.sequences) > _MAX_SETTLED_AT_ONCE
            found = self._candidates(self._run(_step(guest, update, settles=not later)))
            if len(self._kept) > len(guest.held) + _MAX_FORGOTTEN:
                self._kept = {id_: self._kept[id_] for id_ in guest.held if id_ in self._kept}
                self._returned = {id_: self._returned[id_] for id_ in guest.held if id_ in self._returned}
            overhead = time.monotonic() - began - guest.elapsed_ns / 1e9
            self._overhead_seconds += _FRESH * (overhead - self._overhead_seconds)
            if later:
                self._settled = self._beside.submit(lambda: self._loop.run_until_complete(guest.settle()))
            return found
        except Exception:
            if not self._failed:
                self._failed = True
                _log.exception("a bug in DraftBridge; the engine goes on without candidates")
            return {}
        finally:
            self._returned_at = time.monotonic()
            self.counts.waited_seconds += self._returned_at - began

    def close(self) -> None:
        """Forgets all sequences. `step` returns nothing afterwards."""
        with self._lock:
            if self._closed:
                return
            guest, self._guest, self._closed = self._guest, None, True
            if self._settled:
                wait([self._settled])
            self._run(_end(guest))
            self._beside.shutdown()
            self._loop.close()

    def _open(self) -> Guest:
        check_engine(self._description, self._sources)
        description = model_pb2.Model()
        description.CopyFrom(self._description)
        description.tokenizer_sha256 = hashlib.sha256(self._tokenizer_json).hexdigest()
        model = codec.read_model(description, Vocabulary(self._tokenizer_json))
        shared = GuestOpening(model, TargetEstimates(model.forward_costs), self._sources, alone=True)

        async def open_(ids: Sequence[int], generated_token_count: int, _: Draft | None) -> GuestSequence:
            return await asyncio.to_thread(open_sequence, shared, ids, generated_token_count, None)

        guest = Guest(
            model,
            open_,
            BatchCosts(model.forward_costs),
            on_held=lambda id_, count: self._budget.hold(guest, id_, count),
            on_ended=lambda id_, _: self._budget.drop(guest, id_),
        )
        return guest

    def _update(self, one: SequenceStep) -> SequenceUpdate:
        """Returns what a sequence has gained, and notes that the guest has it."""
        id_, count = one.sequence_id, len(one.token_ids)
        held = self._kept.get(id_, 0)
        kept = min(held, count if one.kept_token_count is None else one.kept_token_count, count)
        new = one.token_ids[kept:]
        self._kept[id_] = count
        step, returned = self._returned.pop(id_, (0, 0))
        if kept < held:
            returned = 0
        elif one.verified_count is not None:
            returned = min(returned, one.verified_count)
        return SequenceUpdate(
            id_,
            kept,
            tuple(new.tolist() if hasattr(new, "tolist") else new),
            0 if kept else one.generated_token_count,
            one.max_candidates,
            step if returned else 0,
            returned,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the event loop until `work` is done."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        return self._beside.submit(self._loop.run_until_complete, work).result()

    def _candidates(self, answer: Answer) -> dict[int, Candidates]:
        if answer.note and not self._noted:
            self._noted = True
            _log.warning("no candidates for some sequences: %s", answer.note)
        for id_ in answer.unknown:
            self._kept.pop(id_, None)
        found = {}
        for one in answer.proposed:
            ids = one.offer.token_ids[: one.width]
            found[one.sequence_id] = Candidates(ids, one.offer.sources[: one.width])
            self._returned[one.sequence_id] = answer.number, len(ids)
            self.counts.candidate_count += len(ids)
        self.counts.answer_count += 1
        return found


async def _step(guest: Guest, update: StepUpdate, *, settles: bool) -> Answer:
    if any(one.opening and not one.opening.done() for one in guest.held.values()):
        for _ in range(_TURNS_TO_OPEN):
            await asyncio.sleep(0)
    answer = await guest.step(update)
    if settles:
        await guest.settle()
    return answer


async def _end(guest: Guest | None) -> None:
    if guest:
        opening = [one.opening for one in guest.held.values() if one.opening]
        guest.close()
        await asyncio.gather(*opening, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
