"""Chooses among the replicas of a target, and moves a request to another one when its replica fails.

Replicas are services that serve the same model with the same tokenizer. A request goes to one that is not broken, is
among the least loaded and holds the longest part of the prompt in its cache. If its replica fails, another one resumes
from the committed tokens; noise that anyone can recompute makes the text the same.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from time import perf_counter_ns

import grpc
from cachetools import LRUCache
from grpc import aio

from bridge.errors import DraftBridgeError, NotReady, TargetFault, Unreachable
from bridge.ports import Candidates, Grant, Pass, Run
from bridge.request import Request
from bridge.text.chat import Chat
from services.bridge.endpoint import Endpoint
from services.bridge.remote import RemoteVerifier
from services.errors import (
    KeyLimitReached,
    ModelChanged,
    ModelNotFound,
    Overloaded,
    SandboxBusy,
    SlotsExhausted,
    StreamEnded,
)
from services.rpc.status import RemoteError, code_of

# A prompt's beginning is remembered in blocks: their bytes, the most of one prompt, and the most of each replica.
_BLOCK_BYTES, _MAX_BLOCKS, _REMEMBERED_BLOCKS = 256, 128, 8192
# A replica may have this many more requests than the least loaded one and still be chosen for what its cache holds.
_AFFINITY_REQUESTS = 1
# The pause after a failure, doubled by each further one.
_PAUSE_NS, _MAX_PAUSE_NS = 500_000_000, 30_000_000_000
# What another replica may do better, see `is_of_replica`. Other errors are the request's own. `_SERVER_LIMITS` are of
# the whole replica, or of the bridge's key there; their texts must not be taken for those of the bridge's own limits.
_LOST_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
# Those of a replica that has a bug, or is a server of another kind or version.
_FAULTY_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
_SERVER_LIMITS = (Overloaded.reason, KeyLimitReached.reason)
_MOVED_REASONS = (
    *(error.reason for error in (SlotsExhausted, SandboxBusy, ModelChanged, ModelNotFound)),
    *_SERVER_LIMITS,
)


@dataclass
class _Replica:
    """What is known of one address. `failures`: in a row; `retry_ns`: when one request may try it again; `trial`: that
    request, since `trial_ns`.

    `retired`: it left its host name and is forgotten with its last request.
    """

    active: int = 0
    failures: int = 0
    retry_ns: int = 0
    trial: object = None
    trial_ns: int = 0
    retired: bool = False
    blocks: "LRUCache[bytes, bool]" = field(default_factory=lambda: LRUCache(_REMEMBERED_BLOCKS))

    def is_on_trial(self, now: int) -> bool:
        """Returns whether a request tries it. One that has shown nothing for the longest pause counts no longer."""
        return self.trial is not None and now < self.trial_ns + _MAX_PAUSE_NS


class Balancer:
    """Knows load, failures and cached prompts of all replicas. `clock` returns nanoseconds.

    `request`: an object that stands for one request on a replica.
    """

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}

    def choose(self, endpoints: Sequence[Endpoint], prompt: Sequence[bytes], request: object) -> Endpoint:
        """Returns the endpoint for a prompt, given as `blocks_of` returns it; `endpoints` must not be empty.

        A broken replica gets one request when its pause is over, before all others: if it waited until it is the best
        choice, the caches of the others would keep it out for ever. If all are broken, the one whose pause ends first
        is chosen.
        """
        now = self._clock()
        known = [(endpoint, self._of(endpoint)) for endpoint in endpoints]
        due = [one for one in known if one[1].failures and one[1].retry_ns <= now and not one[1].is_on_trial(now)]
        if due:
            endpoint, replica = min(due, key=lambda one: one[1].retry_ns)
            replica.trial, replica.trial_ns = request, now
            return endpoint
        working = [one for one in known if not one[1].failures]
        if not working:
            return min(known, key=lambda one: one[1].retry_ns)[0]
        least = min(replica.active for _, replica in working)
        near = [one for one in working if one[1].active <= least + _AFFINITY_REQUESTS]

        def preference(one: tuple[Endpoint, _Replica]) -> tuple[int, int]:
            held = sum(1 for _ in takewhile(one[1].blocks.__contains__, prompt))
            return -held, one[1].active

        return min(near, key=preference)[0]

    def opened(self, endpoint: Endpoint, prompt: Sequence[bytes]) -> None:
        """Counts a request on a replica."""
        replica = self._of(endpoint)
        replica.active += 1
        replica.retired = False
        for block in reversed(prompt):  # the beginning, which is shared most, is forgotten last
            replica.blocks[block] = True

    def closed(self, endpoint: Endpoint, request: object) -> None:
        """Counts a request on a replica as gone."""
        replica = self._of(endpoint)
        replica.active -= 1
        if replica.trial is request:
            replica.trial = None
        self._forget(endpoint.address, replica)

    def retire(self, address: str) -> None:
        """Forgets a replica that gets no more requests when its last request has ended."""
        if replica := self._replicas.get(address):
            replica.retired = True
            self._forget(address, replica)

    def _forget(self, address: str, replica: _Replica) -> None:
        if replica.retired and not replica.active:
            del self._replicas[address]

    def on_success(self, endpoint: Endpoint) -> None:
        """Records that a replica works."""
        replica = self._of(endpoint)
        replica.failures = 0
        replica.trial = None

    def on_failure(self, endpoint: Endpoint, request: object) -> Callable[[], None]:
        """Records that a replica failed: its caches are lost, and it gets no request for a while.

        One fault ends all requests on a replica: of one that is broken already, only its trial counts.
        Returns a function that takes the record back, for a fault that turns out to be the request's own.
        """
        replica = self._of(endpoint)
        if replica.failures and replica.trial is not request:
            return lambda: None
        before = replace(replica)
        pause_ns = min(_PAUSE_NS << min(replica.failures, 16), _MAX_PAUSE_NS)
        replica.failures += 1
        replica.retry_ns = self._clock() + pause_ns
        replica.trial = None
        replica.blocks = LRUCache(_REMEMBERED_BLOCKS)

        def take_back() -> None:
            if replica.failures == before.failures + 1:  # it has neither failed again nor worked meanwhile
                replica.failures, replica.retry_ns, replica.blocks = before.failures, before.retry_ns, before.blocks
                replica.trial = None

        return take_back

    def _of(self, endpoint: Endpoint) -> _Replica:
        return self._replicas.setdefault(endpoint.address, _Replica())


def blocks_of(request: Request) -> list[bytes]:
    """Returns hashes of ever longer beginnings of a request's input, one for each block of 256 bytes."""
    match request.input:
        case str() as text:
            data = text.encode(errors="replace")
        case Chat() as chat:
            data = "\0".join(f"{one.role}\0{one.content}" for one in chat.messages).encode(errors="replace")
        case ids:
            data = b"".join(id_.to_bytes(4) for id_ in ids[: _BLOCK_BYTES * _MAX_BLOCKS // 4])
    digest, found = blake2b(digest_size=16), []
    for start in range(0, min(len(data), _BLOCK_BYTES * _MAX_BLOCKS), _BLOCK_BYTES):
        digest.update(data[start : start + _BLOCK_BYTES])
        found.append(digest.digest())
    return found


def is_lost(error: DraftBridgeError) -> bool:
    """Returns whether an error means that a replica cannot be used now, rather than that it refuses the request."""
    return code_of(error) in _LOST_CODES


def is_of_replica(error: DraftBridgeError) -> bool:
    """Returns whether an error is one that another replica may not have: this one is lost, broken or full, or it serves
    another model now.
    """
    return is_lost(error) or is_broken(error) or error.reason in _MOVED_REASONS


def is_broken(error: DraftBridgeError) -> bool:
    """Returns whether an error is one for which a replica is left alone for a while.

    A replica that fails at once has the least load, and would otherwise get all requests.
    """
    if isinstance(error, StreamEnded):
        return False
    return is_lost(error) or code_of(error) in _FAULTY_CODES or error.reason == NotReady.reason


class ResumingVerifier:
    """Implements `bridge.ports.Verifier` over the replicas of a target, and counts the request as a load of one.

    `endpoints` returns the replicas that are connected now, `connect` opens a stream to one. `on_error` receives the
    errors of replicas. Each replica is tried once until one of them makes progress, so that a request that brings down
    its target does not bring down all of them again and again. If it fails alike on all of them, and they stay up, the
    fault is its own: they are not left alone for it.
    """

    def __init__(
        self,
        balancer: Balancer,
        endpoints: Callable[[], Sequence[Endpoint]],
        connect: Callable[[Endpoint], RemoteVerifier],
        on_error: Callable[[Endpoint, DraftBridgeError], None],
        prompt: Sequence[bytes],
    ) -> None:
        self._balancer, self._endpoints, self._connect, self._on_error = balancer, endpoints, connect, on_error
        self._prompt = prompt
        self._tried: set[str] = set()
        # Of the failures since a replica made progress: how to take each back, and the codes.
        self._failures: list[Callable[[], None]] = []
        self._codes: set[grpc.StatusCode] = set()
        self._fails_everywhere = False
        self._generated: list[int] = []
        self._run = Run(0, (), 0, 0, 0, 0)
        chosen = balancer.choose(endpoints(), prompt, self)
        self._use(chosen, self._connected(chosen))

    @property
    def endpoint(self) -> Endpoint:
        """The replica that serves the request now."""
        return self._endpoint

    async def run(self, run: Run) -> None:
        """See `Verifier`."""
        self._run, self._generated = run, []
        await self._verifier.run(run)

    async def candidates(self, candidates: Candidates) -> None:
        """See `Verifier`."""
        await self._verifier.candidates(candidates)

    async def grant(self, grant: Grant) -> None:
        """See `Verifier`."""
        patience_us = self._run.patience_us if grant.patience_us is None else grant.patience_us
        self._run = replace(self._run, credit=self._run.credit + grant.credit, patience_us=patience_us)
        await self._verifier.grant(grant)

    async def passes(self) -> AsyncIterator[Pass]:
        """See `Verifier`."""
        while True:
            try:
                async for result in self._verifier.passes():
                    self._tried = {self._endpoint.address}
                    self._failures, self._codes = [], set()
                    self._generated += result.token_ids
                    yield result
                    if result.finish_reason is not None:
                        return
                error: DraftBridgeError = Unreachable(self._endpoint.address, "its stream ended in mid-generation")
            except DraftBridgeError as caught:
                error = caught
            await self._move(error)

    def on_commit(self) -> None:
        """Records that the replica works: a pass was found correct, and committed."""
        if self._tried == {self._endpoint.address}:  # otherwise it was another replica's
            self._balancer.on_success(self._endpoint)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Records that the replica failed if its passes violate the contract, which shows when they are committed."""
        try:
            yield
        except TargetFault:
            if not self._fails_everywhere:
                self._balancer.on_failure(self._endpoint, self)
            raise

    def close(self) -> None:
        """Ends the stream, and with it the session at the other end."""
        self._verifier.close()
        self._load.close()
        self._balancer.closed(self._endpoint, self)

    def _connected(self, endpoint: Endpoint) -> RemoteVerifier:
        """Opens a stream to a replica. Raises `Unreachable` if it has left its host name, which closes its channel."""
        try:
            return self._connect(endpoint)
        except aio.UsageError as error:
            raise Unreachable(endpoint.address, "it has left its host name") from error

    def _use(self, endpoint: Endpoint, verifier: RemoteVerifier) -> None:
        self._endpoint, self._verifier, self._load = endpoint, verifier, ExitStack()
        self._load.enter_context(endpoint.estimates.request())
        self._tried.add(endpoint.address)
        self._balancer.opened(endpoint, self._prompt)

    async def _move(self, error: DraftBridgeError) -> None:
        """Resumes on another replica. Raises the error if none is left, or if it would fail there too."""
        self._codes.add(code_of(error))
        if is_broken(error):
            self._failures.append(self._balancer.on_failure(self._endpoint, self))
        self._on_error(self._endpoint, error)
        others = [one for one in self._endpoints() if one.address not in self._tried]
        if not others and len(self._tried) > 1 and len(self._codes) == 1 and self._codes.issubset(_FAULTY_CODES):
            self._fails_everywhere = True
            for take_back in self._failures:
                take_back()
        if not others or not is_of_replica(error):
            raise _named(error, self._endpoint)
        chosen = self._balancer.choose(others, self._prompt, self)
        verifier = self._connected(chosen)
        self.close()
        self._use(chosen, verifier)
        await self._verifier.run(self._resumed())

    def _resumed(self) -> Run:
        """Returns the run that continues after the passes so far."""
        run, spell = self._run, self._endpoint.model.vocabulary.token_bytes
        offset, empty = run.byte_offset, run.empty_token_count
        for id_ in self._generated:
            data = spell(id_)
            offset, empty = offset + len(data), 0 if data else empty + 1
        count = len(self._generated)
        return replace(
            run,
            token_ids=(*run.token_ids, *self._generated),
            byte_offset=offset,
            empty_token_count=empty,
            credit=run.credit - count,
            generated_token_count=run.generated_token_count + count,
        )


def _named(error: DraftBridgeError, endpoint: Endpoint) -> DraftBridgeError:
    """Returns an error whose text shows where a limit is that the bridge has, too."""
    if isinstance(error, RemoteError) and error.reason in _SERVER_LIMITS:
        text = f"the target at {endpoint.address} refuses this bridge: {error}"
        return RemoteError(error.code, error.reason, text, error.metadata)
    return error
