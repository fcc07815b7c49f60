"""Implements DraftService; each stream has one session."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation
from bridge.sampling.sampler import SamplingParameters
from draftbridge.v1 import draft_pb2, draft_pb2_grpc
from services.model.draft.credit import CreditedSession
from services.rpc import codec, limits
from services.rpc.streams import RoleServicer, exchange

# Opens a session, given sampling parameters and a seed.
OpenSession = Callable[[SamplingParameters, int], Awaitable[CreditedSession]]


class DraftServicer(RoleServicer[OpenSession], draft_pb2_grpc.DraftServiceServicer):
    """Serves one draft; see `RoleServicer`. gRPC prescribes the method name."""

    role = "draft"

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """See the contract."""
        open_session = self.opener
        requests = aiter(request_iterator)
        opening, sampling = await self.read_opening(requests)
        with closing(await open_session(sampling, opening.seed)) as session:

            async def on_request(request: draft_pb2.DraftRequest) -> None:
                match request.WhichOneof("kind"):
                    case "sync":
                        await session.sync(limits.read_sync(request.sync, self._model))
                    case "grant":
                        await session.grant(request.grant.epoch, request.grant.credit)
                    case kind:
                        raise ProtocolViolation(f"got {kind or 'no kind'} after open: send sync or grant")

            async for proposal in exchange(requests, on_request, session.on_end_of_requests, session.proposals()):
                yield codec.write_proposal(proposal)
