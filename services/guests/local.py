"""Gives an engine candidates from its own text, in its own process: `bridge.guest` without a bridge, and so no draft.

Used in place of a `CandidateClient` by adapters whose bridge is "local". No message is sent, and no thread waits, so a
step costs less than a millisecond for one sequence. After a fork, each process has candidates of its own.
"""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from bridge.errors import DraftBridgeError
from bridge.guest import MAX_GAINED_TOKENS, Guest
from bridge.guest_sequence import GuestOpening, GuestSequence
from bridge.guest_step import Answer, SequenceUpdate, StepUpdate
from bridge.planning.batch import BatchCosts
from bridge.planning.estimates import TargetEstimates
from bridge.sources.learned import LearnedSource
from bridge.sources.ngrams import TABLE_BYTES, NgramMemory
from bridge.text.models import Model
from bridge.text.vocabulary import Vocabulary
from draftbridge.candidate_stream import CandidateCounts, Candidates, SequenceStep
from draftbridge.candidates import DEFAULT_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS
from draftbridge.v1 import model_pb2
from services.guests.budget import Budget, GuestLimits
from services.guests.opening import check_engine
from services.rpc import codec

T = TypeVar("T")

_log = logging.getLogger("draftbridge")

# A sequence of up to this number of tokens is opened in a step, which takes a millisecond, a longer one in a thread.
_MAX_TOKENS_AT_ONCE = 8000
# The part of a step's deadline in which sequences are opened. Those for which it is too short wait for later steps.
# Opening one is assumed to take as long as this many tokens more, each this many seconds until that is measured.
_OPENING, _MORE_TOKENS, _TOKEN_SECONDS = 0.3, 800, 2e-7
# Turns of the event loop in which an opened sequence begins to take part.
_TURNS_TO_OPEN = 3
# With more sequences, what follows a step is done in a thread while the engine computes. With fewer it takes less time
# than moving everything to another core's cache.
_MAX_SETTLED_AT_ONCE = 8
# Sequences that the guest has forgotten and whose engine may still name them are remembered up to this number.
_MAX_FORGOTTEN = 1024
# The weight of a new value in the average time of a step that the guest does not measure itself, and the part of a
# deadline that is kept as a reserve.
_FRESH, _RESERVE = 0.1, 0.1
# Such a time counts as at most this multiple of the average, or of the shortest: the machine may have stalled.
_MAX_DELAY_RATIO, _MIN_OVERHEAD_SECONDS = 10.0, 1e-4
# The steps after which the sequences that were not named for long are ended.
_SWEEP_STEPS = 1000

# Event loops of a process that this one was forked from, and what belongs to them.
_of_other_processes: list[Any] = []


class LocalCandidates:
    """Has the methods of `CandidateClient`, and the same promise: `step` never raises.

    `model` describes the engine's model, and `tokenizer_json` is the content of that file. `sources`: those that may
    propose, by default all that need no draft and learn nothing from the engine's outputs.
    """

    def __init__(self, model: model_pb2.Model, tokenizer_json: bytes, sources: Sequence[str] = ()) -> None:
        self.counts = CandidateCounts()
        self._description, self._tokenizer_json, self._sources = model, tokenizer_json, tuple(sources)
        # Not used by two threads at once: an engine may close it while another thread of it generates.
        self._lock = threading.Lock()
        self._limits = GuestLimits()
        self._closed = self._noted = self._failed = False
        self._model: Model | None = None
        self._begin()

    def _begin(self) -> None:
        """Starts without any sequence."""
        self._loop = asyncio.new_event_loop()
        # Runs the event loop where the engine's thread cannot or should not; only one of them at a time does.
        self._beside = ThreadPoolExecutor(1, "draftbridge-candidates")
        self._tried = False
        self._guest: Guest | None = None
        self._budget = Budget(self._limits)
        self._settled: Future[None] | None = None
        # Whether sequences begin in this step; the expected time to open them, and that of one token.
        self._begins = False
        self._opening_seconds, self._token_seconds = 0.0, _TOKEN_SECONDS
        self._overhead_seconds = self._returned_at = 0.0
        self._number = 0
        # By sequence: how many of its tokens the guest has; the step that last returned candidates, and their number.
        self._kept: dict[int, int] = {}
        self._returned: dict[int, tuple[int, int]] = {}
        self._process = os.getpid()

    def connect(self, timeout: float = 0.0) -> bool:
        """Reads the tokenizer, which takes a second or two. Returns whether that worked; if not, the log has why."""
        with self._alone():
            self._connect()
        return self.connected

    def _connect(self) -> None:
        if self._guest is None and not self._closed:
            self._tried = True
            try:
                self._guest = self._open()
                self.counts.connection_count += 1
                _log.info("candidates from this process, with no draft")
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
        began = time.monotonic()
        try:
            with self._alone():
                if not self._tried:
                    self._connect()
                self.counts.step_count += 1
                if self._guest is None:
                    return {}
                if engine_seconds is None:
                    engine_seconds = began - self._returned_at if self._returned_at else 0.0
                deadline = min(deadline, MAX_DEADLINE_SECONDS)
                return self._step(self._guest, sequences, ended, deadline, engine_seconds, forward_token_count)
        except Exception:
            if not self._failed:
                self._failed = True
                _log.exception("a bug in DraftBridge; the engine goes on without candidates")
            return {}
        finally:
            self._returned_at = time.monotonic()
            self.counts.waited_seconds += self._returned_at - began

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads out. After a fork, begins anew."""
        if self._process != os.getpid():
            # What this process shares with the other one must not be closed, or the other one waits for ever.
            shared = self._loop, self._guest
            self._begin()
            _of_other_processes.append(shared)
            self._lock = threading.Lock()
        with self._lock:
            yield

    def _step(
        self,
        guest: Guest,
        sequences: Sequence[SequenceStep],
        ended: Iterable[int],
        deadline: float,
        engine_seconds: float,
        forward_token_count: int,
    ) -> dict[int, Candidates]:
        began = time.monotonic()
        if settled := self._settled:
            self._settled = None
            settled.result()
        self._number += 1
        ended = tuple(ended)
        for id_ in ended:
            self._forget(id_)
        self._begins, self._opening_seconds = False, 0.0
        updates = tuple(self._update(one, _OPENING * deadline) for one in sequences)
        spent = time.monotonic() - began + self._opening_seconds + self._overhead_seconds
        left = max((1 - _RESERVE) * deadline - spent, 0.0)
        update = StepUpdate(
            self._number, updates, ended, int(left * 1e9), int(engine_seconds * 1e9), forward_token_count
        )
        later = len(updates) > _MAX_SETTLED_AT_ONCE
        asked = time.monotonic()
        work = self._answer(guest, update, settles=not later)
        waits = self._begins or guest.opening
        limits = {one.sequence_id: one.max_candidates for one in sequences if one.fixed_width}
        found = self._candidates(self._run(work) if waits else _result(work), limits)
        if not self._begins:
            overhead = time.monotonic() - asked - guest.elapsed_ns / 1e9
            limit = _MAX_DELAY_RATIO * max(self._overhead_seconds, _MIN_OVERHEAD_SECONDS)
            self._overhead_seconds += _FRESH * (min(overhead, limit) - self._overhead_seconds)
        if len(self._kept) > len(guest.held) + _MAX_FORGOTTEN:
            for id_ in self._kept.keys() - guest.held.keys():
                self._forget(id_)
        if self._number % _SWEEP_STEPS == 0:
            guest.end_idle(int(self._limits.idle_seconds * 1e9))
        self.counts.late_count += 0 < deadline < time.monotonic() - began
        if later:
            self._settled = self._beside.submit(lambda: _result(guest.settle()))
        return found

    async def _answer(self, guest: Guest, update: StepUpdate, *, settles: bool) -> Answer:
        answer = await guest.step(update)
        if guest.opening:
            for _ in range(_TURNS_TO_OPEN):
                await asyncio.sleep(0)
        if settles:
            await guest.settle()
        return answer

    def close(self) -> None:
        """Forgets all sequences. `step` returns nothing afterwards."""
        with self._alone():
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
        model = self._model = self._model or self._read_model()
        memory = NgramMemory(TABLE_BYTES) if LearnedSource.name in self._sources else None
        shared = GuestOpening(
            model, TargetEstimates(model.forward_costs), self._sources, memory=memory, tenant="engine"
        )

        async def open_(ids: Sequence[int], generated_token_count: int) -> GuestSequence:
            if len(ids) > _MAX_TOKENS_AT_ONCE:
                return await asyncio.to_thread(GuestSequence, shared, ids, generated_token_count)
            began = time.monotonic()
            sequence = GuestSequence(shared, ids, generated_token_count)
            seconds = (time.monotonic() - began) / (len(ids) + _MORE_TOKENS)
            self._token_seconds += _FRESH * (seconds - self._token_seconds)
            return sequence

        guest = Guest(
            model,
            open_,
            BatchCosts(model.forward_costs),
            on_held=lambda id_, token_count: self._budget.hold(guest, id_, token_count),
            on_ended=lambda id_, _: self._budget.drop(guest, id_),
        )
        return guest

    def _read_model(self) -> Model:
        """Takes a second or two, so that a process that was forked goes on with what was read before."""
        description = model_pb2.Model()
        description.CopyFrom(self._description)
        description.tokenizer_sha256 = hashlib.sha256(self._tokenizer_json).hexdigest()
        return codec.read_model(description, Vocabulary(self._tokenizer_json))

    def _update(self, one: SequenceStep, opening_seconds: float) -> SequenceUpdate:
        """Returns what a sequence has gained, and notes that the guest has it: nothing if its turn has not come."""
        id_, count = one.sequence_id, len(one.token_ids)
        held = self._kept.get(id_, 0)
        kept = min(held, count if one.kept_token_count is None else one.kept_token_count, count)
        begins = kept < max(held, 1) or count - kept > MAX_GAINED_TOKENS
        self._begins = self._begins or begins
        if begins and count <= _MAX_TOKENS_AT_ONCE:  # the guest opens it in this step
            expected = self._opening_seconds + self._token_seconds * (count + _MORE_TOKENS)
            if self._opening_seconds and expected > opening_seconds:
                self._forget(id_)
                return SequenceUpdate(id_, 0, ())
            self._opening_seconds = expected
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

    def _forget(self, id_: int) -> None:
        self._kept.pop(id_, None)
        self._returned.pop(id_, None)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the event loop until `work` is done."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        return self._beside.submit(self._loop.run_until_complete, work).result()

    def _candidates(self, answer: Answer, limits: Mapping[int, int | None]) -> dict[int, Candidates]:
        """Returns the candidates of an answer for one forward. `limits`: those of sequences with a fixed width."""
        if answer.note and not self._noted:
            self._noted = True
            _log.warning("no candidates for some sequences: %s", answer.note)
        for id_ in answer.unknown:
            self._forget(id_)
        found = {}
        for one in answer.proposed:
            count = limits.get(one.sequence_id, one.width)
            ids = one.offer.token_ids[:count]
            found[one.sequence_id] = Candidates(ids, one.offer.sources[:count])
            self._returned[one.sequence_id] = answer.number, len(ids)
            self.counts.candidate_count += len(ids)
        self.counts.answer_count += 1
        return found


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Runs what waits for nothing, but may give way to other work. An event loop would take 0.1 ms."""
    try:
        while work.send(None) is None:
            pass
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("it waits")


async def _end(guest: Guest | None) -> None:
    if guest:
        opening = [one.opening for one in guest.held.values() if one.opening]
        guest.close()
        await asyncio.gather(*opening, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
