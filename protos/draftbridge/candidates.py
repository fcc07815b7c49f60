"""Gives an engine with its own loop candidates from a bridge: the client of `CandidateService`.

>>> from draftbridge.candidates import CandidateClient, SequenceStep
>>> client = CandidateClient("localhost:50050", model, tokenizer_json)  # `model`: a draftbridge.v1 Model
>>> found = client.step([SequenceStep(7, token_ids=[1, 15043, 29892])])  # after each forward
>>> found[7].token_ids if 7 in found else ()
(3186, 29991)

An adapter calls `step` after each forward of its engine, verifies what it returns, and calls `step` again. The engine
never notices a bridge that is slow, hung or gone, except that it gets no candidates:

* `step` never raises, and blocks no longer than its deadline, unless a long sequence begins: its tokens are converted
  first, 128,000 of them in 17 to 51 ms. Of several such sequences, those for which the deadline is too short begin with
  later steps. A bridge that has missed a few deadlines in a row is waited for only now and then, until it answers in
  time again.
* An answer that arrives too late is used by a later `step`, as far as the tokens since then agree with it.
* A lost connection is opened again, with growing pauses. The sequences are then sent from the beginning, so an adapter
  keeps no record of what the bridge knows.
* Each problem is logged once, under the logger "draftbridge".

`draftbridge.guests.client` has the same without a bridge.

A client works in a thread of its own, which starts with the first `connect` or `step`: construct it in any process, but
call it in one only. In a process that is forked afterwards there are no candidates. `step` must be called by one thread
at a time.
"""

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from draftbridge.candidate_stream import (
    CLOSED,
    Answer,
    CandidateCounts,
    Candidates,
    EngineStream,
    Patience,
    SentStep,
    SequenceStep,
)
from draftbridge.errors import CallError
from draftbridge.security import CHANNEL_OPTIONS, Credentials, open_channel
from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc, model_pb2

__all__ = ["DEFAULT_DEADLINE_SECONDS", "CandidateClient", "CandidateCounts", "Candidates", "SequenceStep"]

_log = logging.getLogger("draftbridge")

DEFAULT_DEADLINE_SECONDS = 0.002
# A longer deadline counts as this one, which is the contract's longest.
MAX_DEADLINE_SECONDS = 10.0
# Seconds between two tries to connect: the first, and the longest. Each is twice as long as the one before.
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0
# The same after a refusal, which may last, such as an unusable tokenizer.
_MAX_REFUSED_PAUSE_SECONDS = 30.0
_CHUNK_BYTES = 1 << 18
# Steps without an answer after which no more are sent, and the seconds after which the connection counts as hung.
_MAX_UNANSWERED, _HUNG_SECONDS = 64, 10.0
# The part of a deadline in which long sequences begin to be converted. The rest waits for later steps.
_CONVERTING = 0.5
# The weight of a new value in the average time of messages, and the part of a deadline that is kept as a reserve.
_FRESH, _RESERVE = 0.1, 0.1
# Such a time counts as at most this multiple of the average, or of the shortest: the bridge may have stalled.
_MAX_DELAY_RATIO, _MIN_OVERHEAD_SECONDS = 10.0, 1e-4
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)


class CandidateClient:
    """Asks the bridge at `address`, HOST:PORT, for candidates; see the module.

    `model` describes the engine's model, see `ProposeOpen.model` in the contract; its checksum is filled in from
    `tokenizer_json`, the content of that file, which is sent only to a bridge that does not have it. Without it, the
    bridge must know `model.tokenizer_sha256` from a model service or from another engine. `engine`: a name that no
    other engine of the bridge has; by default one made of the host's name and the process. `draft`, `sources`: which
    of the bridge's drafts and sources may propose; by default its first draft, and all sources.
    """

    def __init__(
        self,
        address: str,
        model: model_pb2.Model,
        tokenizer_json: bytes | None = None,
        *,
        engine: str = "",
        draft: str = "",
        sources: Sequence[str] = (),
        credentials: Credentials | None = None,
    ) -> None:
        self._address, self._credentials = address, credentials
        self._engine, self._instance = engine, secrets.randbits(64)
        self._draft, self._sources = draft, tuple(sources)
        self._model = model_pb2.Model()
        self._model.CopyFrom(model)
        self._tokenizer_json = tokenizer_json
        if tokenizer_json is not None:
            self._model.tokenizer_sha256 = hashlib.sha256(tokenizer_json).hexdigest()
        self.counts = CandidateCounts()
        self._changed = threading.Condition()
        # The process in which the thread runs.
        self._process = 0
        self._stream: EngineStream | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._logged: set[str] = set()
        self._patience = Patience()
        self._overhead_seconds, self._returned_at = 0.001, 0.0

    def connect(self, timeout: float) -> bool:
        """Starts to connect, and returns whether the bridge has accepted the engine within `timeout` seconds."""
        with self._changed:
            return self._start() and self._changed.wait_for(lambda: self._open_stream is not None, timeout)

    @property
    def connected(self) -> bool:
        """Whether the bridge has accepted the engine, and the connection is not lost."""
        return self._open_stream is not None

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        ended: Iterable[int] = (),
        deadline: float = DEFAULT_DEADLINE_SECONDS,
        engine_seconds: float | None = None,
        forward_token_count: int = 0,
    ) -> dict[int, Candidates]:
        """Reports a forward, and returns candidates by sequence id; sequences without any are missing.

        `ended`: sequences that no later step will name. `deadline`: the most seconds to block, at most 10; 0 only
        reports, and returns what earlier answers still have. `engine_seconds`: what the forward cost the engine, from
        the candidates to the tokens; by default the time since the last `step` returned. `forward_token_count`: the
        tokens of all sequences that the forward ran, prompts included; by default one for each sequence and each
        candidate.
        """
        started = time.monotonic()
        try:
            if engine_seconds is None:
                engine_seconds = started - self._returned_at if self._returned_at else 0.0
            if not self._start():
                return {}
            deadline = min(deadline, MAX_DEADLINE_SECONDS)
            return self._step(sequences, ended, started, deadline, engine_seconds, forward_token_count)
        except Exception:
            if "bug" not in self._logged:
                self._logged.add("bug")
                _log.exception("a bug in draftbridge.candidates; the engine goes on without candidates")
            return {}
        finally:
            self._returned_at = time.monotonic()
            self.counts.waited_seconds += self._returned_at - started

    def close(self) -> None:
        """Ends the connection; the bridge then forgets the engine's sequences. `step` returns nothing afterwards."""
        self._closed.set()
        if self._process != os.getpid():
            return
        with self._changed:
            stream, thread = self._stream, self._thread
        if stream:
            stream.outbox.put(CLOSED)
        if thread:
            thread.join(timeout=2.0)

    @property
    def _open_stream(self) -> EngineStream | None:
        stream = self._stream
        return stream if stream and stream.opened and self._process == os.getpid() else None

    def _start(self) -> bool:
        """Starts the thread, if there is none. Returns whether it can run in this process."""
        if self._thread is None and not self._closed.is_set():
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._run, name="draftbridge-candidates", daemon=True)
            self._thread.start()
        if self._thread and self._process != os.getpid():
            self._log_once("no candidates in a process that was forked after connecting: connect after the fork")
            return False
        return True

    def _step(
        self,
        sequences: Sequence[SequenceStep],
        ended: Iterable[int],
        started: float,
        deadline: float,
        engine_seconds: float,
        forward_token_count: int,
    ) -> dict[int, Candidates]:
        self.counts.step_count += 1
        with self._changed:
            if (stream := self._open_stream) is None:
                return {}
            stream.ended.update(ended)
            for id_ in stream.ended:
                stream.forget(id_)
            for one in sequences:
                stream.note_kept(one)
            if len(stream.sent) >= _MAX_UNANSWERED:
                return self._found(stream, sequences)
            stream.last_step += 1
            request = candidate_pb2.ProposeStep(
                step=stream.last_step,
                sequences=[stream.gained(one) for one in stream.fitting(sequences, started + _CONVERTING * deadline)],
                ended_sequence_ids=stream.ended,
                engine_ns=int(engine_seconds * 1e9),
                forward_token_count=forward_token_count,
            )
            stream.ended.clear()
            stream.trim(len(sequences))
            now = time.monotonic()
            usable = (1 - _RESERVE) * deadline - self._overhead_seconds - (now - started)
            request.deadline_us = max(int(usable * 1e6), 0)
            until = started + deadline
            can_verify = any(one.max_candidates != 0 for one in sequences)
            awaited = can_verify and now < until and self._patience.waits()
            stream.sent[request.step] = SentStep(now, until if deadline else 0.0, awaited)
            stream.outbox.put(candidate_pb2.ProposeRequest(step=request))
            if awaited:
                self._changed.wait_for(
                    lambda: stream.answered_step >= request.step or self._stream is not stream, until - time.monotonic()
                )
                self._patience.note(in_time=stream.answered_step >= request.step)
            return self._found(stream, sequences)

    def _found(self, stream: EngineStream, sequences: Sequence[SequenceStep]) -> dict[int, Candidates]:
        """Returns what the last answers have for the present ends of the sequences."""
        found = {}
        for one in sequences:
            answer = stream.answers.get(one.sequence_id)
            if answer is None or self._stream is not stream:
                continue
            if (chosen := answer.after(one)) is None:
                continue
            found[one.sequence_id] = chosen
            count = len(chosen.token_ids)
            stream.returned[one.sequence_id] = answer.step, count
            self.counts.candidate_count += count
        return found

    def _run(self) -> None:
        """Connects again and again, until the client is closed."""
        pause = _PAUSE_SECONDS
        while not self._closed.is_set():
            stream, began = EngineStream(), time.monotonic()
            with self._changed:
                self._stream = stream
            try:
                self._serve(stream)
                problem, kind, refused = "the bridge ended the stream", "gone", False
            except grpc.RpcError as error:
                failure = CallError.from_rpc(error, self._address)
                problem, refused = stream.problem or str(failure), failure.code in _REFUSALS
                kind = "gone" if stream.problem or failure.reason == "SERVICE_UNREACHABLE" else ""
            except Exception as error:  # wrong credentials, or a bug
                problem, kind, refused = f"{type(error).__name__}: {error}", "", True
            finally:
                stream.outbox.put(CLOSED)
                with self._changed:
                    was_open, self._stream = stream.opened, None
                    self._changed.notify_all()
            if self._closed.is_set():
                return
            # A bridge that stops breaks off its answer first, and then does not answer: that is one interruption.
            self._log_once(f"no candidates from {self._address}; the engine goes on without: {problem}", kind)
            if was_open and time.monotonic() - began > _MAX_PAUSE_SECONDS:
                pause = _PAUSE_SECONDS
            self._closed.wait(pause)
            pause = min(2 * pause, _MAX_REFUSED_PAUSE_SECONDS if refused else _MAX_PAUSE_SECONDS)

    def _serve(self, stream: EngineStream) -> None:
        """Opens a connection and takes its answers until it ends. Raises what ended it."""
        with open_channel(self._address, self._credentials, _OPTIONS) as channel:
            call = candidate_pb2_grpc.CandidateServiceStub(channel).Propose(stream.requests())
            watch = threading.Thread(target=self._watch, args=(stream, call), name="draftbridge-watch", daemon=True)
            watch.start()
            try:
                opening = candidate_pb2.ProposeOpen(
                    engine=self._engine or f"{socket.gethostname()}-{os.getpid()}-{self._instance & 0xFFFF:04x}",
                    instance=self._instance,
                    model=self._model,
                    draft=self._draft,
                    sources=self._sources,
                )
                stream.outbox.put(candidate_pb2.ProposeRequest(open=opening))
                for response in call:
                    if response.WhichOneof("kind") == "opened":
                        self._on_opened(stream, response.opened)
                    else:
                        self._on_candidates(stream, response.candidates)
            finally:
                call.cancel()
                watch.join(timeout=1.0)

    def _watch(self, stream: EngineStream, call: Any) -> None:
        """Ends a call that hangs, or whose client is closed."""
        while call.is_active():
            with suppress(ValueError, RuntimeError):
                oldest = min((one.at for one in list(stream.sent.values())), default=time.monotonic())
                if time.monotonic() - oldest > _HUNG_SECONDS:
                    stream.problem = f"the bridge has not answered for {_HUNG_SECONDS:.0f} seconds; connecting again"
                    call.cancel()
            if self._closed.wait(0.2):
                call.cancel()

    def _on_opened(self, stream: EngineStream, opened: candidate_pb2.ProposeOpened) -> None:
        if opened.wants_tokenizer:
            data = self._tokenizer_json
            if data is None:
                raise ValueError(
                    f"the bridge at {self._address} does not have the tokenizer {self._model.tokenizer_sha256}: give "
                    "the client its tokenizer_json"
                )
            for start in range(0, len(data), _CHUNK_BYTES):
                piece = candidate_pb2.ProposeTokenizer(
                    chunk=data[start : start + _CHUNK_BYTES], last=start + _CHUNK_BYTES >= len(data)
                )
                stream.outbox.put(candidate_pb2.ProposeRequest(tokenizer=piece))
            return
        draft = f"the draft {opened.draft}" if opened.draft else "no draft"
        self._log_once(f"candidates from {self._address}, with {draft}", level=logging.INFO)
        with self._changed:
            stream.opened, stream.max_sequence_count = True, opened.max_sequence_count
            self._patience.note(in_time=True)
            self.counts.connection_count += 1
            self._changed.notify_all()

    def _on_candidates(self, stream: EngineStream, message: candidate_pb2.ProposeCandidates) -> None:
        now = time.monotonic()
        with self._changed:
            if sent := stream.sent.get(message.step):
                if sent.awaited:
                    self._observe_overhead(sent, now, message.elapsed_us / 1e6)
                if now <= sent.until:
                    self._patience.note(in_time=True)
                elif sent.until:
                    self.counts.late_count += 1
            for number in [number for number in stream.sent if number <= message.step]:
                del stream.sent[number]
            if not stream.answered_step:  # the connection works, so the next problem is a new one
                self._logged.clear()
            stream.answered_step = max(stream.answered_step, message.step)
            if message.note:
                # The note names a sequence; one of them is enough.
                self._log_once(f"no candidates from {self._address} for some sequences: {message.note}", "note")
            for id_ in message.unknown_sequence_ids:
                if message.step >= stream.valid_from.get(id_, 0):  # otherwise a later answer counts
                    stream.forget(id_)
            for one in message.sequences:
                id_ = one.sequence_id
                if id_ not in stream.kept or message.step < stream.valid_from.get(id_, 0):
                    continue
                if answer := Answer.read(message.step, one, self._model.vocabulary_size):
                    stream.answers[id_] = answer
                else:  # an engine could fail with such ids
                    self._log_once(
                        f"no candidates from {self._address} for some sequences: it proposes ids that the model lacks, "
                        "or sources that do not fit them; run a bridge of this DraftBridge's version",
                        "candidates",
                    )
            if stream.valid_from:
                stream.valid_from = {id_: step for id_, step in stream.valid_from.items() if step > message.step}
            self.counts.answer_count += 1
            self._changed.notify_all()

    def _observe_overhead(self, sent: SentStep, now: float, elapsed: float) -> None:
        """Records how long the messages of a step took, besides the bridge's `elapsed` seconds.

        While the engine computes, its threads and this one keep each other waiting. So of a late answer only what was
        left of the deadline counts, as the least that the messages took.
        """
        overhead = min(now, sent.until) - sent.at - elapsed
        known = self._overhead_seconds
        overhead = max(overhead, known) if now > sent.until else overhead
        overhead = min(overhead, _MAX_DELAY_RATIO * max(known, _MIN_OVERHEAD_SECONDS))
        self._overhead_seconds += _FRESH * (overhead - known)

    def _log_once(self, text: str, kind: str = "", level: int = logging.WARNING) -> None:
        if (kind or text) not in self._logged:
            self._logged.add(kind or text)
            _log.log(level, "%s", text)
