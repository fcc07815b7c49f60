"""Gives the zoo's drafts to the sequences of engines, of which only a limited number has one at a time."""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import perf_counter_ns

from cachetools import TTLCache

from bridge.errors import DraftBridgeError
from bridge.guest import Guest, Held
from bridge.guest_sequence import GuestOpening
from bridge.ports import Proposal
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.source import DRAFT, Draft
from draftbridge.v1 import candidate_pb2
from services.bridge.endpoint import Endpoint, key_of
from services.bridge.gateway import BalancedDrafter
from services.bridge.replicas import Balancer, blocks_of, is_of_replica
from services.bridge.zoo import Zoo

# A sequence that its engine has not named for this time does not keep its draft from any other.
_IDLE_NS = 10_000_000_000
# How long sequences use other replicas than one that has refused a stream, and how many of such are remembered.
_REFUSED_SECONDS, _MAX_REFUSED = 10.0, 1024


class _Drafter(BalancedDrafter):
    """A draft's stream for one sequence. `on_close` is called when the stream is closed, perhaps twice.

    `on_error` receives the error that ends it.
    """

    on_close: Callable[[], object] = staticmethod(lambda: None)
    on_error: Callable[[DraftBridgeError], object] = staticmethod(lambda error: None)

    async def proposals(self) -> AsyncIterator[Proposal]:
        """See `Drafter`."""
        try:
            async for proposal in super().proposals():
                yield proposal
        except DraftBridgeError as error:
            self.on_error(error)
            raise

    def close(self) -> None:
        super().close()
        self.on_close()


class GuestDrafts:
    """The drafts of all guests' sequences, at most `limit`.

    Engines report late, or never, that a sequence has ended. So at the limit, a new sequence takes the draft of the
    sequence that was named least recently, unless its engine's last step named it.
    """

    def __init__(self, zoo: Zoo, limit: int, balancer: Balancer) -> None:
        self._zoo, self._limit, self._balancer = zoo, limit, balancer
        self._users: dict[_Drafter, tuple[Guest, Held]] = {}
        # The addresses of replicas that have refused a stream. Such a one has the fewest streams, so it would be chosen
        # again and again.
        self._refused: TTLCache[str, bool] = TTLCache(_MAX_REFUSED, _REFUSED_SECONDS)

    def endpoint(self, opening: candidate_pb2.ProposeOpen) -> Endpoint | None:
        """Returns the draft that an engine has asked for, if it is connected."""
        if opening.sources and DRAFT not in opening.sources:
            return None
        with suppress(DraftBridgeError):  # a draft that is away may return
            return self._zoo.draft(opening.draft)
        return None

    def find(
        self, guest: Guest, held: Held, is_new: bool, shared: GuestOpening, opening: candidate_pb2.ProposeOpen
    ) -> Draft | None:
        """Returns a draft's stream for a sequence; None without a connected draft, or if all are in use."""
        endpoint = self.endpoint(opening)
        if endpoint is None or not self._make_room(is_new):
            return None
        prompt, request = blocks_of(Request(tuple(held.tokens))), object()
        replicas = self._zoo.replicas(endpoint)
        usable = [one for one in replicas if one.address not in self._refused] or replicas
        replica = self._balancer.choose(usable, prompt, request)
        # The engine's sampling is not known; a greedy draft is right most often.
        drafter = _Drafter(self._zoo, replica, SamplingParameters(), 0, self._balancer, prompt, request)
        self._users[drafter] = guest, held
        drafter.on_close = lambda: self._users.pop(drafter, None)

        def on_error(error: DraftBridgeError) -> None:
            if is_of_replica(error):
                self._refused[replica.address] = True

        drafter.on_error = on_error
        competes = replica.model.competes_with(shared.model)
        times = shared.estimates.draft(key_of(replica), replica.model.forward_costs, competes=competes)
        return Draft(replica.model, drafter, times, on_fault=drafter.on_fault)

    def _make_room(self, is_new: bool) -> bool:
        """Returns whether one more sequence may have a draft, after another one has lost it if necessary.

        A sequence that is not new takes no draft from one that its engine may name in the next step. Otherwise an
        engine that names different sequences in each step would exchange their drafts all the time.
        """
        if len(self._users) < self._limit:
            return True
        long_ago = perf_counter_ns() - _IDLE_NS
        idle = [
            (held.named_ns, held.sequence)
            for guest, held in self._users.values()
            if held.sequence and held.named_ns < max(long_ago, guest.stepped_ns if is_new else 0)
        ]
        if idle:
            min(idle, key=lambda one: one[0])[1].release_draft()
        return len(self._users) < self._limit
